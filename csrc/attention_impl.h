// Attention over one chunk of the KV cache (see kernels.h), for kernels_impl.h alone.
//
// All rows and heads that share a KV head go through the chunk together: a register tile takes several queries through
// the same positions, so that keys and values are read and converted once for all of them. A score, and each step of a
// weighted sum, is the same operation in the same order whatever the tile: company changes no bit.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace outpace {
namespace {

// Queries of a tile, and vectors of 16 positions (or dimensions) that it takes at once: their sums fill the registers.
#if defined(OUTPACE_SMALL_TILES)
constexpr int QUERIES = 2;
constexpr int vectors(bool, int) { return 2; }
#elif defined(__AVX512F__)
constexpr int QUERIES = 6;
constexpr int vectors(bool q8, int queries) { return q8 && queries > 3 ? 2 : 4; }
#else
constexpr int QUERIES = 4;
constexpr int vectors(bool q8, int queries) { return q8 || queries > 2 ? 1 : 2; }
#endif

constexpr int STRIDE = CHUNK + LANES;  // of a query's scores: loads may reach beyond the chunk

template <CacheKind KIND> OUTPACE_INLINE Floats load_cached(const uint8_t* from) {
    if constexpr (KIND == CacheKind::f32) {
        return load(reinterpret_cast<const float*>(from));
    } else if constexpr (KIND == CacheKind::f16) {
        return load_half(from);
    } else {
        return load_int8(from);
    }
}

constexpr int size_of(CacheKind kind) { return kind == CacheKind::f32 ? 4 : kind == CacheKind::f16 ? 2 : 1; }

// Calls body(Index<n>), n from 1 to N.
template <int N, class Body> OUTPACE_INLINE void with_count(int n, const Body& body) {
    if constexpr (N > 1) {
        if (n < N) return with_count<N - 1>(n, body);
    }
    body(Index<N>{});
}

// Scores of N queries at 16 * V positions of a block, from `position` on: sum over the head's dimensions, in order.
// next: what is needed after this block's keys, asked for at the pace at which these are read; may be null.
template <CacheKind KIND, int N, int V>
void scores(const HeadLayout& at, const uint8_t* head, int position, const Query* queries, float* to, int stride,
            const uint8_t* next) {
    const uint8_t* k = head + position * size_of(KIND);
    const float* q[N];
    unroll<N>([&](auto n) __attribute__((always_inline)) { q[n] = queries[n].q; });
    Floats sums[N][V];
    unroll<N>([&](auto n) __attribute__((always_inline)) {
        unroll<V>([&](auto v) __attribute__((always_inline)) { sums[n][v] = fill(0.0f); });
    });
    constexpr int ROW = BLOCK * size_of(KIND);
    for (int d = 0; d < at.head_dim; ++d, k += ROW) {
        if (next) prefetch<ROW>(next + d * ROW);
        Floats keys[V];
        unroll<V>([&](auto v) __attribute__((always_inline)) {
            keys[v] = load_cached<KIND>(k + v * LANES * size_of(KIND));
        });
        unroll<N>([&](auto n) __attribute__((always_inline)) {
            const Floats query = fill(q[n][d]);
            unroll<V>([&](auto v) __attribute__((always_inline)) { sums[n][v] = fma(keys[v], query, sums[n][v]); });
        });
    }
    unroll<N>([&](auto n) __attribute__((always_inline)) {
        unroll<V>([&](auto v) __attribute__((always_inline)) { store(to + n * stride + v * LANES, sums[n][v]); });
    });
}

// The same for q8: sum over groups, in order, of d * (scale * (sum of k * q)).
template <int N, int V>
void scores_q8(const HeadLayout& at, const uint8_t* head, int position, const Query* queries, float* to, int stride,
               const uint8_t* next) {
    const uint8_t* k = head + position * 4;
    const float* scales = reinterpret_cast<const float*>(head + at.key_scales) + position;
    const int start = at.unsigned_bytes ? Panels::START_128 : Panels::START_0;
    const int8_t* q[N];
    unroll<N>([&](auto n) __attribute__((always_inline)) { q[n] = queries[n].bytes; });
    Floats sums[N][V];
    unroll<N>([&](auto n) __attribute__((always_inline)) {
        unroll<V>([&](auto v) __attribute__((always_inline)) { sums[n][v] = fill(0.0f); });
    });
    for (int g = 0; g < at.groups; ++g, scales += BLOCK) {
        Ints dots[N][V];
        unroll<N>([&](auto n) __attribute__((always_inline)) {
            int32_t from;
            std::memcpy(&from, queries[n].fields + g * Panels::FIELDS + start, 4);
            unroll<V>([&](auto v) __attribute__((always_inline)) { dots[n][v] = fill(from); });
        });
        const int end = at.padded - g * GROUP < GROUP ? at.padded - g * GROUP : GROUP;
        for (int d = 0; d < end; d += 4, k += 4 * BLOCK) {
            if (next) prefetch<4 * BLOCK>(next + (k - head));
            Bytes keys[V];
            unroll<V>([&](auto v) __attribute__((always_inline)) { keys[v] = load_bytes(k + v * 64); });
            unroll<N>([&](auto n) __attribute__((always_inline)) {
                unroll<V>([&](auto v) __attribute__((always_inline)) {
                    dots[n][v] = dot4(dots[n][v], keys[v], q[n] + g * GROUP + d);
                });
            });
        }
        unroll<V>([&](auto v) __attribute__((always_inline)) {
            const Floats scale = load(scales + v * LANES);
            unroll<N>([&](auto n) __attribute__((always_inline)) {
                const Floats d = fill(queries[n].fields[g * Panels::FIELDS + Panels::D]);
                sums[n][v] = fma(d, scale * counted(dots[n][v]), sums[n][v]);
            });
        });
    }
    unroll<N>([&](auto n) __attribute__((always_inline)) {
        unroll<V>([&](auto v) __attribute__((always_inline)) { store(to + n * stride + v * LANES, sums[n][v]); });
    });
}

// Scores of `count` queries at 16 * `wide` positions of a block; to: [count][stride].
template <CacheKind KIND>
void score(const HeadLayout& at, const uint8_t* head, int position, int wide, const Query* queries, int count, float* to,
           int stride, const uint8_t* next) {
    const int tiles = (count + QUERIES - 1) / QUERIES, tile = (count + tiles - 1) / tiles;
    for (int i = 0; i < count; i += tile) {
        with_count<QUERIES>(count - i < tile ? count - i : tile, [&](auto n) __attribute__((always_inline)) {
            constexpr int N = decltype(n){}, V = vectors(KIND == CacheKind::q8, N), HALF = V > 2 ? 2 : V;
            const auto run = [&](auto width, int v) __attribute__((always_inline)) {
                constexpr int W = decltype(width){};
                const uint8_t* then = i || v || wide < BLOCK / LANES ? nullptr : next;
                if constexpr (KIND == CacheKind::q8) {
                    scores_q8<N, W>(at, head, position + v * LANES, queries + i, to + i * stride + v * LANES, stride, then);
                } else {
                    scores<KIND, N, W>(at, head, position + v * LANES, queries + i, to + i * stride + v * LANES, stride,
                                       then);
                }
            };
            for (int v = 0; v < wide;) {
                if (wide - v > HALF) {
                    run(Index<V>{}, v);
                    v += V;
                } else {
                    run(Index<HALF>{}, v);
                    v += HALF;
                }
            }
        });
    }
}

// acc += weight * value for N queries and 16 * V dimensions, position after position. weights: [N][stride].
template <CacheKind KIND, int N, int V>
void weigh(const uint8_t* values, size_t row, int count, const float* weights, int stride, const Query* queries, int d,
           const uint8_t* next) {
    Floats sums[N][V];
    unroll<N>([&](auto n) __attribute__((always_inline)) {
        unroll<V>([&](auto v) __attribute__((always_inline)) { sums[n][v] = load(queries[n].acc + d + v * LANES); });
    });
    for (int p = 0; p < count; ++p, values += row) {
        if (next) prefetch<V * LANES * size_of(KIND)>(next + p * row);
        Floats value[V];
        unroll<V>([&](auto v) __attribute__((always_inline)) {
            value[v] = load_cached<KIND>(values + v * LANES * size_of(KIND));
        });
        unroll<N>([&](auto n) __attribute__((always_inline)) {
            const Floats weight = fill(weights[n * stride + p]);
            unroll<V>([&](auto v) __attribute__((always_inline)) { sums[n][v] = fma(value[v], weight, sums[n][v]); });
        });
    }
    unroll<N>([&](auto n) __attribute__((always_inline)) {
        unroll<V>([&](auto v) __attribute__((always_inline)) { store(queries[n].acc + d + v * LANES, sums[n][v]); });
    });
}

// Values of `count` positions of a block, for all dimensions and `queries` queries. weights: [queries][STRIDE].
template <CacheKind KIND>
void weigh_all(const HeadLayout& at, const uint8_t* head, int position, int count, const float* weights,
               const Query* queries, int n_queries, const uint8_t* next) {
    constexpr int SIZE = size_of(KIND);
    const size_t row = static_cast<size_t>(at.padded) * SIZE;
    const uint8_t* values = head + at.values + position * row;
    const int tiles = (n_queries + QUERIES - 1) / QUERIES, tile = (n_queries + tiles - 1) / tiles;
    for (int i = 0; i < n_queries; i += tile) {
        const auto then = [&](int d) { return next && !i ? next + d * SIZE : nullptr; };
        with_count<QUERIES>(n_queries - i < tile ? n_queries - i : tile, [&](auto n) __attribute__((always_inline)) {
            constexpr int N = decltype(n){};
            if constexpr (KIND == CacheKind::q8) {
                constexpr int V = vectors(false, N) > 1 ? 2 : 1;
                const float* scales = reinterpret_cast<const float*>(head + at.value_scales) + position;
                alignas(64) float scaled[N * BLOCK];
                for (int d = 0; d < at.padded; d += GROUP, scales += BLOCK) {
                    for (int p = 0; p < count; p += LANES) {
                        const Floats scale = load(scales + p);
                        unroll<N>([&](auto m) __attribute__((always_inline)) {
                            store(scaled + m * BLOCK + p, load(weights + (i + m) * STRIDE + p) * scale);
                        });
                    }
                    for (int v = 0; v < GROUP && d + v < at.padded;) {
                        if (V > 1 && d + v + 2 * LANES <= at.padded) {
                            weigh<KIND, N, V>(values + d + v, row, count, scaled, BLOCK, queries + i, d + v, then(d + v));
                            v += V * LANES;
                        } else {
                            weigh<KIND, N, 1>(values + d + v, row, count, scaled, BLOCK, queries + i, d + v, then(d + v));
                            v += LANES;
                        }
                    }
                }
            } else {
                constexpr int V = vectors(false, N), HALF = V > 2 ? 2 : V;
                const float* w = weights + i * STRIDE;
                int d = 0;
                for (; d + V * LANES <= at.padded; d += V * LANES) {
                    weigh<KIND, N, V>(values + d * SIZE, row, count, w, STRIDE, queries + i, d, then(d));
                }
                for (; d + HALF * LANES <= at.padded; d += HALF * LANES) {
                    weigh<KIND, N, HALF>(values + d * SIZE, row, count, w, STRIDE, queries + i, d, then(d));
                }
                for (; d < at.padded; d += LANES) {
                    weigh<KIND, N, 1>(values + d * SIZE, row, count, w, STRIDE, queries + i, d, then(d));
                }
            }
        });
    }
}

template <CacheKind KIND>
void attend_chunk(const Keys& keys, const Seen* seen, int rows, const Query* queries, int heads) {
    const HeadLayout& at = keys.layout;
    alignas(64) float s[MOST_QUERIES * STRIDE];
    const int chunk = seen[0].begin / CHUNK * CHUNK, count = rows * heads;
    const auto place = [](const Seen& row) { return row.direct < row.end ? row.direct : row.end; };
    // Positions that some row, and positions that every row, finds in their own place.
    int first = seen[0].begin, last = place(seen[0]), all_first = first, all_last = last;
    for (int r = 1; r < rows; ++r) {
        const int begin = seen[r].begin, end = place(seen[r]);
        first = begin < first ? begin : first;
        last = end > last ? end : last;
        all_first = begin > all_first ? begin : all_first;
        all_last = end < all_last ? end : all_last;
    }
    const int first_block = first / BLOCK, end_block = (last + BLOCK - 1) / BLOCK;
    // Read in this order: the keys of all blocks, their values, then perhaps the next chunk's keys.
    for (int b = first_block; b < end_block; ++b) {
        const int wide = last - b * BLOCK < BLOCK ? (last - b * BLOCK + LANES - 1) / LANES : BLOCK / LANES;
        const uint8_t* next = b + 1 < end_block ? keys.head(b + 1) : keys.head(first_block) + at.values;
        score<KIND>(at, keys.head(b), 0, wide, queries, count, s + (b * BLOCK - chunk), STRIDE, next);
    }
    for (int r = 0; r < rows; ++r) {
        const Seen& row = seen[r];
        float* own = s + r * heads * STRIDE;
        // Ancestors that lie elsewhere: 32 places at a time, usually the next ancestor's too.
        alignas(64) float elsewhere[MOST_QUERIES * 2 * LANES];
        int have = -1;
        for (int p = row.begin > row.direct ? row.begin : row.direct; p < row.end; ++p) {
            const int from = row.ancestors[p - row.direct], piece = from / (2 * LANES);
            if (piece != have) {
                const uint8_t* head = keys.head(from / BLOCK);
                score<KIND>(at, head, from % BLOCK / (2 * LANES) * (2 * LANES), 2, queries + r * heads, heads, elsewhere,
                            2 * LANES, nullptr);
                have = piece;
            }
            for (int h = 0; h < heads; ++h) {
                own[h * STRIDE + p - chunk] = elsewhere[h * 2 * LANES + from % (2 * LANES)];
            }
        }
        const int begin = row.begin - chunk, end = row.end - chunk;
        const int low = begin / LANES * LANES, high = (end + LANES - 1) / LANES * LANES;
        for (int h = 0; h < heads; ++h) {
            float* w = own + h * STRIDE;
            for (int i = low; i < begin; ++i) w[i] = -__builtin_inff();
            for (int i = end; i < high; ++i) w[i] = -__builtin_inff();
            Floats top = load(w + low);
            for (int i = low + LANES; i < high; i += LANES) {
                const Floats v = load(w + i);
                top = choose(v > top, v, top);
            }
            const Query& query = queries[r * heads + h];
            *query.largest = largest(top);
            const Floats shift = fill(*query.largest);
            Floats total = fill(0.0f);
            for (int i = low; i < high; i += LANES) {
                const Floats e = exp(load(w + i) - shift);
                store(w + i, e);
                total = total + e;
            }
            *query.sum = sum(total);
            for (int d = 0; d < at.padded; d += LANES) store(query.acc + d, fill(0.0f));
        }
    }
    // Values, for some rows' queries: positions begin .. end in their own places.
    const auto values = [&](int row, int n, int begin, int end) {
        for (int p = begin; p < end;) {
            const int b = p / BLOCK, stop = (b + 1) * BLOCK < end ? (b + 1) * BLOCK : end;
            const uint8_t* next = stop < end           ? keys.head(b + 1) + at.values
                                  : b + 1 < keys.count ? keys.head(b + 1)
                                                       : nullptr;
            weigh_all<KIND>(at, keys.head(b), p % BLOCK, stop - p, s + row * heads * STRIDE + (p - chunk),
                            queries + row * heads, n * heads, next);
            p = stop;
        }
    };
    const bool together = all_first < all_last;
    for (int r = 0; r < rows; ++r) values(r, 1, seen[r].begin, together ? all_first : place(seen[r]));
    if (together) {
        values(0, rows, all_first, all_last);
        for (int r = 0; r < rows; ++r) values(r, 1, all_last, place(seen[r]));
    }
    for (int r = 0; r < rows; ++r) {
        const Seen& row = seen[r];
        for (int p = row.begin > row.direct ? row.begin : row.direct; p < row.end; ++p) {
            const int from = row.ancestors[p - row.direct];
            const uint8_t* head = keys.head(from / BLOCK);
            weigh_all<KIND>(at, head, from % BLOCK, 1, s + r * heads * STRIDE + (p - chunk), queries + r * heads, heads,
                            nullptr);
        }
    }
}

void attend(const Keys& keys, const Seen* seen, int rows, const Query* queries, int heads) {
    switch (keys.layout.kind) {
        case CacheKind::f32: return attend_chunk<CacheKind::f32>(keys, seen, rows, queries, heads);
        case CacheKind::f16: return attend_chunk<CacheKind::f16>(keys, seen, rows, queries, heads);
        case CacheKind::q8: return attend_chunk<CacheKind::q8>(keys, seen, rows, queries, heads);
    }
}

void join(float* largest, float* sums, const float* acc, int n, const HeadLayout& layout, float* y) {
    if (n == 1) {
        for (int d = 0; d < layout.head_dim; d += LANES) {
            store_some(y + d, load(acc + d) / fill(sums[0]), layout.head_dim - d);
        }
        return;
    }
    Floats top = fill(-__builtin_inff()), total = fill(0.0f);
    for (int i = n; i % LANES; ++i) {
        largest[i] = -__builtin_inff();
        sums[i] = 0.0f;
    }
    for (int i = 0; i < n; i += LANES) {
        const Floats v = load(largest + i);
        top = choose(v > top, v, top);
    }
    const Floats shift = fill(outpace::largest(top));
    for (int i = 0; i < n; i += LANES) {
        const Floats weight = exp(load(largest + i) - shift);
        store(largest + i, weight);
        total = fma(weight, load(sums + i), total);
    }
    const Floats all = fill(sum(total));
    for (int d = 0; d < layout.head_dim; d += LANES) {
        Floats mixed = fill(0.0f);
        const float* from = acc + d;
        for (int i = 0; i < n; ++i, from += layout.padded) mixed = fma(load(from), fill(largest[i]), mixed);
        store_some(y + d, mixed / all, layout.head_dim - d);
    }
}

void keep(const HeadLayout& at, uint8_t* head, int place, const float* key, const float* value) {
    if (at.kind == CacheKind::f32) {
        float* keys = reinterpret_cast<float*>(head) + place;
        for (int d = 0; d < at.head_dim; ++d) keys[d * BLOCK] = key[d];
        std::memcpy(head + at.values + static_cast<size_t>(place) * at.padded * 4, value, at.head_dim * sizeof(float));
    } else if (at.kind == CacheKind::f16) {
        for (int d = 0; d < at.head_dim; d += LANES) {
            const int n = at.head_dim - d;
            uint8_t halves[2 * LANES];
            store_half(halves, load_some(key + d, n));
            for (int i = 0; i < LANES && i < n; ++i) std::memcpy(head + ((d + i) * BLOCK + place) * 2, halves + 2 * i, 2);
            store_half(head + at.values + (static_cast<size_t>(place) * at.padded + d) * 2, load_some(value + d, n));
        }
    } else {
        int8_t q[MOST_GROUPS * GROUP];
        float fields[MOST_GROUPS * Panels::FIELDS];
        Panels one;
        one.q = q;
        one.meta = fields;
        one.rows = one.tile = 1;
        one.groups = at.groups;
        const auto scales = [&](size_t offset) {
            float* to = reinterpret_cast<float*>(head + offset) + place;
            for (int g = 0; g < at.groups; ++g) to[g * BLOCK] = fields[g * Panels::FIELDS + Panels::D];
        };
        quantise(key, at.head_dim, one, 0, 0, at.groups);
        const uint32_t flip = at.unsigned_bytes ? 0x80808080 : 0;
        for (int d = 0; d < at.padded; d += 4) {
            uint32_t four;
            std::memcpy(&four, q + d, 4);
            four ^= flip;
            std::memcpy(head + d * BLOCK + 4 * place, &four, 4);
        }
        scales(at.key_scales);
        quantise(value, at.head_dim, one, 0, 0, at.groups);
        std::memcpy(head + at.values + static_cast<size_t>(place) * at.padded, q, at.padded);
        scales(at.value_scales);
    }
}

}  // namespace
}  // namespace outpace
