// A weight matrix as the kernels read it, and the way there.
//
// Blocks of 16 outputs follow each other; a block holds everything that its 16 results need, in reading order.
// int8 and int4 blocks: groups of 32 inputs in pairs, so that a block is read strictly front to back: the scales of both,
// then their offsets, each 16 floats or halves a group, then their weights. A group's weights lie as 8 steps of 16 outputs x 4 inputs (64 bytes: one register that
// multiplies with 4 broadcast activations); int4 keeps steps j and j + 4 in the low and high nibbles of one register.
// Blocks of a k-kind (ggml's k-quants): float16 factors d of all super-blocks (256 inputs each), 16 a super-block, then
// of q4_k and q5_k the factors dmin; then super-block by super-block 256 bytes of scales (q4_k, q5_k: 16 of each group,
// then 16 minima of each group; the others: 16 of each half group) and the weights of its 8 groups: nibbles as int4,
// followed in q5_k by a register of fifth bits (bit j of a byte: step j) and in q6_k by two of fifth and sixth bits (of
// steps 0 .. 3 and 4 .. 7, two bits a step).
// f32, f16 and bf16 blocks: 16 outputs of input 0, of input 1, ...
// The stored byte is q - base; the kernels add base * (sum of the group's activations) back, so sums are exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

// For what the kernels' files use of others: a copy of it that one of them left to the linker could run anywhere.
#define OUTPACE_INLINE inline __attribute__((always_inline))

namespace outpace {

constexpr int OUTS = 16;   // outputs of a block
constexpr int GROUP = 32;  // inputs that share a scale
constexpr int SUPER = 256;  // inputs that share the factors of a k-kind

// Memory for weights, in large pieces that ask for huge pages. Throws std::bad_alloc.
class Arena {
  public:
    uint8_t* take(size_t bytes);  // aligned to 64 bytes, lives as long as the arena
    size_t bytes() const { return total_; }

  private:
    struct Unmap {
        size_t bytes;
        void operator()(uint8_t* at) const;
    };
    std::vector<std::unique_ptr<uint8_t, Unmap>> pieces_;
    size_t used_ = 0, size_ = 0, total_ = 0;
};

struct Matrix {
    enum class Kind { none, f32, int8, int4, f16, bf16, q3_k, q4_k, q5_k, q6_k };
    static constexpr Kind LAST = Kind::q6_k;
    Kind kind = Kind::none;
    int out = 0, in = 0;
    int blocks = 0;  // ceil(out / 16)
    int groups = 0;  // ceil(in / 32)
    bool half = false;    // scales and offsets are float16 (they were exactly that)
    bool offset = false;  // there are offsets
    int base = 0;         // -128, -8 or 0
    size_t block_bytes = 0;
    const uint8_t* data = nullptr;

    OUTPACE_INLINE static constexpr bool floats(Kind kind) {
        return kind == Kind::f32 || kind == Kind::f16 || kind == Kind::bf16;
    }
    OUTPACE_INLINE static constexpr bool super(Kind kind) { return kind >= Kind::q3_k; }
    OUTPACE_INLINE static constexpr bool halves(Kind kind) {  // 16 inputs a scale
        return kind == Kind::q3_k || kind == Kind::q6_k;
    }
    OUTPACE_INLINE static constexpr size_t float_bytes(Kind kind) { return kind == Kind::f32 ? 4 : 2; }
    OUTPACE_INLINE static constexpr size_t group_bytes(Kind kind) {  // the weights of a group, 16 outputs
        return kind == Kind::int8 ? 512 : kind == Kind::q5_k ? 320 : kind == Kind::q6_k ? 384 : 256;
    }
    OUTPACE_INLINE static constexpr size_t super_bytes(Kind kind) { return 256 + 8 * group_bytes(kind); }

    OUTPACE_INLINE bool floats() const { return floats(kind); }
    OUTPACE_INLINE bool super() const { return super(kind); }
    // One kind of factors of a block.
    OUTPACE_INLINE size_t factor_bytes() const { return (static_cast<size_t>(groups) / 8 * 32 + 63) / 64 * 64; }
    OUTPACE_INLINE size_t supers_at() const { return factor_bytes() * (halves(kind) ? 1 : 2); }

    size_t bytes() const { return block_bytes * blocks; }
    // Where an int8 or int4 block has what belongs to a group.
    size_t scale_bytes() const { return half ? 32 : 64; }
    size_t head_bytes() const { return scale_bytes() * (offset ? 4 : 2); }  // of a pair, before its weights
    size_t pair_at(int g) const { return static_cast<size_t>(g / 2) * (head_bytes() + 2 * group_bytes(kind)); }
    size_t scale_at(int g) const { return pair_at(g) + g % 2 * scale_bytes(); }
    size_t offset_at(int g) const { return scale_at(g) + 2 * scale_bytes(); }
    size_t weights_at(int g) const { return pair_at(g) + head_bytes() + g % 2 * group_bytes(kind); }

    // One output's weights as floats, float32 [in]: the embedding look-up.
    void row(int o, float* to) const;
};

// q: int8 [out, groups * 32]. scale, offset: float32 [out, groups], offset may be null. `in` inputs are real.
// unsigned_bytes: this processor's instruction wants weights of 0 .. 255. allow_int4: pack into nibbles where it fits.
Matrix pack_int8(Arena& arena, const int8_t* q, const float* scale, const float* offset, int out, int in,
                 bool unsigned_bytes, bool allow_int4 = true);
// w: float32 [out, in].
Matrix pack_f32(Arena& arena, const float* w, int out, int in);
// w: [out, in], the bits of values of `kind`, f16 or bf16.
Matrix pack_16(Arena& arena, const uint16_t* w, Matrix::Kind kind, int out, int in);

// A matrix of a k-kind as ggml's k-quants have it, taken apart. w = d * scale * q, of q4_k and q5_k minus dmin * minimum.
struct Supers {
    const int8_t* q;          // [out, in]: q3_k -4 .. 3, q4_k 0 .. 15, q5_k 0 .. 31, q6_k -32 .. 31
    const uint16_t* d;        // float16 [out, in / 256]
    const int8_t* scale;      // [out, in / 32], q3_k and q6_k [out, in / 16]
    const uint16_t* dmin;     // as d and
    const int8_t* minimum;    // as scale; q4_k and q5_k alone
};
// in: a multiple of 256. Throws std::invalid_argument for a q that is not in its kind's range.
Matrix pack_super(Arena& arena, const Supers& from, Matrix::Kind kind, int out, int in);

// The version of these layouts, for files that keep packed matrices. Whoever changes a layout raises it.
constexpr int LAYOUT = 3;

// A matrix whose packed bytes are there already, such as in a mapped file; they must stay as long as it is used. `like`
// names kind, out, in, half, offset and base as they were when the bytes were packed; the rest follows from them.
// Throws std::invalid_argument when no packing gives such a matrix, or the bytes are too few, too many or not aligned.
Matrix place(const Matrix& like, const uint8_t* data, size_t bytes, bool unsigned_bytes);

float half_to_float(uint16_t bits);

}  // namespace outpace
