#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "check.h"
#include "matrix.h"

namespace outpace {
namespace {

class Comparison {
  public:
    Comparison(const Kernels& family, uint64_t seed) : family_(family), random_(seed) {}

    void round() {
        n_ = random_.within(1, 130);
        elements();
        sweeps();
        products();
        other_products();
    }

  private:
    void same(const std::vector<float>& a, const std::vector<float>& b, const char* kernel) {
        for (size_t i = 0; i < a.size(); ++i) {
            expect(bits_of(a[i]) == bits_of(b[i]), std::string(kernel) + " of " + family_.name + " gives " +
                                                       std::to_string(b[i]) + ", portable " + std::to_string(a[i]));
        }
    }

    // Values of every size, and now and then one that no model should make.
    std::vector<float> values(size_t n) {
        constexpr float odd[] = {0.0f, -0.0f, 1e-41f, 3e-38f, 3e38f, std::numeric_limits<float>::infinity(),
                                 -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
        std::vector<float> v = random_.reals(n, std::ldexp(1.0f, random_.within(-20, 8)));
        if (random_.within(0, 3) == 0) v[random_.next() % n] = odd[random_.next() % 8];
        return v;
    }

    // run(kernels, y) for both families, from the same y.
    template <class Run> void compare(const char* kernel, const std::vector<float>& start, const Run& run) {
        std::vector<float> a = start, b = start;
        run(*kernels_portable, a.data());
        run(family_, b.data());
        same(a, b, kernel);
    }

    void elements() {
        const std::vector<float> x = values(n_), y = values(n_), pairs = values(2 * n_);
        const float by = random_.real();
        compare("rms_norm", x, [&](const Kernels& k, float* to) { k.normalise(x.data(), y.data(), k.rms_scale(x.data(), n_, 1e-6f), n_, to); });
        compare("rotate", pairs, [&](const Kernels& k, float* to) { k.rotate(to, x.data(), y.data(), n_); });
        compare("scale", x, [&](const Kernels& k, float* to) { k.scale(to, by, n_); });
        compare("add", x, [&](const Kernels& k, float* to) { k.add(to, y.data(), n_); });
        compare("add_scaled", x, [&](const Kernels& k, float* to) { k.add_scaled(to, y.data(), by, n_); });
        compare("silu_mul", x, [&](const Kernels& k, float* to) { k.silu_mul(to, y.data(), n_); });
    }

    void sweeps() {
        const std::vector<float> x = values(n_);
        const size_t n = x.size();
        compare("top", {0.0f}, [&](const Kernels& k, float* to) { *to = k.top(x.data(), n); });
        const float largest = kernels_portable->top(x.data(), n);
        if (!std::isfinite(largest)) return;
        const float inverse = 1.0f / std::ldexp(1.0f, random_.within(-6, 6)), cut = x[random_.next() % n];
        const size_t limit = static_cast<size_t>(random_.within(1, n_));
        const uint64_t key = random_.next();
        std::vector<int32_t> a(n), b(n);
        const auto compare_found = [&](const char* kernel, size_t in_a, size_t in_b) {
            expect(in_a == in_b && std::equal(a.begin(), a.begin() + in_a, b.begin()),
                   std::string(kernel) + " of " + family_.name + " finds others than portable");
        };
        compare_found("at_least", kernels_portable->at_least(x.data(), n, cut, limit, a.data()),
                      family_.at_least(x.data(), n, cut, limit, b.data()));
        std::vector<int64_t> some(n);
        for (size_t i = 0; i < n; ++i) some[i] = static_cast<int64_t>(3 * i + 1);
        for (const int64_t* ids : {static_cast<const int64_t*>(nullptr), static_cast<const int64_t*>(some.data())}) {
            compare_found("racers", kernels_portable->racers(x.data(), ids, 0, n, largest, inverse, key, 0.7, a.data()),
                          family_.racers(x.data(), ids, 0, n, largest, inverse, key, 0.7, b.data()));
        }
        expect(kernels_portable->weight_sum(x.data(), n, largest, inverse) ==
                   family_.weight_sum(x.data(), n, largest, inverse),
               std::string("weight_sum of ") + family_.name + " differs");
    }

    struct Activations {
        std::vector<int8_t> q;
        std::vector<float> meta;
        Panels panels;
    };

    static Activations quantised(const Kernels& kernels, const std::vector<float>& x, int rows, int in) {
        Activations a;
        Panels& p = a.panels;
        const int tiles = (rows + kernels.tile - 1) / kernels.tile;
        p.rows = rows;
        p.tile = (rows + tiles - 1) / tiles;
        p.groups = (in + GROUP - 1) / GROUP;
        a.q.resize(static_cast<size_t>(rows) * p.groups * GROUP);
        a.meta.resize(static_cast<size_t>(rows) * p.groups * Panels::FIELDS);
        p.q = a.q.data();
        p.meta = a.meta.data();
        for (int r = 0; r < rows; ++r) kernels.quantise(x.data() + static_cast<size_t>(r) * in, in, p, r, 0, p.groups);
        return a;
    }

    void same_activations(const Activations& a, const Activations& b) {
        for (int r = 0; r < a.panels.rows; ++r) {
            const size_t in_a = static_cast<size_t>(a.panels.in_panel(r)), in_b = static_cast<size_t>(b.panels.in_panel(r));
            for (size_t g = 0; g < static_cast<size_t>(a.panels.groups); ++g) {
                const int8_t* q = a.panels.q + a.panels.q_at(r) + g * in_a * GROUP;
                const float *meta = a.panels.meta + a.panels.meta_at(r) + g * in_a * Panels::FIELDS;
                const float *other = b.panels.meta + b.panels.meta_at(r) + g * in_b * Panels::FIELDS;
                expect(std::equal(q, q + GROUP, b.panels.q + b.panels.q_at(r) + g * in_b * GROUP),
                       std::string("quantise of ") + family_.name + " rounds otherwise");
                same({meta[0], meta[in_a]}, {other[0], other[in_b]}, "quantise");
                for (size_t field = Panels::START_0; field < Panels::FIELDS; ++field) {
                    expect(std::memcmp(meta + field * in_a, other + field * in_b, 4) == 0,
                           std::string("quantise of ") + family_.name + " begins sums otherwise");
                }
            }
        }
    }

    void products() {
        const int rows = random_.within(1, 30), out = random_.within(1, 50), in = random_.within(1, 200);
        const std::vector<float> x = values(static_cast<size_t>(rows) * in);
        Arena arena;
        {
            const std::vector<float> weights = random_.reals(static_cast<size_t>(out) * in);
            const Matrix w = pack_f32(arena, weights.data(), out, in);
            compare("matmul_f32", std::vector<float>(static_cast<size_t>(rows) * out), [&](const Kernels& k, float* y) {
                k.matmul_f32(w, x.data(), in, rows, 0, w.blocks, y, out);
            });
        }
        const Activations a = quantised(*kernels_portable, x, rows, in), b = quantised(family_, x, rows, in);
        same_activations(a, b);
        constexpr int ranges[][2] = {{-128, 127}, {0, 15}, {-8, 7}};
        const size_t groups = static_cast<size_t>(a.panels.groups);
        for (const auto& range : ranges) {
            auto q = random_.bytes(static_cast<size_t>(out) * groups * GROUP, range[0], range[1]);
            if (random_.within(0, 4) == 0) std::fill(q.begin(), q.end(), static_cast<int8_t>(range[0]));
            auto scale = random_.reals(static_cast<size_t>(out) * groups), offset = random_.reals(scale.size());
            if (random_.within(0, 1)) {  // exact float16
                for (float& v : scale) v = std::ldexp(std::floor(std::ldexp(v, 10)), -24 + random_.within(0, 10));
                for (float& v : offset) v = std::ldexp(std::floor(std::ldexp(v, 10)), -10);
            }
            const float* shift = random_.within(0, 1) ? offset.data() : nullptr;
            const auto pack = [&](const Kernels& k) {
                return pack_int8(arena, q.data(), scale.data(), shift, out, in, k.unsigned_bytes);
            };
            const Matrix wa = pack(*kernels_portable), wb = pack(family_);
            compare("matmul_int8", std::vector<float>(static_cast<size_t>(rows) * out), [&](const Kernels& k, float* y) {
                const bool first = &k == kernels_portable;
                k.matmul_int8(first ? wa : wb, first ? a.panels : b.panels, 0, wa.blocks, y, out);
            });
        }
    }

    // The kinds that hold floats of 2 bytes, and ggml's k-kinds.
    void other_products() {
        using Kind = Matrix::Kind;
        const int rows = random_.within(1, 20), out = random_.within(1, 40), in = SUPER * random_.within(1, 2);
        const size_t n = static_cast<size_t>(out) * in;
        const std::vector<float> x = values(static_cast<size_t>(rows) * in), none(static_cast<size_t>(rows) * out);
        Arena arena;
        const auto halves = [&](size_t count, int from, int to) {
            std::vector<uint16_t> bits(count);
            for (uint16_t& v : bits) v = static_cast<uint16_t>(random_.within(from, to) | random_.within(0, 1) << 15);
            return bits;
        };
        for (const Kind kind : {Kind::f16, Kind::bf16}) {
            const Matrix w = pack_16(arena, halves(n, 0, 0x3fff).data(), kind, out, in);
            compare("matmul_f32 of 2 bytes", none, [&](const Kernels& k, float* y) {
                k.matmul_f32(w, x.data(), in, rows, 0, w.blocks, y, out);
            });
        }
        const Activations a = quantised(*kernels_portable, x, rows, in), b = quantised(family_, x, rows, in);
        constexpr struct { Kind kind; int low, high, least, most; } kinds[] = {
            {Kind::q3_k, -4, 3, -32, 31}, {Kind::q4_k, 0, 15, 0, 63}, {Kind::q5_k, 0, 31, 0, 63},
            {Kind::q6_k, -32, 31, -128, 127}};
        for (const auto& each : kinds) {
            const size_t supers = n / SUPER, scales = n / (Matrix::halves(each.kind) ? 16 : GROUP);
            const auto q = random_.bytes(n, each.low, each.high);
            const auto d = halves(supers, 0, 0x3fff), dmin = halves(supers, 0, 0x3fff);
            const auto scale = random_.bytes(scales, each.least, each.most), minimum = random_.bytes(scales, 0, 63);
            const Supers parts{q.data(), d.data(), scale.data(), dmin.data(), minimum.data()};
            const Matrix w = pack_super(arena, parts, each.kind, out, in);
            compare("matmul_int8 of a k-kind", none, [&](const Kernels& k, float* y) {
                k.matmul_int8(w, &k == kernels_portable ? a.panels : b.panels, 0, w.blocks, y, out);
            });
        }
    }

    const Kernels& family_;
    Random random_;
    int n_ = 1;
};

}  // namespace

void check_kernels(const Kernels& family, uint64_t seed, int rounds) {
    Comparison comparison(family, seed);
    for (int i = 0; i < rounds; ++i) comparison.round();
}

}  // namespace outpace
