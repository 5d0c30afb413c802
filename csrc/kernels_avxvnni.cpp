// AVX2 with AVX-VNNI: Intel's client processors from Alder Lake on.
#include "kernels.h"

#if defined(__AVX2__) && defined(__AVXVNNI__) && defined(__FMA__) && defined(__F16C__)
#include "kernels_impl.h"

namespace outpace {
static constexpr Kernels table = family("avxvnni", true);
const Kernels* const kernels_avxvnni = &table;
}  // namespace outpace
#else
namespace outpace {
const Kernels* const kernels_avxvnni = nullptr;
}  // namespace outpace
#endif
