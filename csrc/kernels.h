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
    // Fields of a group, each one value a row: d and the sum of q as floats, then base * (sum of q) for each base, and
    // for base -32 those of the first 16 and of the last 16 inputs.
    enum Field { D, SUM, START_0, START_8, START_128, FIRST_32, LAST_32, FIELDS };

    int8_t* q = nullptr;
    float* meta = nullptr;
    int rows = 0, tile = 0, groups = 0;

    int in_panel(int row) const {
        const int first = row / tile * tile;
        return rows - first < tile ? rows - first : tile;
    }
    size_t q_at(int row) const {  // bytes to this row's group 0; groups are in_panel(row) * 32 bytes apart
        return static_cast<size_t>(row / tile * tile) * groups * GROUP + static_cast<size_t>(row % tile) * GROUP;
    }
    size_t meta_at(int row) const {  // floats to this row's D of group 0; fields are in_panel(row) floats apart
        return static_cast<size_t>(row / tile * tile) * groups * FIELDS + static_cast<size_t>(row % tile);
    }
};

constexpr int BLOCK = 64;           // positions of a block of the KV cache
constexpr int CHUNK = 4 * BLOCK;    // positions whose attention is one partial result

// One row's view of one KV head. blocks[p / 64] + k_at: keys [head_dim][64]; + v_at: values [64][padded head_dim].
struct Keys {
    const float* const* blocks;
    size_t k_at, v_at;
    int head_dim, padded;   // padded: head_dim rounded up to 16
    int direct;             // positions below lie in their own place
    const int* ancestors;   // place of position direct + i
};

// Attention over one chunk: the largest score, the sum of exp(score - largest), and the values weighted by these.
struct Partial {
    float largest, sum;
};

struct Kernels {
    const char* name;
    bool unsigned_bytes;  // int8 weights are stored as q + 128
    int tile;             // most rows of a Panels panel

    // Outputs 16 * first .. 16 * last of y = x * w^T for all rows. y: float32 [rows][y_stride], columns from output 0.
    void (*matmul_int8)(const Matrix& w, const Panels& x, int first, int last, float* y, size_t y_stride);
    // Weights in f32, f16 or bf16.
    void (*matmul_f32)(const Matrix& w, const float* x, size_t x_stride, int rows, int first, int last, float* y,
                       size_t y_stride);
    void (*quantise)(const float* x, int n, const Panels& to, int row);
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y);
    void (*rotate)(float* x, const float* cos, const float* sin, int half);  // x: [2 * half], pairs (i, i + half)
    void (*scale)(float* x, float by, int n);
    void (*add)(float* x, const float* y, int n);                      // x += y
    void (*add_scaled)(float* x, const float* y, float by, int n);     // x = fma(y, by, x)
    void (*silu_mul)(float* gate, const float* up, int n);             // gate = silu(gate) * up
    // q: [heads][head_dim], scaled. Attends positions begin .. end of one chunk. acc: [heads][padded].
    void (*attend)(const Keys& keys, const float* q, int heads, int begin, int end, Partial* partial, float* acc);
    // Joins the next chunk to what the chunks before gave.
    void (*join)(Partial* into, float* acc, const Partial& next, const float* next_acc, int n);

    // Sweeps of the sampler over a row of logits [n].
    float (*top)(const float* x, size_t n);  // the largest; NaN where one is NaN
    // Indices with x >= cut, ascending, at most `limit` of them.
    size_t (*at_least)(const float* x, size_t n, float cut, size_t limit, int32_t* at);
    double (*weight_sum)(const float* x, size_t n, float top, float inverse);  // sum of exp((x - top) * inverse), nearly
    // Tokens first .. last whose exponential race time may lie below `best`.
    size_t (*racers)(const float* x, size_t first, size_t last, float top, float inverse, uint64_t key, double best,
                     int32_t* at);
};

const Kernels* kernels_portable();
const Kernels* kernels_avx2();        // null where the build or the processor lacks it
const Kernels* kernels_avx512vnni();  // null where the build or the processor lacks it

// The families that this build and processor can run, fastest first.
std::vector<const Kernels*> available_kernels();
// The family that the environment variable OUTPACE_ISA names, or the fastest.
// Throws std::invalid_argument for a name that is unknown or cannot run here.
const Kernels& choose_kernels();

}  // namespace outpace
