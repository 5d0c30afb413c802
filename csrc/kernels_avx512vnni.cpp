// AVX512 with VNNI: Intel from Cascade Lake and Ice Lake on, AMD from Zen 4 on.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include "kernels_impl.h"

namespace outpace {
const Kernels* kernels_avx512vnni() {
    static constexpr Kernels kernels = family("avx512vnni", true);
    const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
    return runs ? &kernels : nullptr;
}
}  // namespace outpace
#else
namespace outpace {
const Kernels* kernels_avx512vnni() { return nullptr; }
}  // namespace outpace
#endif
