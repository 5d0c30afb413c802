// The kernels of one processor family (see kernels.h). Included once by each kernels_<family>.cpp.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "sampler_impl.h"

namespace outpace {
namespace {

#if defined(OUTPACE_SMALL_TILES)  // a sanitizer's build: the same code, fewer copies of it
constexpr int TILE = 2, TILE_F32 = 2;
#elif defined(__AVX512F__)
constexpr int TILE = 16, TILE_F32 = 8;  // rows at once: their sums fill the 32 registers
#elif defined(__AVX2__)
constexpr int TILE = 4, TILE_F32 = 4;
#elif defined(__aarch64__)
constexpr int TILE = 4, TILE_F32 = 4;  // 32 registers of 4 lanes
#else
constexpr int TILE = 2, TILE_F32 = 2;
#endif

constexpr int PREFETCH = 4096;  // bytes ahead: what a core reads while memory answers, twice

template <bool HALF> OUTPACE_INLINE Floats load_scale(const uint8_t* from) {
    return HALF ? load_half(from) : load(reinterpret_cast<const float*>(from));
}

// The sum of products in an accumulator that began at one of the START fields: its bits are those of ROUND + sum. Where
// scale * ROUND needs no rounding, as with a float16 or a small whole number, scale * sum is one operation:
// fma(scale, from_bits(accumulator), -scale * ROUND), with the same bits as scale * counted(accumulator).
OUTPACE_INLINE Floats counted(const Ints& accumulator) { return from_bits(accumulator) - fill(ROUND); }

// ------------------------------------------------------------------------------------------------ matrix products

template <int BY> OUTPACE_INLINE Bytes shifted_left(const Bytes& v) {  // within words of 4 bytes; BY < 0: right
    typedef uint32_t WordPart __attribute__((vector_size(4 * WIDTH)));
    Bytes r;
    OUTPACE_EACH(r, (BytePart)(BY < 0 ? (WordPart)v.part[i] >> (BY < 0 ? -BY : 0) : (WordPart)v.part[i] << (BY < 0 ? 0 : BY)));
    return r;
}

template <int MASK> OUTPACE_INLINE Bytes with_bits(const Bytes& v, const Bytes& more) {
    Bytes r;
    OUTPACE_EACH(r, v.part[i] | (more.part[i] & MASK));
    return r;
}

// The 8 steps of a group's weights, as dot4 takes them.
template <Matrix::Kind K> OUTPACE_INLINE void unpack(const uint8_t* w, Bytes (&weights)[8]) {
    using Kind = Matrix::Kind;
    if constexpr (K == Kind::int8) {
        unroll<8>([&](auto j) __attribute__((always_inline)) { weights[j] = load_bytes(w + 64 * j); });
        return;
    }
    unroll<4>([&](auto j) __attribute__((always_inline)) {
        const Bytes pair = load_bytes(w + 64 * j);
        weights[j] = low_nibbles(pair);
        weights[j + 4] = high_nibbles(pair);
    });
    if constexpr (K == Kind::q3_k) {  // 4 more than the weight lies there, the kernel's base is -32
        unroll<8>([&](auto j) __attribute__((always_inline)) {
            OUTPACE_EACH(weights[j], weights[j].part[i] + 28);
        });
    }
    if constexpr (K == Kind::q5_k) {
        const Bytes fifth = load_bytes(w + 256);
        unroll<8>([&](auto j) __attribute__((always_inline)) {
            weights[j] = with_bits<16>(weights[j], shifted_left<4 - j>(fifth));
        });
    }
    if constexpr (K == Kind::q6_k) {
        unroll<8>([&](auto j) __attribute__((always_inline)) {
            const Bytes upper = load_bytes(w + 256 + j / 4 * 64);
            weights[j] = with_bits<48>(weights[j], shifted_left<4 - j % 4 * 2>(upper));
        });
    }
}

template <int BYTES> OUTPACE_INLINE void prefetch(const uint8_t* at) {
    unroll<(BYTES + 63) / 64>([&](auto j) __attribute__((always_inline)) { __builtin_prefetch(at + 64 * j); });
}

// 16 outputs of R rows: y = sum over groups, in order, of d * (scale * (sum of w * x) + offset * (sum of x)).
template <int R, Matrix::Kind K, bool OFFSET, bool HALF>
void tile_int8(const Matrix& m, const uint8_t* block, const int8_t* x, const float* meta, int start_field, float* y,
               size_t y_stride, int outs) {
    constexpr int SCALE = HALF ? 32 : 64, BYTES = Matrix::group_bytes(K), PAIR = SCALE * (OFFSET ? 4 : 2) + 2 * BYTES;
    Floats sums[R];
    unroll<R>([&](auto r) __attribute__((always_inline)) { sums[r] = fill(0.0f); });
    const auto group = [&](const uint8_t* factors, const uint8_t* w) __attribute__((always_inline)) {
        prefetch<PAIR / 2>(w + PREFETCH);
        Bytes weights[8];
        unpack<K>(w, weights);
        const Floats scale = load_scale<HALF>(factors), lift = scale * fill(-ROUND);
        Floats offset;
        if constexpr (OFFSET) offset = load_scale<HALF>(factors + 2 * SCALE);
        unroll<R>([&](auto r) __attribute__((always_inline)) {
            int32_t start;
            std::memcpy(&start, meta + start_field * R + r, 4);
            Ints dot = fill(start);
            unroll<8>([&](auto j) __attribute__((always_inline)) { dot = dot4(dot, weights[j], x + r * 32 + j * 4); });
            Floats part = HALF ? fma(scale, from_bits(dot), lift) : scale * counted(dot);
            if constexpr (OFFSET) part = fma(offset, fill(meta[Panels::SUM * R + r]), part);
            sums[r] = fma(fill(meta[Panels::D * R + r]), part, sums[r]);
        });
        x += R * GROUP;
        meta += R * Panels::FIELDS;
    };
    int g = 0;
    for (; g + 1 < m.groups; g += 2, block += PAIR) {
        group(block, block + PAIR - 2 * BYTES);
        group(block + SCALE, block + PAIR - BYTES);
    }
    if (g < m.groups) group(block, block + PAIR - 2 * BYTES);
    unroll<R>([&](auto r) __attribute__((always_inline)) { store_some(y + r * y_stride, sums[r], outs); });
}

// The same for k-kinds. With minima it is the same sum, scale and offset being products of a factor of the super-block
// and a small whole number. Without: d_x * (d * (first scale * (sum over 16 inputs) + last scale * (...))), where
// everything within d * (...) is a whole number below 2^24, so that float arithmetic does not round it.
template <int R, Matrix::Kind K>
void tile_super(const Matrix& m, const uint8_t* block, const int8_t* x, const float* meta, int, float* y,
                size_t y_stride, int outs) {
    constexpr size_t BYTES = Matrix::group_bytes(K), STEP = Matrix::super_bytes(K);
    Floats sums[R];
    unroll<R>([&](auto r) __attribute__((always_inline)) { sums[r] = fill(0.0f); });
    const uint8_t* factors = block;
    const uint8_t* min_factors = factors + m.factor_bytes();
    const uint8_t* scales = block + m.supers_at();
    for (int s = 0; s < m.groups / 8; ++s) {
        const Floats d = load_half(factors + s * 32);
        Floats dmin;
        if constexpr (!Matrix::halves(K)) dmin = fill(0.0f) - load_half(min_factors + s * 32);
        prefetch<256>(scales + 2 * STEP);
        const uint8_t* w = scales + 256;
        for (int g = 0; g < 8; ++g) {
            prefetch<BYTES>(w + 2 * STEP);
            Bytes weights[8];
            unpack<K>(w, weights);
            w += BYTES;
            if constexpr (Matrix::halves(K)) {
                const Floats first = load_int8(scales + 32 * g), last = load_int8(scales + 32 * g + 16);
                const Floats lift = first * fill(-ROUND);
                unroll<R>([&](auto r) __attribute__((always_inline)) {
                    int32_t starts[2];
                    std::memcpy(starts, meta + Panels::FIRST_32 * R + r, 4);
                    std::memcpy(starts + 1, meta + Panels::LAST_32 * R + r, 4);
                    Ints dot_first = fill(starts[0]), dot_last = fill(starts[1]);
                    unroll<4>([&](auto j) __attribute__((always_inline)) {
                        dot_first = dot4(dot_first, weights[j], x + r * 32 + j * 4);
                        dot_last = dot4(dot_last, weights[j + 4], x + r * 32 + 16 + j * 4);
                    });
                    const Floats whole = fma(last, counted(dot_last), fma(first, from_bits(dot_first), lift));
                    sums[r] = fma(fill(meta[Panels::D * R + r]), d * whole, sums[r]);
                });
            } else {
                const Floats scale = d * load_int8(scales + 16 * g), offset = dmin * load_int8(scales + 128 + 16 * g);
                const Floats lift = scale * fill(-ROUND);
                unroll<R>([&](auto r) __attribute__((always_inline)) {
                    Ints dot = bits(fill(ROUND));
                    unroll<8>([&](auto j) __attribute__((always_inline)) {
                        dot = dot4(dot, weights[j], x + r * 32 + j * 4);
                    });
                    const Floats part = fma(offset, fill(meta[Panels::SUM * R + r]), fma(scale, from_bits(dot), lift));
                    sums[r] = fma(fill(meta[Panels::D * R + r]), part, sums[r]);
                });
            }
            x += R * GROUP;
            meta += R * Panels::FIELDS;
        }
        scales += STEP;
    }
    unroll<R>([&](auto r) __attribute__((always_inline)) { store_some(y + r * y_stride, sums[r], outs); });
}

using TileInt8 = void (*)(const Matrix&, const uint8_t*, const int8_t*, const float*, int, float*, size_t, int);

template <int R, Matrix::Kind K> TileInt8 tile_of(const Matrix& m) {
    switch (m.offset * 2 + m.half) {
        case 0: return tile_int8<R, K, false, false>;
        case 1: return tile_int8<R, K, false, true>;
        case 2: return tile_int8<R, K, true, false>;
        default: return tile_int8<R, K, true, true>;
    }
}

template <int R> TileInt8 tile_for(const Matrix& m) {
    using Kind = Matrix::Kind;
    switch (m.kind) {
        case Kind::q3_k: return tile_super<R, Kind::q3_k>;
        case Kind::q4_k: return tile_super<R, Kind::q4_k>;
        case Kind::q5_k: return tile_super<R, Kind::q5_k>;
        case Kind::q6_k: return tile_super<R, Kind::q6_k>;
        case Kind::int4: return tile_of<R, Kind::int4>(m);
        default: return tile_of<R, Kind::int8>(m);
    }
}

template <int R> TileInt8 tile_for(const Matrix& m, int rows) {
    if constexpr (R > 1) {
        if (rows < R) return tile_for<R - 1>(m, rows);
    }
    return tile_for<R>(m);
}

void matmul_int8(const Matrix& w, const Panels& x, int first, int last, float* y, size_t y_stride) {
    const int start_field = w.base == 0 ? Panels::START_0 : w.base == -8 ? Panels::START_8 : Panels::START_128;
    const TileInt8 full = tile_for<TILE>(w, x.in_panel(0)), rest = tile_for<TILE>(w, x.in_panel(x.rows - 1));
    for (int b = first; b < last; ++b) {
        const uint8_t* block = w.data + w.block_bytes * b;
        const int outs = w.out - b * OUTS < OUTS ? w.out - b * OUTS : OUTS;
        for (int row = 0; row < x.rows; row += x.tile) {
            const TileInt8 tile = row + x.tile <= x.rows ? full : rest;
            tile(w, block, x.q + x.q_at(row), x.meta + x.meta_at(row), start_field, y + row * y_stride + b * OUTS,
                 y_stride, outs);
        }
    }
}

// 16 weights as float32, which f16 and bf16 become without rounding.
template <Matrix::Kind K> OUTPACE_INLINE Floats load_weights(const uint8_t* from) {
    if constexpr (K == Matrix::Kind::f32) {
        return load(reinterpret_cast<const float*>(from));
    } else if constexpr (K == Matrix::Kind::f16) {
        return load_half(from);
    } else {
        return load_bfloat(from);
    }
}

// 16 * B outputs of R rows; inputs are summed in order.
template <int R, int B, Matrix::Kind K>
void tile_f32(const Matrix& m, int b, const float* x, size_t x_stride, float* y, size_t y_stride) {
    constexpr size_t STEP = OUTS * Matrix::float_bytes(K);
    Floats sums[R][B];
    unroll<R>([&](auto r) __attribute__((always_inline)) {
        unroll<B>([&](auto c) __attribute__((always_inline)) { sums[r][c] = fill(0.0f); });
    });
    const uint8_t* w = m.data + m.block_bytes * b;
    for (int i = 0; i < m.in; ++i, w += STEP) {
        Floats weights[B];
        unroll<B>([&](auto c) __attribute__((always_inline)) {
            __builtin_prefetch(w + c * m.block_bytes + PREFETCH / B);
            weights[c] = load_weights<K>(w + c * m.block_bytes);
        });
        unroll<R>([&](auto r) __attribute__((always_inline)) {
            const Floats input = fill(x[r * x_stride + i]);
            unroll<B>([&](auto c) __attribute__((always_inline)) { sums[r][c] = fma(weights[c], input, sums[r][c]); });
        });
    }
    unroll<B>([&](auto c) __attribute__((always_inline)) {
        const int at = (b + c) * OUTS, outs = m.out - at < OUTS ? m.out - at : OUTS;
        unroll<R>([&](auto r) __attribute__((always_inline)) { store_some(y + r * y_stride + at, sums[r][c], outs); });
    });
}

template <int R, Matrix::Kind K>
void rows_f32(const Matrix& m, int b, int blocks, const float* x, size_t x_stride, int rows, float* y, size_t stride) {
    if constexpr (R > 1) {
        if (rows < R) return rows_f32<R - 1, K>(m, b, blocks, x, x_stride, rows, y, stride);
    }
    if constexpr (R * 4 <= 2 * TILE_F32) {
        if (blocks == 4) return tile_f32<R, 4, K>(m, b, x, x_stride, y, stride);
    }
    for (int c = 0; c < blocks; ++c) {
        if (c + 1 < blocks) {
            tile_f32<R, 2, K>(m, b + c, x, x_stride, y, stride);
            ++c;
        } else {
            tile_f32<R, 1, K>(m, b + c, x, x_stride, y, stride);
        }
    }
}

template <Matrix::Kind K>
void matmul_floats(const Matrix& w, const float* x, size_t x_stride, int rows, int first, int last, float* y,
                   size_t y_stride) {
    for (int b = first; b < last; b += 4) {
        const int blocks = last - b < 4 ? last - b : 4;
        for (int row = 0; row < rows; row += TILE_F32) {
            const int count = rows - row < TILE_F32 ? rows - row : TILE_F32;
            rows_f32<TILE_F32, K>(w, b, blocks, x + row * x_stride, x_stride, count, y + row * y_stride, y_stride);
        }
    }
}

void matmul_f32(const Matrix& w, const float* x, size_t x_stride, int rows, int first, int last, float* y,
                size_t y_stride) {
    using Kind = Matrix::Kind;
    const auto multiply = w.kind == Kind::f32   ? matmul_floats<Kind::f32>
                          : w.kind == Kind::f16 ? matmul_floats<Kind::f16>
                                                : matmul_floats<Kind::bf16>;
    multiply(w, x, x_stride, rows, first, last, y, y_stride);
}

void quantise(const float* x, int n, const Panels& to, int row, int from, int end) {
    const int rows = to.in_panel(row);
    int8_t* q = to.q + to.q_at(row) + static_cast<size_t>(from) * rows * GROUP;
    float* meta = to.meta + to.meta_at(row) + static_cast<size_t>(from) * rows * Panels::FIELDS;
    const float round_up = ROUND;
    int32_t round;
    std::memcpy(&round, &round_up, 4);
    for (int g = from; g < end; ++g) {
        const int left = n - g * GROUP;
        const Floats a = load_some(x + g * GROUP, left), b = left > 16 ? load_some(x + g * GROUP + 16, left - 16)
                                                                       : fill(0.0f);
        // Bits of |x| order like |x|, and NaN above all: a NaN makes d NaN instead of vanishing.
        const Ints absolute_a = bits(a) & 0x7fffffff, absolute_b = bits(b) & 0x7fffffff;
        const int32_t top = largest(choose(absolute_a > absolute_b, absolute_a, absolute_b));
        float amax;
        std::memcpy(&amax, &top, 4);
        const float inverse = 127.0f / amax;
        int32_t first = 0, last = 0;
        // Without a number, or with numbers so small that they are as good as zero, there is nothing to round; what the
        // group is worth then lies in D: NaN or infinity times 0 is NaN.
        if (inverse > 0.0f && inverse < __builtin_inff()) {
            const Ints zero = bits(fill(ROUND));
            const Ints qa = bits(a * fill(inverse) + fill(ROUND)) - zero, qb = bits(b * fill(inverse) + fill(ROUND)) - zero;
            store_int8(q, qa);
            store_int8(q + 16, qb);
            // Both sums at once, in the halves of 32 bits: neither leaves its 16.
            const int32_t both = sum(qa + shift_left(qb, 16));
            first = static_cast<int16_t>(both);
            last = (both - first) >> 16;
        } else {
            std::memset(q, 0, GROUP);
        }
        const int32_t total = first + last;
        const int32_t starts[5] = {round, round - 8 * total, round - 128 * total, round - 32 * first, round - 32 * last};
        meta[Panels::D * rows] = amax / 127.0f;
        meta[Panels::SUM * rows] = static_cast<float>(total);
        for (int i = 0; i < 5; ++i) std::memcpy(meta + (Panels::START_0 + i) * rows, starts + i, 4);
        q += static_cast<size_t>(rows) * GROUP;
        meta += static_cast<size_t>(rows) * Panels::FIELDS;
    }
}

// ------------------------------------------------------------------------------------------------ element by element

float rms_scale(const float* x, int n, float eps) {
    Floats squares = fill(0.0f);
    for (int i = 0; i < n; i += LANES) {
        const Floats v = load_some(x + i, n - i);
        squares = fma(v, v, squares);
    }
    return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps);
}

void normalise(const float* x, const float* weight, float scale, int n, float* y) {
    for (int i = 0; i < n; i += LANES) {
        store_some(y + i, load_some(x + i, n - i) * fill(scale) * load_some(weight + i, n - i), n - i);
    }
}

void rotate(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i += LANES) {
        const int n = half - i;
        const Floats a = load_some(x + i, n), b = load_some(x + half + i, n);
        const Floats c = load_some(cos + i, n), s = load_some(sin + i, n);
        store_some(x + i, a * c - b * s, n);
        store_some(x + half + i, b * c + a * s, n);
    }
}

void scale(float* x, float by, int n) {
    for (int i = 0; i < n; ++i) x[i] *= by;
}

void add(float* x, const float* y, int n) {
    for (int i = 0; i < n; ++i) x[i] += y[i];
}

void add_scaled(float* x, const float* y, float by, int n) {
    for (int i = 0; i < n; i += LANES) {
        store_some(x + i, fma(load_some(y + i, n - i), fill(by), load_some(x + i, n - i)), n - i);
    }
}

void silu_mul(float* gate, const float* up, int n) {
    for (int i = 0; i < n; i += LANES) {
        const Floats g = load_some(gate + i, n - i);
        const Floats s = g / (fill(1.0f) + exp(fill(0.0f) - g));
        store_some(gate + i, s * load_some(up + i, n - i), n - i);
    }
}

}  // namespace
}  // namespace outpace

#include "attention_impl.h"  // takes `quantise` from here

namespace outpace {
namespace {

constexpr Kernels family(const char* name, bool unsigned_bytes) {
    return {name,   unsigned_bytes, TILE, matmul_int8, matmul_f32, quantise, rms_scale, normalise, rotate,
            scale,  add,            add_scaled, silu_mul, keep, attend, join, top, at_least, weight_sum, racers};
}

}  // namespace
}  // namespace outpace
