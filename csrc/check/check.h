// The check of the native core without Python, for processors and systems that the Python tests do not reach: run by
// `make check-kernels`, and for ARM under an emulator by `make check-neon`. Prints a digest of whole passes that must be
// the same everywhere.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace outpace {

// SplitMix64: the same numbers on every system, which <random>'s distributions do not promise.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    int within(int low, int high) {  // both included
        return low + static_cast<int>(next() % static_cast<uint64_t>(high - low + 1));
    }
    float real() { return static_cast<float>(static_cast<int32_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }  // -1 .. 1
    std::vector<float> reals(size_t n, float scale = 1.0f) {
        std::vector<float> values(n);
        for (float& v : values) v = real() * scale;
        return values;
    }
    std::vector<int8_t> bytes(size_t n, int low, int high) {
        std::vector<int8_t> values(n);
        for (int8_t& v : values) v = static_cast<int8_t>(within(low, high));
        return values;
    }

  private:
    uint64_t state_;
};

// Which bits a NaN has is the processor's choice; that it is one is not.
inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return value != value ? 0x7fc00000u : bits;
}

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void expect(bool good, const std::string& what) {
    if (!good) throw Failure(what);
}

// Every kernel of `family` but attention against the portable one, over random shapes. Throws Failure.
// Attention is compared by whole passes.
void check_kernels(const Kernels& family, uint64_t seed, int rounds);

}  // namespace outpace
