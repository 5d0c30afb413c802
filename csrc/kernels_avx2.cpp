// AVX2 with FMA and F16C: Intel from Haswell on, AMD from Excavator and Zen on.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels_impl.h"

namespace outpace {
const Kernels* kernels_avx2() {
    static constexpr Kernels kernels = family("avx2", false);
    const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return runs ? &kernels : nullptr;
}
}  // namespace outpace
#else
namespace outpace {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace outpace
#endif
