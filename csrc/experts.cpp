#include <algorithm>
#include <cmath>
#include <cstring>

#include "stack.h"

namespace outpace {

// Routed experts: every expert sees all its rows of the pass at once; a row sums its experts from the most probable on.
void Stack::routed(const Layer& layer, const Input& input) {
    const Config& c = config_;
    const int rows = input.rows, used = c.experts_used, hidden = c.hidden_size;
    const size_t routes_stride = padded(c.experts), stride = padded(hidden), inner = padded(c.expert_ffn_size);
    float* routes = room(routes_, rows * routes_stride);
    multiply(layer.router, input, 0, layer.router.w.blocks, routes, routes_stride);

    struct Choice { int expert, place; float weight; };
    std::vector<Choice> choices(static_cast<size_t>(rows) * used);
    std::vector<int> counts(c.experts, 0);
    for (int r = 0; r < rows; ++r) {
        float* p = routes + r * routes_stride;
        const float top = *std::max_element(p, p + c.experts);
        float total = 0;
        for (int e = 0; e < c.experts; ++e) total += p[e] = std::exp(p[e] - top);
        for (int e = 0; e < c.experts; ++e) p[e] /= total;
        float chosen = 0;
        for (int rank = 0; rank < used; ++rank) {
            int best = -1;
            for (int e = 0; e < c.experts; ++e) {
                bool taken = false;
                for (int before = 0; before < rank; ++before) taken |= choices[r * used + before].expert == e;
                if (!taken && (best < 0 || p[e] > p[best])) best = e;
            }
            choices[r * used + rank] = {best, counts[best]++, p[best]};
            chosen += p[best];
        }
        for (int rank = 0; rank < used; ++rank) {
            float& weight = choices[r * used + rank].weight;
            if (c.norm_topk) weight /= chosen;
            weight *= c.expert_scale;
        }
    }

    // Rows sorted by expert, each expert's rows in order.
    struct Active { int expert, start, rows; Input input, hidden; };
    std::vector<Active> active;
    std::vector<int> start(c.experts, 0);
    const int assigned = rows * used;
    for (int e = 0, at = 0; e < c.experts; at += counts[e++]) {
        start[e] = at;
        if (counts[e]) active.push_back({e, at, counts[e], {}, {}});
    }
    const int n = static_cast<int>(active.size());
    float* x = room(expert_x_, static_cast<size_t>(assigned) * hidden);
    float* gate = room(expert_gate_, assigned * inner);
    float* up = room(expert_up_, assigned * inner);
    float* out = room(expert_out_, assigned * stride);
    const size_t most = static_cast<size_t>(assigned) * std::max(ceil_div(hidden, GROUP), ceil_div(c.expert_ffn_size, GROUP));
    room(expert_bytes_, most * GROUP);
    room(expert_meta_, most * Panels::FIELDS);
    const auto input_of = [&](const Active& a, const float* from, size_t from_stride, int width) {
        Input in{from + a.start * from_stride, from_stride, a.rows, {}};
        const int groups = ceil_div(width, GROUP);
        in.panels.q = expert_bytes_.data() + static_cast<size_t>(a.start) * groups * GROUP;
        in.panels.meta = expert_meta_.data() + static_cast<size_t>(a.start) * groups * Panels::FIELDS;
        in.panels.rows = a.rows;
        in.panels.tile = ceil_div(a.rows, ceil_div(a.rows, kernels_.tile));
        in.panels.groups = groups;
        return in;
    };
    std::vector<int> active_of(c.experts, -1);
    for (int a = 0; a < n; ++a) {
        active[a].input = input_of(active[a], x, hidden, hidden);
        active[a].hidden = input_of(active[a], gate, inner, c.expert_ffn_size);
        active_of[active[a].expert] = a;
    }
    pool_.split(assigned, 2, [&](int begin, int end) {
        for (int item = begin; item < end; ++item) {
            const Choice& choice = choices[item];
            const Active& a = active[active_of[choice.expert]];
            const float* from = input.x + item / used * input.stride;
            std::memcpy(x + static_cast<size_t>(a.start + choice.place) * hidden, from, hidden * sizeof(float));
            if (int8_) kernels_.quantise(from, hidden, a.input.panels, choice.place, 0, a.input.panels.groups);
        }
    });
    // Tasks over (expert, block of outputs).
    const auto over_experts = [&](int blocks, const auto& body) {
        pool_.split(n * blocks, 1, [&](int begin, int end) {
            for (int at = begin; at < end;) {
                const int a = at / blocks, first = at % blocks, last = std::min(blocks, first + end - at);
                body(active[a], layer.experts[active[a].expert], first, last);
                at += last - first;
            }
        });
    };
    over_experts(ceil_div(c.expert_ffn_size, OUTS), [&](const Active& a, const Mlp& mlp, int first, int last) {
        float *g = gate + a.start * inner, *u = up + a.start * inner;
        multiply(mlp.gate, a.input, first, last, g, inner);
        multiply(mlp.up, a.input, first, last, u, inner);
        const int from = first * OUTS, to = std::min(last * OUTS, c.expert_ffn_size);
        for (int r = 0; r < a.rows; ++r) kernels_.silu_mul(g + r * inner + from, u + r * inner + from, to - from);
    });
    if (int8_) {
        pool_.split(assigned, 2, [&](int begin, int end) {
            for (int item = begin; item < end; ++item) {
                const Choice& choice = choices[item];
                const Active& a = active[active_of[choice.expert]];
                kernels_.quantise(gate + (a.start + choice.place) * inner, c.expert_ffn_size, a.hidden.panels,
                                  choice.place, 0, a.hidden.panels.groups);
            }
        });
    }
    over_experts(ceil_div(hidden, OUTS), [&](const Active& a, const Mlp& mlp, int first, int last) {
        multiply(mlp.down, a.hidden, first, last, out + a.start * stride, stride);
    });

    float* total = room(out_, rows * stride);
    pool_.split(rows, 2, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
            std::fill(total + r * stride, total + (r + 1) * stride, 0.0f);
            for (int rank = 0; rank < used; ++rank) {
                const Choice& choice = choices[r * used + rank];
                kernels_.add_scaled(total + r * stride, out + (start[choice.expert] + choice.place) * stride,
                                    choice.weight, hidden);
            }
        }
    });
    if (c.shared_ffn_size) {
        float* shared = room(expert_out_, std::max(assigned, rows) * stride);  // the experts' results are summed
        swiglu(layer.shared, input, shared, stride, false);
        std::vector<float> gates(rows * padded(1));
        multiply(layer.shared_gate, input, 0, 1, gates.data(), padded(1));
        for (int r = 0; r < rows; ++r) {
            const float g = 1.0f / (1.0f + std::exp(-gates[r * padded(1)]));
            kernels_.add_scaled(total + r * stride, shared + r * stride, g, hidden);
        }
    }
    for (int r = 0; r < rows; ++r) kernels_.add(x_.data() + static_cast<size_t>(r) * hidden, total + r * stride, hidden);
}

}  // namespace outpace
