// AVX2 with FMA and F16C: Intel from Haswell on, AMD from Excavator and Zen on.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels_impl.h"

namespace outpace {
static constexpr Kernels table = family("avx2", false);
const Kernels* const kernels_avx2 = &table;
}  // namespace outpace
#else
namespace outpace {
const Kernels* const kernels_avx2 = nullptr;
}  // namespace outpace
#endif
