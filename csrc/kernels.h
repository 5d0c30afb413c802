// The arithmetic of a pass, once per processor family, chosen when the program runs.
//
// Every family is compiled from the same kernels_impl.h over vectors of 16 lanes (simd.h), so that every family makes
// the same float operations in the same order: their results have the same bits.
// A row's result never depends on the other rows: a template on the row count only changes what is kept in registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "matrix.h"

namespace outpace {

// Activation rows rounded to 8 bits in groups of 32: d = max|x| / 127, q = round-half-even(x * (127 / max|x|)).
// Rows lie in panels of `tile` rows, the number that a matrix product takes at once; within a panel group by group.
struct Panels {
    // Fields of a group, each one value a row: d and the sum of q as floats, then what an integer sum of products begins
    // at: base * (sum of q) for each base, and for base -32 those of the first 16 and of the last 16 inputs, each plus
    // the bits of the float 1.5 * 2^23, so that the sum's bits are those of 1.5 * 2^23 + sum.
    enum Field { D, SUM, START_0, START_8, START_128, FIRST_32, LAST_32, FIELDS };

    int8_t* q = nullptr;
    float* meta = nullptr;
    int rows = 0, tile = 0, groups = 0;

    OUTPACE_INLINE int in_panel(int row) const {
        const int first = row / tile * tile;
        return rows - first < tile ? rows - first : tile;
    }
    OUTPACE_INLINE size_t q_at(int row) const {  // bytes to this row's group 0; groups are in_panel(row) * 32 bytes apart
        return static_cast<size_t>(row / tile * tile) * groups * GROUP + static_cast<size_t>(row % tile) * GROUP;
    }
    OUTPACE_INLINE size_t meta_at(int row) const {  // floats to this row's D of group 0; fields are in_panel(row) floats apart
        return static_cast<size_t>(row / tile * tile) * groups * FIELDS + static_cast<size_t>(row % tile);
    }
};

constexpr int BLOCK = 64;           // positions of a block of the KV cache
constexpr int CHUNK = 4 * BLOCK;    // positions whose attention is one partial result

enum class CacheKind { f32, f16, q8 };

// How the keys and values of one layer and KV head lie within a block, and how they are rounded.
// f32, f16: keys [head_dim][64], so that 16 positions make one register, then values [64][padded]. f16 rounds to the
// nearest, half to even; what is beyond the largest float16 becomes that.
// q8: as activations (Panels), a scale for each position and group of 32: keys [padded / 4][64][4] as q (+ 128 where the
// family wants unsigned bytes), key scales [groups][64], values [64][padded], value scales [groups][64]. Queries are
// rounded in the same way, so that scores are exact dot products of integers.
struct HeadLayout {
    CacheKind kind;
    bool unsigned_bytes;
    int head_dim, padded, groups;                     // padded: head_dim rounded up to 16
    size_t key_scales, values, value_scales, bytes;   // offsets, and the size of all; keys come first

    HeadLayout(CacheKind kind, int head_dim, bool unsigned_bytes);
    void move(const uint8_t* source, int from, uint8_t* target, int to) const;  // one position
    float read(const uint8_t* head, int place, bool value, int dim) const;      // one number
};

// A slot's view of one layer and KV head: position p lies in blocks[p / 64] + at.
struct Keys {
    const HeadLayout& layout;
    uint8_t* const* blocks;
    int count;   // of blocks
    size_t at;

    uint8_t* head(int block) const { return blocks[block] + at; }
};

// What a row sees of a chunk: positions begin .. end.
struct Seen {
    int begin, end;
    int direct;            // positions below lie in their own place ...
    const int* ancestors;  // ... and position direct + i at this one
};

// A head's query in one row, and where its partial result over the chunk goes: the largest score, the sum of
// exp(score - largest), and the values weighted by these, [padded].
struct Query {
    const float* q;       // [head_dim], scaled
    const int8_t* bytes;  // the same rounded, [groups][32], with `fields` [groups][Panels::FIELDS]; for q8
    const float* fields;
    float *largest, *sum, *acc;
};

constexpr int MOST_QUERIES = 32;   // rows x heads that `attend` takes
constexpr int MOST_HEAD_DIM = 512, MOST_GROUPS = MOST_HEAD_DIM / GROUP;

struct Kernels {
    const char* name;
    bool unsigned_bytes;  // int8 weights are stored as q + 128
    int tile;             // most rows of a Panels panel

    // Outputs 16 * first .. 16 * last of y = x * w^T for all rows. y: float32 [rows][y_stride], columns from output 0.
    void (*matmul_int8)(const Matrix& w, const Panels& x, int first, int last, float* y, size_t y_stride);
    // Weights in f32, f16 or bf16.
    void (*matmul_f32)(const Matrix& w, const float* x, size_t x_stride, int rows, int first, int last, float* y,
                       size_t y_stride);
    // Groups first .. last of a row; x: [n], the whole row.
    void (*quantise)(const float* x, int n, const Panels& to, int row, int first, int last);
    float (*rms_scale)(const float* x, int n, float eps);  // 1 / sqrt(mean of squares + eps)
    void (*normalise)(const float* x, const float* weight, float scale, int n, float* y);  // y = x * scale * weight
    void (*rotate)(float* x, const float* cos, const float* sin, int half);  // x: [2 * half], pairs (i, i + half)
    void (*scale)(float* x, float by, int n);
    void (*add)(float* x, const float* y, int n);                      // x += y
    void (*add_scaled)(float* x, const float* y, float by, int n);     // x = fma(y, by, x)
    void (*silu_mul)(float* gate, const float* up, int n);             // gate = silu(gate) * up
    // Writes a key and a value, [head_dim] each, to a place of a block.
    void (*keep)(const HeadLayout& layout, uint8_t* head, int place, const float* key, const float* value);
    // Attention of queries [rows][heads] over one chunk, the same for all.
    void (*attend)(const Keys& keys, const Seen* seen, int rows, const Query* queries, int heads);
    // Joins the partial results of n chunks, in order: y [head_dim]. `largest` and `sum` have room for n rounded up to
    // 16 and are used up; acc: [n][padded].
    void (*join)(float* largest, float* sum, const float* acc, int n, const HeadLayout& layout, float* y);

    // Sweeps of the sampler over a row of logits [n].
    float (*top)(const float* x, size_t n);  // the largest; NaN where one is NaN
    // Indices with x >= cut, ascending, at most `limit` of them.
    size_t (*at_least)(const float* x, size_t n, float cut, size_t limit, int32_t* at);
    double (*weight_sum)(const float* x, size_t n, float top, float inverse);  // sum of exp((x - top) * inverse), nearly
    // Places first .. last whose exponential race time may lie below `best`. ids: null, or the tokens [n] at the places.
    size_t (*racers)(const float* x, const int64_t* ids, size_t first, size_t last, float top, float inverse, uint64_t key,
                     double best, int32_t* at);
};

// Each family's table, null where the build lacks it. Whether the processor can run it is for available_kernels to say:
// in a family's file nothing but the kernels themselves is compiled, so that nothing of it runs before it is chosen.
extern const Kernels* const kernels_portable;
extern const Kernels* const kernels_avx2;
extern const Kernels* const kernels_avxvnni;
extern const Kernels* const kernels_avx512vnni;
extern const Kernels* const kernels_neon;

// The families that this build and processor can run, fastest first.
std::vector<const Kernels*> available_kernels();
// The family that the environment variable OUTPACE_ISA names, or the fastest.
// Throws std::invalid_argument for a name that is unknown or cannot run here.
const Kernels& choose_kernels();

}  // namespace outpace
