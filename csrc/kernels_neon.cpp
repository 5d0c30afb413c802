// NEON with the 8-bit dot product: ARM from Cortex-A75 and Neoverse-N1 on, Apple from A11 and M1 on.
#include "kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "kernels_impl.h"

namespace outpace {
static constexpr Kernels table = family("neon", false);
const Kernels* const kernels_neon = &table;
}  // namespace outpace
#else
namespace outpace {
const Kernels* const kernels_neon = nullptr;
}  // namespace outpace
#endif
