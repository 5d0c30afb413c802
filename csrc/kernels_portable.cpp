// Plain C++, for every other processor. Not fast where the processor has no fused multiply-add: the same bits come first.
#include "kernels_impl.h"

namespace outpace {
static constexpr Kernels table = family("portable", false);
const Kernels* const kernels_portable = &table;
}  // namespace outpace
