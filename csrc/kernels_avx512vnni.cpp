// AVX512 with VNNI: Intel from Cascade Lake and Ice Lake on, AMD from Zen 4 on.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include "kernels_impl.h"

namespace outpace {
static constexpr Kernels table = family("avx512vnni", true);
const Kernels* const kernels_avx512vnni = &table;
}  // namespace outpace
#else
namespace outpace {
const Kernels* const kernels_avx512vnni = nullptr;
}  // namespace outpace
#endif
