// What this processor, and the system on it, can run: asked once, by code that any processor of the kind can run.
#pragma once

namespace outpace {

struct Cpu {
    bool avx2 = false;        // with FMA and F16C
    bool avxvnni = false;     // and AVX2
    bool avx512 = false;      // F, BW, DQ and VL, and AVX2
    bool avx512vnni = false;  // and AVX512
    bool dotprod = false;     // ARM's 8-bit dot product
};

const Cpu& cpu();

}  // namespace outpace
