// What sampler.cpp needs done to every logit of a row, for kernels_impl.h.
#pragma once

namespace outpace {
namespace {

float top(const float* x, size_t n) {
    Floats best = fill(-__builtin_inff());
    Ints broken = fill(int32_t(0));
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Floats v = load(x + i);
        best = choose(v > best, v, best);
        // The bits of a NaN's absolute value lie above those of infinity.
        broken = choose((bits(v) & 0x7fffffff) > fill(int32_t(0x7f800000)), fill(int32_t(1)), broken);
    }
    float result = largest(best);
    bool nan = sum(broken) != 0;
    for (; i < n; ++i) {
        nan |= x[i] != x[i];
        result = x[i] > result ? x[i] : result;
    }
    return nan ? __builtin_nanf("") : result;
}

size_t at_least(const float* x, size_t n, float cut, size_t limit, int32_t* at) {
    size_t found = 0, i = 0;
    const Floats low = fill(cut);
    const auto scalar = [&](size_t end) {
        for (; i < end; ++i) {
            if (x[i] >= cut && found < limit) at[found++] = static_cast<int32_t>(i);
        }
    };
    for (; i + LANES <= n && found < limit; i += LANES) {
        const Floats v = load(x + i);
        const Ints misses = low > v;
        if (sum(misses) == -LANES) continue;
        const size_t end = i + LANES;
        scalar(end);
        i = end - LANES;
    }
    if (found < limit) scalar(n);
    return found;
}

double weight_sum(const float* x, size_t n, float top, float inverse) {
    double total = 0;
    size_t i = 0;
    const Floats high = fill(top), by = fill(inverse);
    while (i + LANES <= n) {
        Floats part = fill(0.0f);  // a short run: its round-off stays small
        for (int run = 0; run < 16 && i + LANES <= n; ++run, i += LANES) part = part + exp((load(x + i) - high) * by);
        total += sum(part);
    }
    if (i < n) {
        float rest[LANES];
        for (float& v : rest) v = -__builtin_inff();
        std::memcpy(rest, x + i, (n - i) * sizeof(float));
        total += sum(exp((load(rest) - high) * by));
    }
    return total;
}

// Bit j: token first + j of 16 may beat `best`. ids: null, or their ids [16]. bound: [16], at least
// exp((x - top) * inverse) / 1.0001.
OUTPACE_INLINE uint32_t may_win(size_t first, const int64_t* ids, uint64_t key, double best, const Floats& bound) {
    uint32_t wins = 0;
#if defined(__AVX512DQ__)
    const __m512i lanes = _mm512_set_epi64(8, 7, 6, 5, 4, 3, 2, 1), golden = _mm512_set1_epi64(0x9E3779B97F4A7C15ll);
    const __m512i m1 = _mm512_set1_epi64(0xBF58476D1CE4E5B9ll), m2 = _mm512_set1_epi64(0x94D049BB133111EBll);
    const __m512d limit = _mm512_set1_pd(best * 1.0001), one = _mm512_set1_pd(1.0), half = _mm512_set1_pd(0.5);
    for (int part = 0; part < 2; ++part) {
        const __m512i token = ids ? _mm512_add_epi64(_mm512_loadu_si512(ids + 8 * part), _mm512_set1_epi64(1))
                                  : _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(first + 8 * part)), lanes);
        __m512i z = _mm512_add_epi64(_mm512_mullo_epi64(token, golden), _mm512_set1_epi64(static_cast<int64_t>(key)));
        z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), m1);
        z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), m2);
        z = _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
        const __m512d u = _mm512_mul_pd(_mm512_add_pd(_mm512_cvtepi64_pd(_mm512_srli_epi64(z, 11)), half),
                                        _mm512_set1_pd(0x1p-53));
        const __m256 w = part ? _mm512_extractf32x8_ps((__m512)bound.part[0], 1)
                              : _mm512_castps512_ps256((__m512)bound.part[0]);
        const __mmask8 mask = _mm512_cmp_pd_mask(_mm512_sub_pd(one, u), _mm512_mul_pd(limit, _mm512_cvtps_pd(w)),
                                                 _CMP_LT_OQ);
        wins |= static_cast<uint32_t>(mask) << (8 * part);
    }
#else
    float w[LANES];
    store(w, bound);
    for (int lane = 0; lane < LANES; ++lane) {
        const uint64_t token = ids ? static_cast<uint64_t>(ids[lane]) : static_cast<uint64_t>(first) + lane;
        uint64_t z = (token + 1) * 0x9E3779B97F4A7C15ull + key;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        const double u = (static_cast<double>(static_cast<int64_t>(z >> 11)) + 0.5) * 0x1p-53;
        wins |= static_cast<uint32_t>(1.0 - u < best * 1.0001 * static_cast<double>(w[lane])) << lane;
    }
#endif
    return wins;
}

size_t racers(const float* x, const int64_t* ids, size_t first, size_t last, float top, float inverse, uint64_t key,
              double best, int32_t* at) {
    size_t found = 0;
    const Floats high = fill(top), by = fill(inverse);
    for (size_t i = first; i < last; i += LANES) {
        Floats logits;
        const int64_t* own = ids ? ids + i : nullptr;
        int64_t tail[LANES] = {};
        if (i + LANES <= last) {
            logits = load(x + i);
        } else {
            float rest[LANES];
            for (float& v : rest) v = -__builtin_inff();
            std::memcpy(rest, x + i, (last - i) * sizeof(float));
            logits = load(rest);
            if (ids) std::memcpy(tail, own, (last - i) * sizeof(int64_t)), own = tail;
        }
        uint32_t wins = may_win(i, own, key, best, exp((logits - high) * by));
        for (; wins; wins &= wins - 1) at[found++] = static_cast<int32_t>(i) + __builtin_ctz(wins);
    }
    return found;
}

}  // namespace
}  // namespace outpace
