#include "cpu.h"

#include <cstdint>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(_WIN32)
#include <windows.h>
#endif

namespace outpace {
namespace {

#if defined(__x86_64__)
// Intel's manual, volume 2, CPUID. Not the compiler's __builtin_cpu_supports: compilers of some age know no AVX-VNNI,
// and on Windows it needs a library of theirs.
struct Registers {
    uint32_t a, b, c, d;
};

Registers cpuid(uint32_t leaf, uint32_t part = 0) {
    Registers r;
    asm volatile("cpuid" : "=a"(r.a), "=b"(r.b), "=c"(r.c), "=d"(r.d) : "a"(leaf), "c"(part));
    return r;
}

bool bit(uint32_t value, int n) { return value >> n & 1; }

Cpu detect() {
    Cpu found;
    const uint32_t leaves = cpuid(0).a;
    const Registers one = cpuid(1);
    if (leaves < 7 || !bit(one.c, 27)) return found;  // no OSXSAVE: the system keeps no wide registers
    uint32_t kept, high;
    asm volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    const bool keeps_ymm = (kept & 0x06) == 0x06, keeps_zmm = (kept & 0xe6) == 0xe6;
    const Registers seven = cpuid(7);
    found.avx2 = keeps_ymm && bit(one.c, 28) && bit(seven.b, 5) && bit(one.c, 12) && bit(one.c, 29);
    found.avxvnni = found.avx2 && seven.a >= 1 && bit(cpuid(7, 1).a, 4);
    found.avx512 = found.avx2 && keeps_zmm && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31);
    found.avx512vnni = found.avx512 && bit(seven.c, 11);
    return found;
}
#elif defined(__aarch64__) && defined(__linux__)
Cpu detect() {
    Cpu found;
    found.dotprod = getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
    return found;
}
#elif defined(__aarch64__) && defined(_WIN32)
Cpu detect() {
    Cpu found;
    found.dotprod = IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
    return found;
}
#elif defined(__aarch64__) && defined(__APPLE__)
Cpu detect() {
    Cpu found;
    found.dotprod = true;  // from the first of Apple's own Mac processors on
    return found;
}
#else
Cpu detect() { return {}; }
#endif

}  // namespace

const Cpu& cpu() {
    static const Cpu found = detect();
    return found;
}

}  // namespace outpace
