// Vectors of 16 lanes on any processor, for kernels_impl.h alone: each family's file is compiled with its own flags, so
// everything here has internal linkage, and nothing that the linker could share (std templates) may be used beside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "matrix.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace outpace {
namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int LANES = 16, PARTS = LANES / WIDTH;

typedef float FloatPart __attribute__((vector_size(4 * WIDTH)));
typedef int32_t IntPart __attribute__((vector_size(4 * WIDTH)));
typedef int8_t BytePart __attribute__((vector_size(4 * WIDTH)));

struct Floats { FloatPart part[PARTS]; };
struct Ints { IntPart part[PARTS]; };     // also the result of comparisons: -1 or 0
struct Bytes { BytePart part[PARTS]; };   // 64: 16 lanes x 4

template <int N> struct Index {
    constexpr operator int() const { return N; }
};

template <int I, int N, class Body> OUTPACE_INLINE void unroll_from(const Body& body) {
    if constexpr (I < N) {
        body(Index<I>{});
        unroll_from<I + 1, N>(body);
    }
}

// body(Index<0>), ..., body(Index<N - 1>) written out, so that arrays indexed by it live in registers.
template <int N, class Body> OUTPACE_INLINE void unroll(const Body& body) { unroll_from<0, N>(body); }

#define OUTPACE_EACH(result, expression)                              \
    unroll<PARTS>([&](auto i) __attribute__((always_inline)) { result.part[i] = expression; })

OUTPACE_INLINE Floats load(const float* from) {
    Floats r;
    std::memcpy(&r, from, sizeof r);
    return r;
}

OUTPACE_INLINE void store(float* to, const Floats& v) { std::memcpy(to, &v, sizeof v); }

OUTPACE_INLINE Floats fill(float x) {
    Floats r;
    OUTPACE_EACH(r, x - FloatPart{});  // minus, not plus, zero: -0 stays -0, and compilers see that nothing is computed
    return r;
}

OUTPACE_INLINE Ints fill(int32_t x) {
    Ints r;
    OUTPACE_EACH(r, IntPart{} + x);
    return r;
}

OUTPACE_INLINE Floats operator+(const Floats& a, const Floats& b) {
    Floats r;
    OUTPACE_EACH(r, a.part[i] + b.part[i]);
    return r;
}

OUTPACE_INLINE Floats operator-(const Floats& a, const Floats& b) {
    Floats r;
    OUTPACE_EACH(r, a.part[i] - b.part[i]);
    return r;
}

OUTPACE_INLINE Floats operator*(const Floats& a, const Floats& b) {
    Floats r;
    OUTPACE_EACH(r, a.part[i] * b.part[i]);
    return r;
}

OUTPACE_INLINE Floats operator/(const Floats& a, const Floats& b) {
    Floats r;
    OUTPACE_EACH(r, a.part[i] / b.part[i]);
    return r;
}

OUTPACE_INLINE Ints operator>(const Floats& a, const Floats& b) {
    Ints r;
    OUTPACE_EACH(r, a.part[i] > b.part[i]);
    return r;
}

OUTPACE_INLINE Ints operator>(const Ints& a, const Ints& b) {
    Ints r;
    OUTPACE_EACH(r, a.part[i] > b.part[i]);
    return r;
}

OUTPACE_INLINE Floats choose(const Ints& mask, const Floats& yes, const Floats& no) {
    Floats r;
    OUTPACE_EACH(r, mask.part[i] ? yes.part[i] : no.part[i]);
    return r;
}

OUTPACE_INLINE Ints choose(const Ints& mask, const Ints& yes, const Ints& no) {
    Ints r;
    OUTPACE_EACH(r, mask.part[i] ? yes.part[i] : no.part[i]);
    return r;
}

OUTPACE_INLINE Ints bits(const Floats& v) {
    Ints r;
    std::memcpy(&r, &v, sizeof r);
    return r;
}

OUTPACE_INLINE Floats from_bits(const Ints& v) {
    Floats r;
    std::memcpy(&r, &v, sizeof r);
    return r;
}

OUTPACE_INLINE Ints operator+(const Ints& a, const Ints& b) {
    Ints r;
    OUTPACE_EACH(r, a.part[i] + b.part[i]);
    return r;
}

OUTPACE_INLINE Ints operator-(const Ints& a, const Ints& b) {
    Ints r;
    OUTPACE_EACH(r, a.part[i] - b.part[i]);
    return r;
}

OUTPACE_INLINE Ints operator&(const Ints& a, int32_t b) {
    Ints r;
    OUTPACE_EACH(r, a.part[i] & b);
    return r;
}

OUTPACE_INLINE Ints shift_left(const Ints& a, int by) {
    Ints r;
    OUTPACE_EACH(r, a.part[i] << by);
    return r;
}

OUTPACE_INLINE Floats to_float(const Ints& v) {
    Floats r;
    OUTPACE_EACH(r, __builtin_convertvector(v.part[i], FloatPart));
    return r;
}

// a * b + c, rounded once. Without the instruction this is a library call a lane: not worth writing out in place.
#if defined(__FMA__) || defined(__aarch64__)
OUTPACE_INLINE
#else
__attribute__((noinline))
#endif
Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    Floats r;
#if defined(__AVX512F__)
    r.part[0] = (FloatPart)_mm512_fmadd_ps((__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0]);
#elif defined(__AVX2__)
    OUTPACE_EACH(r, (FloatPart)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]));
#elif defined(__aarch64__)
    OUTPACE_EACH(r, (FloatPart)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]));
#else
    float x[LANES], y[LANES], z[LANES];
    std::memcpy(x, &a, sizeof x);
    std::memcpy(y, &b, sizeof y);
    std::memcpy(z, &c, sizeof z);
    for (int i = 0; i < LANES; ++i) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    std::memcpy(&r, z, sizeof z);
#endif
    return r;
}

// The lanes folded in halves, always in this order: lane i with lane i + 8, then i + 4, i + 2, i + 1.
#if defined(__AVX2__)
template <class Two> OUTPACE_INLINE float fold(const Floats& v, const Two& two) {
#if defined(__AVX512F__)
    const __m256 low = _mm512_castps512_ps256((__m512)v.part[0]);
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v.part[0]), 1));
#else
    const __m256 low = (__m256)v.part[0], high = (__m256)v.part[1];
#endif
    __m128 a = two(_mm256_castps256_ps128(low), _mm256_castps256_ps128(high));
    a = two(a, two(_mm256_extractf128_ps(low, 1), _mm256_extractf128_ps(high, 1)));
    a = two(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(two(a, _mm_movehdup_ps(a)));
}

OUTPACE_INLINE float sum(const Floats& v) {
    return fold(v, [](__m128 a, __m128 b) __attribute__((always_inline)) { return _mm_add_ps(a, b); });
}

OUTPACE_INLINE float largest(const Floats& v) {
    return fold(v, [](__m128 a, __m128 b) __attribute__((always_inline)) { return _mm_max_ps(a, b); });
}
#else
template <class Two> OUTPACE_INLINE float fold(const Floats& v, const Two& two) {
    float a[LANES];
    store(a, v);
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) a[i] = two(a[i], a[i + half]);
    }
    return a[0];
}

OUTPACE_INLINE float sum(const Floats& v) {
    return fold(v, [](float a, float b) { return a + b; });
}

OUTPACE_INLINE float largest(const Floats& v) {
    return fold(v, [](float a, float b) { return a > b ? a : b; });
}
#endif

OUTPACE_INLINE int32_t sum(const Ints& v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v.part[0]);
#elif defined(__aarch64__)
    const IntPart all = (v.part[0] + v.part[1]) + (v.part[2] + v.part[3]);
    return vaddvq_s32((int32x4_t)all);
#elif defined(__AVX2__)
    const __m256i both = (__m256i)(v.part[0] + v.part[1]);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
#else
    int32_t a[LANES], total = 0;
    std::memcpy(a, &v, sizeof a);
    for (int i = 0; i < LANES; ++i) total += a[i];
    return total;
#endif
}

OUTPACE_INLINE int32_t largest(const Ints& v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v.part[0]);
#elif defined(__aarch64__)
    const int32x4_t a = vmaxq_s32((int32x4_t)v.part[0], (int32x4_t)v.part[1]);
    const int32x4_t b = vmaxq_s32((int32x4_t)v.part[2], (int32x4_t)v.part[3]);
    return vmaxvq_s32(vmaxq_s32(a, b));
#elif defined(__AVX2__)
    const __m256i both = _mm256_max_epi32((__m256i)v.part[0], (__m256i)v.part[1]);
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
#else
    int32_t a[LANES];
    std::memcpy(a, &v, sizeof a);
    for (int i = 1; i < LANES; ++i) a[0] = a[i] > a[0] ? a[i] : a[0];
    return a[0];
#endif
}

OUTPACE_INLINE Bytes load_bytes(const uint8_t* from) {
    Bytes r;
    std::memcpy(&r, from, sizeof r);
    return r;
}

OUTPACE_INLINE Bytes low_nibbles(const Bytes& v) {
    Bytes r;
    OUTPACE_EACH(r, v.part[i] & 15);
    return r;
}

OUTPACE_INLINE Bytes high_nibbles(const Bytes& v) {
    Bytes r;
#if defined(__AVX512F__)
    const __m512i shifted = _mm512_srli_epi16((__m512i)v.part[0], 4);
    r.part[0] = (BytePart)_mm512_and_si512(shifted, _mm512_set1_epi8(15));
#elif defined(__AVX2__)
    OUTPACE_EACH(r, (BytePart)_mm256_and_si256(_mm256_srli_epi16((__m256i)v.part[i], 4), _mm256_set1_epi8(15)));
#else
    typedef uint8_t Unsigned __attribute__((vector_size(4 * WIDTH)));
    OUTPACE_EACH(r, (BytePart)((Unsigned)v.part[i] >> 4));
#endif
    return r;
}

// start[lane] + sum over 4 of w[lane][j] * x[j], exact. Weights are 0 .. 255 with VNNI, else -128 .. 127 (or nibbles);
// activations -127 .. 127.
OUTPACE_INLINE Ints dot4(const Ints& start, const Bytes& w, const int8_t* x) {
    Ints r;
#if defined(__AVX512VNNI__)
    // Written as assembly because compilers broadcast the 4 activations in an instruction of its own; the multiplication
    // does it for nothing, and the instructions a cycle are what limits many rows.
    struct __attribute__((packed, may_alias)) Four { int32_t value; };
    r = start;
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(r.part[0]) : "v"(w.part[0]), "m"(*reinterpret_cast<const Four*>(x)));
#elif defined(__AVXVNNI__)
    int32_t four;
    std::memcpy(&four, x, 4);
    const __m256i activations = _mm256_set1_epi32(four);
    OUTPACE_EACH(r, (IntPart)_mm256_dpbusd_avx_epi32((__m256i)start.part[i], (__m256i)w.part[i], activations));
#elif defined(__AVX2__)
    // The instruction multiplies unsigned by signed and saturates at 16 bits; |w| * (x with w's sign) is at most
    // 2 * 128 * 127 and fits.
    int32_t four;
    std::memcpy(&four, x, 4);
    const __m256i activations = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    unroll<PARTS>([&](auto i) __attribute__((always_inline)) {
        const __m256i weights = (__m256i)w.part[i];
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(activations, weights));
        const __m256i fours = _mm256_madd_epi16(pairs, ones);
        r.part[i] = (IntPart)_mm256_add_epi32((__m256i)start.part[i], fours);
    });
#elif defined(__ARM_FEATURE_DOTPROD)
    int32_t four;
    std::memcpy(&four, x, 4);
    const int8x16_t activations = vreinterpretq_s8_s32(vdupq_n_s32(four));
    OUTPACE_EACH(r, (IntPart)vdotq_s32((int32x4_t)start.part[i], (int8x16_t)w.part[i], activations));
#else
    int8_t weights[64];
    std::memcpy(weights, &w, 64);
    int32_t lanes[LANES];
    std::memcpy(lanes, &start, sizeof lanes);
    for (int lane = 0; lane < LANES; ++lane) {
        lanes[lane] += weights[4 * lane] * x[0] + weights[4 * lane + 1] * x[1] + weights[4 * lane + 2] * x[2] +
                       weights[4 * lane + 3] * x[3];
    }
    std::memcpy(&r, lanes, sizeof r);
#endif
    return r;
}

// 16 float16 values.
OUTPACE_INLINE Floats load_half(const uint8_t* from) {
    Floats r;
#if defined(__AVX512F__)
    r.part[0] = (FloatPart)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
    OUTPACE_EACH(r, (FloatPart)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i)));
#elif defined(__aarch64__)
    uint16_t halves[LANES];
    std::memcpy(halves, from, sizeof halves);
    OUTPACE_EACH(r, (FloatPart)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + 4 * i))));
#else
    float values[LANES];
    for (int i = 0; i < LANES; ++i) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31;
        const uint32_t mantissa = half & 1023;
        if (exponent == 0) {
            const float value = static_cast<float>(mantissa) * 0x1p-24f;
            values[i] = sign ? -value : value;
        } else {
            const uint32_t f = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13;
            std::memcpy(values + i, &f, 4);
        }
    }
    r = load(values);
#endif
    return r;
}

// To float16, 32 bytes: to the nearest, half to even; beyond the largest float16 that one, NaN stays NaN.
OUTPACE_INLINE void store_half(uint8_t* to, const Floats& v) {
    const Floats most = fill(65504.0f), least = fill(-65504.0f);
    Floats r = choose(v > most, most, v);
    r = choose(least > r, least, r);
#if defined(__AVX512F__)
    const __m256i half = _mm512_cvtps_ph((__m512)r.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
#elif defined(__AVX2__)
    unroll<PARTS>([&](auto i) __attribute__((always_inline)) {
        const __m128i half = _mm256_cvtps_ph((__m256)r.part[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, half);
    });
#else
    for (int i = 0; i < LANES; ++i) {
        uint32_t f;
        std::memcpy(&f, reinterpret_cast<const char*>(&r) + 4 * i, 4);
        const uint32_t sign = f >> 16 & 0x8000, magnitude = f & 0x7fffffff;
        uint32_t half;
        if (magnitude > 0x7f800000) {
            half = 0x7e00 | (magnitude >> 13 & 0x3ff);
        } else if (magnitude < 0x38800000) {  // below the least normal one: a multiple of 2^-24
            float value;
            std::memcpy(&value, &magnitude, 4);
            value = value * 0x1p24f + 8388608.0f;  // adding 2^23 rounds to a whole number
            std::memcpy(&half, &value, 4);
            half &= 0x7fffff;
        } else {
            half = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
        }
        const uint16_t bits = static_cast<uint16_t>(sign | half);
        std::memcpy(to + 2 * i, &bits, 2);
    }
#endif
}

// 16 bfloat16 values.
OUTPACE_INLINE Floats load_bfloat(const uint8_t* from) {
    Ints r;
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    r.part[0] = (IntPart)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__)
    OUTPACE_EACH(r, (IntPart)_mm256_slli_epi32(
                        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i)), 16));
#else
    uint32_t values[LANES];
    for (int i = 0; i < LANES; ++i) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        values[i] = static_cast<uint32_t>(half) << 16;
    }
    std::memcpy(&r, values, sizeof r);
#endif
    return from_bits(r);
}

// Whole numbers of -128 .. 127, 16 bytes.
OUTPACE_INLINE void store_int8(int8_t* to, const Ints& v) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)v.part[0]));
#elif defined(__AVX2__)
    const auto halves = [](const IntPart& part) __attribute__((always_inline)) {
        return _mm_packs_epi32(_mm256_castsi256_si128((__m256i)part), _mm256_extracti128_si256((__m256i)part, 1));
    };
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(halves(v.part[0]), halves(v.part[1])));
#else
    int32_t a[LANES];
    std::memcpy(a, &v, sizeof a);
    for (int i = 0; i < LANES; ++i) to[i] = static_cast<int8_t>(a[i]);
#endif
}

// 16 bytes with sign.
OUTPACE_INLINE Floats load_int8(const uint8_t* from) {
#if defined(__AVX512F__)
    Floats r;
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    r.part[0] = (FloatPart)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    return r;
#elif defined(__AVX2__)
    Floats r;
    OUTPACE_EACH(r, (FloatPart)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * i)))));
    return r;
#else
    float values[LANES];
    for (int i = 0; i < LANES; ++i) values[i] = static_cast<int8_t>(from[i]);
    return load(values);
#endif
}

constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: x + ROUND rounds x to a whole number, half to even, in its low bits

// e^x within 2 units in the last place; 0 below -87.3, 2^127.4 above 88.3; NaN stays NaN.
OUTPACE_INLINE Floats exp(const Floats& x) {
    const Floats low = fill(-87.33f), high = fill(88.3f);
    Floats t = choose(x > high, high, x);
    t = choose(low > t, low, t);
    const Floats shifted = fma(t, fill(1.44269504f), fill(ROUND));  // n = round(x / ln 2) in the low bits
    const Floats n = shifted - fill(ROUND);
    Floats f = fma(n, fill(-0.693359375f), t);  // x - n * ln 2, ln 2 in two parts (Cephes)
    f = fma(n, fill(2.12194440e-4f), f);
    Floats p = fill(1.9875691500e-4f);
    p = fma(p, f, fill(1.3981999507e-3f));
    p = fma(p, f, fill(8.3334519073e-3f));
    p = fma(p, f, fill(4.1665795894e-2f));
    p = fma(p, f, fill(1.6666665459e-1f));
    p = fma(p, f, fill(5.0000001201e-1f));
    p = fma(p, f * f, f) + fill(1.0f);
    const Ints power = shift_left(bits(shifted) - bits(fill(ROUND)) + fill(int32_t(127)), 23);
    return choose(low > x, fill(0.0f), p * from_bits(power));
}

// The first n (1 .. 16) of 16 lanes, the others 0.
OUTPACE_INLINE Floats load_some(const float* from, int n) {
    if (n >= LANES) return load(from);
    float a[LANES] = {};
    for (int i = 0; i < n; ++i) a[i] = from[i];
    return load(a);
}

OUTPACE_INLINE void store_some(float* to, const Floats& v, int n) {
    if (n >= LANES) {
        store(to, v);
    } else {
        float a[LANES];
        store(a, v);
        for (int i = 0; i < n; ++i) to[i] = a[i];
    }
}

}  // namespace
}  // namespace outpace
