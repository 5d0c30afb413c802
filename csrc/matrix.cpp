#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "memory.h"

namespace outpace {
namespace {

constexpr size_t PIECE = size_t(16) << 20;
constexpr size_t HUGE_PAGE = size_t(2) << 20;

// The float16 with exactly this value; false where there is none.
bool exact_half(float value, uint16_t* bits) {
    uint32_t f;
    std::memcpy(&f, &value, 4);
    const uint32_t sign = f >> 16 & 0x8000u, mantissa = f & 0x7fffffu;
    const int exponent = static_cast<int>(f >> 23 & 0xff) - 127;
    if (exponent == -127 && mantissa == 0) {
        *bits = static_cast<uint16_t>(sign);
        return true;
    }
    if (exponent < -24 || exponent > 15) return false;
    if (exponent >= -14) {
        if (mantissa & 0x1fffu) return false;
        *bits = static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent + 15) << 10 | mantissa >> 13);
        return true;
    }
    const uint32_t whole = mantissa | 0x800000u;
    const int shift = -1 - exponent;  // 14 .. 23
    if (whole & ((1u << shift) - 1)) return false;
    *bits = static_cast<uint16_t>(sign | whole >> shift);
    return true;
}

size_t block_bytes(const Matrix& m) {
    if (m.floats()) return static_cast<size_t>(m.in) * OUTS * Matrix::float_bytes(m.kind);
    if (m.super()) return m.supers_at() + Matrix::super_bytes(m.kind) * (static_cast<size_t>(m.in) / SUPER);
    const size_t groups = static_cast<size_t>(m.groups);
    return (groups + 1) / 2 * m.head_bytes() + groups * Matrix::group_bytes(m.kind);
}

// A matrix of a kind that needs no more than its shape, without data.
Matrix shaped(Matrix::Kind kind, int out, int in) {
    Matrix m;
    m.kind = kind;
    m.out = out;
    m.in = in;
    m.blocks = (out + OUTS - 1) / OUTS;
    m.groups = (in + GROUP - 1) / GROUP;
    m.block_bytes = block_bytes(m);
    return m;
}

bool all_half(const float* values, size_t n) {
    uint16_t bits;
    return std::all_of(values, values + n, [&](float v) { return exact_half(v, &bits); });
}

}  // namespace

float half_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value;
    if (exponent == 0) {
        value = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t f = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13;
    std::memcpy(&value, &f, 4);
    return value;
}

void Arena::Unmap::operator()(uint8_t* at) const { unmap_memory(at, bytes); }

uint8_t* Arena::take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (pieces_.empty() || size_ - used_ < bytes) {
        const size_t size = (std::max(bytes, PIECE) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        pieces_.reserve(pieces_.size() + 1);
        pieces_.emplace_back(map_memory(size + HUGE_PAGE), Unmap{size + HUGE_PAGE});
        size_ = size;
        used_ = 0;
    }
    const auto start = (reinterpret_cast<uintptr_t>(pieces_.back().get()) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    uint8_t* at = reinterpret_cast<uint8_t*>(start) + used_;
    used_ += bytes;
    total_ += bytes;
    return at;
}

Matrix pack_int8(Arena& arena, const int8_t* q, const float* scale, const float* offset, int out, int in,
                 bool unsigned_bytes, bool allow_int4) {
    Matrix m;
    m.out = out;
    m.in = in;
    m.blocks = (out + OUTS - 1) / OUTS;
    m.groups = (in + GROUP - 1) / GROUP;
    const size_t width = static_cast<size_t>(m.groups) * GROUP, scales = static_cast<size_t>(out) * m.groups;
    const auto [low, high] = std::minmax_element(q, q + static_cast<size_t>(out) * width);
    m.kind = Matrix::Kind::int8;
    m.base = unsigned_bytes ? -128 : 0;
    if (allow_int4 && *low >= 0 && *high <= 15) {
        m.kind = Matrix::Kind::int4;
        m.base = 0;
    } else if (allow_int4 && *low >= -8 && *high <= 7) {
        m.kind = Matrix::Kind::int4;
        m.base = -8;
    }
    m.offset = offset != nullptr;
    m.half = all_half(scale, scales) && (!offset || all_half(offset, scales));
    m.block_bytes = block_bytes(m);
    uint8_t* data = arena.take(m.block_bytes * m.blocks);
    m.data = data;

    const auto put_scale = [&](uint8_t* to, int lane, float value) {
        if (m.half) {
            uint16_t bits = 0;
            exact_half(value, &bits);
            std::memcpy(to + 2 * lane, &bits, 2);
        } else {
            std::memcpy(to + 4 * lane, &value, 4);
        }
    };
    const bool nibbles = m.kind == Matrix::Kind::int4;
    for (int b = 0; b < m.blocks; ++b) {
        uint8_t* block = data + m.block_bytes * b;
        // Outputs and inputs beyond the matrix: weight 0 (the byte -base), scale 0.
        std::memset(block, 0, m.block_bytes);
        for (int g = 0; g < m.groups; ++g) {
            std::memset(block + m.weights_at(g), nibbles ? (m.base ? 0x88 : 0) : -m.base, Matrix::group_bytes(m.kind));
        }
        for (int lane = 0; lane < OUTS && b * OUTS + lane < out; ++lane) {
            const size_t o = static_cast<size_t>(b) * OUTS + lane;
            for (int g = 0; g < m.groups; ++g) {
                const int8_t* from = q + o * width + static_cast<size_t>(g) * GROUP;
                uint8_t* weights = block + m.weights_at(g);
                for (int i = 0; i < GROUP; ++i) {
                    const uint8_t byte = static_cast<uint8_t>(from[i] - m.base);
                    const int step = i / 4, at = lane * 4 + i % 4;
                    if (!nibbles) {
                        weights[step * 64 + at] = byte;
                    } else {
                        uint8_t& pair = weights[step % 4 * 64 + at];
                        pair = static_cast<uint8_t>(step < 4 ? (pair & 0xf0) | byte : (pair & 0x0f) | byte << 4);
                    }
                }
                put_scale(block + m.scale_at(g), lane, scale[o * m.groups + g]);
                if (offset) put_scale(block + m.offset_at(g), lane, offset[o * m.groups + g]);
            }
        }
    }
    return m;
}

Matrix pack_f32(Arena& arena, const float* w, int out, int in) {
    Matrix m = shaped(Matrix::Kind::f32, out, in);
    uint8_t* data = arena.take(m.bytes());
    m.data = data;
    for (int b = 0; b < m.blocks; ++b) {
        float* block = reinterpret_cast<float*>(data + m.block_bytes * b);
        for (int lane = 0; lane < OUTS; ++lane) {
            const size_t o = static_cast<size_t>(b) * OUTS + lane;
            for (int i = 0; i < in; ++i) {
                block[static_cast<size_t>(i) * OUTS + lane] = o < static_cast<size_t>(out) ? w[o * in + i] : 0.0f;
            }
        }
    }
    return m;
}

Matrix pack_16(Arena& arena, const uint16_t* w, Matrix::Kind kind, int out, int in) {
    Matrix m = shaped(kind, out, in);
    uint8_t* data = arena.take(m.bytes());
    m.data = data;
    for (int b = 0; b < m.blocks; ++b) {
        uint16_t* block = reinterpret_cast<uint16_t*>(data + m.block_bytes * b);
        for (int lane = 0; lane < OUTS; ++lane) {
            const size_t o = static_cast<size_t>(b) * OUTS + lane;
            for (int i = 0; i < in; ++i) {
                block[static_cast<size_t>(i) * OUTS + lane] = o < static_cast<size_t>(out) ? w[o * in + i] : 0;
            }
        }
    }
    return m;
}

Matrix pack_super(Arena& arena, const Supers& from, Matrix::Kind kind, int out, int in) {
    Matrix m = shaped(kind, out, in);
    const bool halves = Matrix::halves(kind), fifth = kind == Matrix::Kind::q5_k, sixth = kind == Matrix::Kind::q6_k;
    const int base = halves ? (sixth ? -32 : -4) : 0, most = fifth ? 31 : sixth ? 63 : halves ? 7 : 15;
    const int supers = in / SUPER;
    const auto [low, high] = std::minmax_element(from.q, from.q + static_cast<size_t>(out) * in);
    if (*low < base || *high > base + most) throw std::invalid_argument("a weight is out of its kind's range");
    uint8_t* data = arena.take(m.bytes());
    m.data = data;
    std::memset(data, 0, m.bytes());  // outputs beyond the matrix: factor 0, all weights alike
    for (int o = 0; o < out; ++o) {
        const int lane = o % OUTS;
        uint8_t* block = data + m.block_bytes * (o / OUTS);
        for (int s = 0; s < supers; ++s) {
            const size_t of = static_cast<size_t>(o) * supers + s;
            std::memcpy(block + s * 32 + lane * 2, from.d + of, 2);
            if (!halves) std::memcpy(block + m.factor_bytes() + s * 32 + lane * 2, from.dmin + of, 2);
            uint8_t* at = block + m.supers_at() + Matrix::super_bytes(kind) * s;
            for (int i = 0; i < 16; ++i) {  // 8 scales and 8 minima, or 16 scales
                const int8_t value = halves  ? from.scale[of * 16 + i]
                                     : i < 8 ? from.scale[of * 8 + i]
                                             : from.minimum[of * 8 + i - 8];
                at[i * OUTS + lane] = static_cast<uint8_t>(value);
            }
            for (int i = 0; i < SUPER; ++i) {
                uint8_t* group = at + 256 + Matrix::group_bytes(kind) * (i / GROUP);
                const int value = from.q[of * SUPER + i] - base, step = i % GROUP / 4, place = lane * 4 + i % 4;
                const auto put = [&](size_t where, int bits) { group[where] = static_cast<uint8_t>(group[where] | bits); };
                put(step % 4 * 64 + place, (value & 15) << (step < 4 ? 0 : 4));
                if (fifth) put(256 + place, value >> 4 << step);
                if (sixth) put(256 + step / 4 * 64 + place, value >> 4 << step % 4 * 2);
            }
        }
    }
    return m;
}

Matrix place(const Matrix& like, const uint8_t* data, size_t bytes, bool unsigned_bytes) {
    constexpr int MOST = 1 << 30;
    Matrix m = like;
    const bool int8 = m.kind == Matrix::Kind::int8, int4 = m.kind == Matrix::Kind::int4;
    const bool base_fits = int8 ? m.base == (unsigned_bytes ? -128 : 0) : int4 ? m.base == 0 || m.base == -8 : m.base == 0;
    if (m.kind <= Matrix::Kind::none || m.kind > Matrix::LAST || !base_fits || (!(int8 || int4) && (m.half || m.offset)) ||
        m.out < 1 || m.out > MOST || m.in < 1 || m.in > MOST || (m.super() && m.in % SUPER)) {
        throw std::invalid_argument("no packed matrix is like that");
    }
    m.blocks = (m.out - 1) / OUTS + 1;
    m.groups = (m.in - 1) / GROUP + 1;
    m.block_bytes = block_bytes(m);
    if (bytes / m.block_bytes != static_cast<size_t>(m.blocks) || bytes % m.block_bytes ||
        reinterpret_cast<uintptr_t>(data) % 64) {
        throw std::invalid_argument("the bytes of a packed matrix do not fit its shape");
    }
    m.data = data;
    return m;
}

void Matrix::row(int o, float* to) const {
    const uint8_t* block = data + block_bytes * (o / OUTS);
    const int lane = o % OUTS;
    if (kind == Kind::f32) {
        for (int i = 0; i < in; ++i) std::memcpy(to + i, block + (static_cast<size_t>(i) * OUTS + lane) * 4, 4);
        return;
    }
    const auto half_at = [&](const uint8_t* from, size_t i) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * (i * OUTS + lane), 2);
        return bits;
    };
    if (floats()) {
        for (int i = 0; i < in; ++i) {
            const uint16_t bits = half_at(block, i);
            const uint32_t wide = static_cast<uint32_t>(bits) << 16;
            if (kind == Kind::f16) to[i] = half_to_float(bits);
            else std::memcpy(to + i, &wide, 4);
        }
        return;
    }
    if (super()) {
        const bool half_groups = halves(kind);
        const int low = kind == Kind::q6_k ? -32 : kind == Kind::q3_k ? -4 : 0;
        for (int i = 0; i < in; ++i) {
            const int s = i / SUPER, g = i % SUPER / GROUP, step = i % GROUP / 4, at = lane * 4 + i % 4;
            const uint8_t* scales = block + supers_at() + super_bytes(kind) * s;
            const uint8_t* weights = scales + 256 + group_bytes(kind) * g;
            const auto small = [&](int n) { return static_cast<float>(static_cast<int8_t>(scales[n * OUTS + lane])); };
            int value = weights[step % 4 * 64 + at] >> (step < 4 ? 0 : 4) & 15;
            if (kind == Kind::q5_k) value |= (weights[256 + at] >> step & 1) << 4;
            if (kind == Kind::q6_k) value |= (weights[256 + step / 4 * 64 + at] >> step % 4 * 2 & 3) << 4;
            const float scale = half_to_float(half_at(block, s)) * small(half_groups ? i % SUPER / 16 : g);
            to[i] = scale * static_cast<float>(value + low);
            if (!half_groups) to[i] -= half_to_float(half_at(block + factor_bytes(), s)) * small(8 + g);
        }
        return;
    }
    const auto get_scale = [&](const uint8_t* from) {
        if (half) return half_to_float(half_at(from, 0));
        float value;
        std::memcpy(&value, from + 4 * lane, 4);
        return value;
    };
    for (int g = 0; g < groups; ++g) {
        const uint8_t* weights = block + weights_at(g);
        const float s = get_scale(block + scale_at(g));
        const float z = offset ? get_scale(block + offset_at(g)) : 0.0f;
        for (int i = 0; i < GROUP && g * GROUP + i < in; ++i) {
            const int step = i / 4, at = lane * 4 + i % 4;
            int byte;
            if (kind == Kind::int8) {
                // Without the shift of base -128 the byte is signed.
                const uint8_t raw = weights[step * 64 + at];
                byte = base ? raw : static_cast<int8_t>(raw);
            } else {
                const uint8_t pair = weights[step % 4 * 64 + at];
                byte = step < 4 ? pair & 15 : pair >> 4;
            }
            const float w = s * static_cast<float>(byte + base);
            to[g * GROUP + i] = offset ? w + z : w;
        }
    }
}

}  // namespace outpace
