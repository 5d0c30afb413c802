#include "stack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace outpace {
namespace {

constexpr int TINY_PANEL = 128;  // groups of activations that one thread rounds by itself

Config checked(Config c) {
    for (int n : {c.vocab_size, c.hidden_size, c.intermediate_size, c.layers, c.heads, c.kv_heads, c.head_dim}) {
        if (n < 1 || n > (1 << 26)) refuse("a model size is not in 1 .. 2^26");
    }
    if (c.head_dim % 2 || c.head_dim > MOST_HEAD_DIM) refuse("head_dim must be even and at most 512");
    if (c.heads % c.kv_heads) refuse("the number of heads must be a multiple of the number of key-value heads");
    if (c.windows.size() != static_cast<size_t>(c.layers) || c.moe.size() != static_cast<size_t>(c.layers)) {
        refuse("windows and moe need one entry a layer");
    }
    if (std::any_of(c.windows.begin(), c.windows.end(), [](int w) { return w < 0; })) refuse("a window is negative");
    if (c.frequencies.size() != static_cast<size_t>(c.head_dim / 2)) refuse("frequencies need head_dim / 2 entries");
    if (std::any_of(c.moe.begin(), c.moe.end(), [](int m) { return m != 0; }) &&
        (c.experts < 1 || c.experts_used < 1 || c.experts_used > c.experts || c.expert_ffn_size < 1 ||
         c.shared_ffn_size < 0)) {
        refuse("the numbers of experts do not fit together");
    }
    return c;
}

}  // namespace

Stack::Stack(Config config, int slots, int positions, int rows, std::shared_ptr<Crew> crew, CacheKind cache)
    : Weights(crew->mutex, choose_kernels().unsigned_bytes),
      config_(checked(std::move(config))),
      kernels_(choose_kernels()),
      max_rows_(within(rows, 1, 1 << 20, "rows")),
      crew_(std::move(crew)),
      pool_(crew_->pool),
      cache_(within(slots, 1, 1 << 20, "slots"), within(positions, 1, 1 << 30, "positions"), config_.layers,
             config_.kv_heads, HeadLayout(cache, config_.head_dim, kernels_.unsigned_bytes)) {}

// ------------------------------------------------------------------------------------------------ weights

Stack::Mlp Stack::mlp(const std::string& prefix, int inner) const {
    const int hidden = config_.hidden_size;
    return {linear(prefix + "gate_proj", inner, hidden), linear(prefix + "up_proj", inner, hidden),
            linear(prefix + "down_proj", hidden, inner), inner};
}

void Stack::take_layers(int inputs) {
    const Config& c = config_;
    layers_.clear();
    for (int i = 0; i < c.layers; ++i) {
        const std::string prefix = "model.layers." + std::to_string(i) + ".", self = prefix + "self_attn.";
        Layer layer;
        layer.attention_norm = take_vector(prefix + "input_layernorm.weight", c.hidden_size);
        layer.mlp_norm = take_vector(prefix + "post_attention_layernorm.weight", c.hidden_size);
        const int width = i ? c.hidden_size : inputs;
        layer.q = linear(self + "q_proj", c.heads * c.head_dim, width);
        layer.k = linear(self + "k_proj", c.kv_heads * c.head_dim, width);
        layer.v = linear(self + "v_proj", c.kv_heads * c.head_dim, width);
        layer.o = linear(self + "o_proj", c.hidden_size, c.heads * c.head_dim);
        if (c.qk_norm) {
            layer.q_norm = take_vector(self + "q_norm.weight", c.head_dim);
            layer.k_norm = take_vector(self + "k_norm.weight", c.head_dim);
        }
        if (!c.moe[i]) {
            layer.mlp = mlp(prefix + "mlp.", c.intermediate_size);
        } else {
            layer.router = linear(prefix + "mlp.gate", c.experts, c.hidden_size);
            if (layer.router.w.kind != Matrix::Kind::f32) refuse("the router " + prefix + "mlp.gate must be float32");
            for (int e = 0; e < c.experts; ++e) {
                layer.experts.push_back(mlp(prefix + "mlp.experts." + std::to_string(e) + ".", c.expert_ffn_size));
            }
            if (c.shared_ffn_size) {
                layer.shared = mlp(prefix + "mlp.shared_expert.", c.shared_ffn_size);
                layer.shared_gate = linear(prefix + "mlp.shared_expert_gate", 1, c.hidden_size);
                if (layer.shared_gate.w.kind != Matrix::Kind::f32) refuse("the shared expert's gate must be float32");
            }
        }
        layers_.push_back(std::move(layer));
    }
    for (const auto& [name, m] : matrices()) int8_ |= !m.floats();
}

size_t Stack::layer_bytes() const {
    const auto of = [](const Mlp& mlp) { return mlp.gate.w.bytes() + mlp.up.w.bytes() + mlp.down.w.bytes(); };
    size_t total = 0;
    for (const Layer& layer : layers_) {
        total += layer.q.w.bytes() + layer.k.w.bytes() + layer.v.w.bytes() + layer.o.w.bytes();
        if (layer.experts.empty()) {
            total += of(layer.mlp);
        } else {
            total += layer.router.w.bytes() + of(layer.experts[0]) * static_cast<size_t>(config_.experts_used);
            if (config_.shared_ffn_size) total += of(layer.shared) + layer.shared_gate.w.bytes();
        }
    }
    return total;
}

// ------------------------------------------------------------------------------------------------ slots

int Stack::open() {
    std::lock_guard<std::mutex> lock(mutex_);
    return cache_.open();
}

void Stack::close(int slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    cache_.close(slot);
}

int Stack::fork(int slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    return cache_.fork(slot);
}

int Stack::length(int slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    return cache_.at(slot).length;
}

int Stack::pending(int slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(cache_.at(slot).parents.size());
}

void Stack::commit(int slot, const std::vector<int>& rows) {
    std::lock_guard<std::mutex> lock(mutex_);
    cache_.commit(slot, rows);
}

void Stack::truncate(int slot, int length) {
    std::lock_guard<std::mutex> lock(mutex_);
    cache_.truncate(slot, length);
}

void Stack::fill(int slot, int length) {
    std::lock_guard<std::mutex> lock(mutex_);
    Cache::Slot& s = cache_.at(slot);
    if (s.length != 0) refuse("slot " + std::to_string(slot) + " is not empty");
    if (length < 0) refuse("a slot cannot hold " + std::to_string(length) + " rows");
    if (length > cache_.positions()) {
        throw Full(std::to_string(length) + " rows do not fit the " + std::to_string(cache_.positions()) +
                   " positions of a slot");
    }
    cache_.reserve(s, length);
    s.parents.clear();
    const int dims = config_.head_dim;
    pool_.split(length, 64, [&](int begin, int end) {
        std::array<float, MOST_HEAD_DIM> key, value;
        for (int p = begin; p < end; ++p) {
            uint32_t state = static_cast<uint32_t>(p) * 2654435761u + 1;
            const auto uniform = [&] {
                state = state * 1664525u + 1013904223u;
                return static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
            };
            for (int part = 0; part < config_.layers * config_.kv_heads; ++part) {
                for (int d = 0; d < dims; ++d) key[d] = uniform(), value[d] = uniform();
                kernels_.keep(cache_.layout(), s.blocks[p / BLOCK].get() + part * cache_.layout().bytes, p % BLOCK,
                              key.data(), value.data());
            }
        }
    });
    s.length = length;
}

std::vector<float> Stack::cached(int slot, int layer) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Cache::Slot& s = cache_.at(slot);
    within(layer, 0, config_.layers - 1, "layer");
    std::vector<float> found;
    for (int value = 0; value < 2; ++value) {
        for (int kv = 0; kv < config_.kv_heads; ++kv) {
            for (int p = 0; p < s.length; ++p) {
                const uint8_t* head = s.blocks[p / BLOCK].get() + cache_.head_at(layer, kv);
                for (int d = 0; d < config_.head_dim; ++d) found.push_back(cache_.layout().read(head, p % BLOCK, value, d));
            }
        }
    }
    return found;
}

size_t Stack::cache_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return cache_.bytes();
}

std::array<double, StageClock::STAGES> Stack::time_stages(bool on) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto seconds = clock_.seconds();
    clock_.set(on);
    return seconds;
}

// ------------------------------------------------------------------------------------------------ a pass: layout

void Stack::check(const std::vector<Share>& shares, const std::vector<int>& wanted) {
    if (!ready_) refuse("the weights are not complete");
    if (shares.empty()) refuse("a pass needs at least one slot");
    size_t total = 0;
    for (const Share& share : shares) {
        const Cache::Slot& slot = cache_.at(share.slot);
        const std::string name = "slot " + std::to_string(share.slot);
        const size_t n = share.tokens.size(), pending = share.append ? slot.parents.size() : 0;
        if (n == 0) refuse(name + " has no rows in this pass");
        for (const Share& other : shares) {
            if (&other != &share && other.slot == share.slot) refuse(name + " appears twice in a pass");
        }
        for (int token : share.tokens) {
            if (token < 0 || token >= config_.vocab_size) {
                refuse("token id " + std::to_string(token) + " is not in 0 .. " +
                       std::to_string(config_.vocab_size - 1));
            }
        }
        if (share.parents.size() != n) refuse("parents need one entry a row");
        for (size_t i = 0; i < n; ++i) {
            if (share.parents[i] < -1 || share.parents[i] >= static_cast<int>(pending + i)) {
                refuse("parents must name an earlier row, or -1, for each row");
            }
        }
        if (pending + n > static_cast<size_t>(cache_.positions() - slot.length)) {
            throw Full(std::to_string(slot.length) + " + " + std::to_string(pending + n) + " rows do not fit the " +
                       std::to_string(cache_.positions()) + " positions of a slot");
        }
        total += n;
    }
    if (total > static_cast<size_t>(max_rows_)) {
        throw Full("a pass takes at most " + std::to_string(max_rows_) + " rows, got " + std::to_string(total));
    }
    for (size_t i = 0; i < wanted.size(); ++i) {
        if (wanted[i] < 0 || wanted[i] >= static_cast<int>(total) || (i && wanted[i] <= wanted[i - 1])) {
            refuse("logits rows must be ascending rows of the pass");
        }
    }
}

void Stack::layout(const std::vector<Share>& shares) {
    for (const Share& share : shares) {
        Cache::Slot& slot = cache_.at(share.slot);
        const size_t all = (share.append ? slot.parents.size() : 0) + share.tokens.size();
        slot.parents.reserve(all);
        cache_.reserve(slot, static_cast<int>(all));
    }
    rows_.clear();
    paths_.clear();
    blocks_.assign(shares.size(), {});
    std::vector<int> parents, depth, path;
    for (size_t s = 0; s < shares.size(); ++s) {
        const Share& share = shares[s];
        const Cache::Slot& slot = cache_.at(share.slot);
        for (const auto& block : slot.blocks) blocks_[s].push_back(block.get());
        parents.clear();
        if (share.append) parents = slot.parents;
        const size_t pending = parents.size();
        parents.insert(parents.end(), share.parents.begin(), share.parents.end());
        depth.clear();
        for (size_t i = 0; i < parents.size(); ++i) {
            depth.push_back(parents[i] < 0 ? 0 : depth[parents[i]] + 1);
            if (i < pending) continue;
            path.assign(depth[i] + 1, 0);
            for (int at = static_cast<int>(i), d = depth[i]; d >= 0; at = parents[at], --d) path[d] = at;
            int straight = 0;
            while (straight <= depth[i] && path[straight] == straight) ++straight;
            const int position = slot.length + depth[i];
            rows_.push_back({static_cast<int>(s), share.tokens[i - pending], position, slot.length + static_cast<int>(i),
                             slot.length + straight, static_cast<int>(paths_.size()), position, position});
            for (int d = straight; d <= depth[i]; ++d) paths_.push_back(slot.length + path[d]);
        }
    }
    // Nothing throws from here on. Rows that the pass replaces end now: it will write where they lie.
    for (const Share& share : shares) {
        if (!share.append) cache_.at(share.slot).parents.clear();
    }
}

void Stack::pend(const std::vector<Share>& shares) {
    for (const Share& share : shares) {  // within what layout reserved: nothing throws
        std::vector<int>& parents = cache_.at(share.slot).parents;
        parents.insert(parents.end(), share.parents.begin(), share.parents.end());
    }
}

void Stack::rotary_tables() {
    const int half = config_.head_dim / 2;
    float* cos = room(cos_, rows_.size() * half);
    float* sin = room(sin_, rows_.size() * half);
    pool_.split(static_cast<int>(rows_.size()), 8, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
            for (int i = 0; i < half; ++i) {
                // The angle is rounded to float32, as everywhere in the field; its functions are not.
                const double angle = static_cast<float>(rows_[r].position) * config_.frequencies[i];
                cos[r * half + i] = static_cast<float>(std::cos(angle)) * config_.rotary_factor;
                sin[r * half + i] = static_cast<float>(std::sin(angle)) * config_.rotary_factor;
            }
        }
    });
}

// ------------------------------------------------------------------------------------------------ a pass: layers

Panels Stack::panels(int rows, int width, std::vector<int8_t>& q, std::vector<float>& meta) {
    Panels p;
    p.rows = rows;
    p.tile = ceil_div(rows, ceil_div(rows, kernels_.tile));
    p.groups = ceil_div(width, GROUP);
    const size_t groups = static_cast<size_t>(rows) * p.groups;
    p.q = room(q, groups * GROUP);
    p.meta = room(meta, groups * Panels::FIELDS);
    return p;
}

Stack::Input Stack::norm(const float* x, const float* weight, int rows) {
    const int n = config_.hidden_size;
    Input input{room(h_, static_cast<size_t>(rows) * n), static_cast<size_t>(n), rows, {}};
    const auto normalise = [&](int r, int from, int to) {
        const float* row = x + static_cast<size_t>(r) * n;
        const float scale = kernels_.rms_scale(row, n, config_.eps);
        kernels_.normalise(row + from, weight + from, scale, to - from, h_.data() + static_cast<size_t>(r) * n + from);
    };
    if (!int8_) {
        pool_.split(rows, 2, [&](int begin, int end) {
            for (int r = begin; r < end; ++r) normalise(r, 0, n);
        });
        return input;
    }
    input.panels = panels(rows, n, bytes_, meta_);
    by_panel(input.panels, [&](int r, int first, int last) {
        normalise(r, first * GROUP, std::min(last * GROUP, n));
        kernels_.quantise(h_.data() + static_cast<size_t>(r) * n, n, input.panels, r, first, last);
    });
    return input;
}

// body(row, first group, last group) for all rows of the panels. A row's values lie between those of its panel's other
// rows, and threads that write to the same cache lines wait for each other: they get panels, or ranges of groups.
template <class Body> void Stack::by_panel(const Panels& to, const Body& body) {
    const int tiles = ceil_div(to.rows, to.tile);
    const bool tiny = to.rows * to.groups < TINY_PANEL;  // not worth waking anybody
    const int ranges = tiny ? 1 : std::min(to.groups, ceil_div(2 * pool_.threads(), tiles));
    const auto task = [&](int i) {
        const int tile = i / ranges, range = i % ranges;
        const int first = to.groups * range / ranges, last = to.groups * (range + 1) / ranges;
        for (int r = tile * to.tile; r < std::min(to.rows, (tile + 1) * to.tile); ++r) body(r, first, last);
    };
    pool_.run(tiles * ranges, task);
}

Stack::Input Stack::quantised(const float* x, size_t stride, int rows, int width) {
    Input input{x, stride, rows, {}};
    if (int8_) {
        input.panels = panels(rows, width, bytes_, meta_);
        by_panel(input.panels, [&](int r, int first, int last) {
            kernels_.quantise(x + r * stride, width, input.panels, r, first, last);
        });
    }
    return input;
}

// Blocks first .. last of a linear layer, for all rows of the input.
void Stack::multiply(const Linear& linear, const Input& input, int first, int last, float* y, size_t stride) {
    const Matrix& w = linear.w;
    if (w.floats()) {
        kernels_.matmul_f32(w, input.x, input.stride, input.rows, first, last, y, stride);
    } else {
        kernels_.matmul_int8(w, input.panels, first, last, y, stride);
    }
    if (linear.bias) {
        const int from = first * OUTS, to = std::min(last * OUTS, w.out);
        for (int r = 0; r < input.rows; ++r) kernels_.add(y + r * stride + from, linear.bias + from, to - from);
    }
}

void Stack::multiply_all(const Linear& linear, const Input& input, float* y, size_t stride) {
    pool_.split(linear.w.blocks, 1, [&](int first, int last) { multiply(linear, input, first, last, y, stride); });
}

void Stack::gather(const std::vector<int>& wanted) {
    const size_t hidden = static_cast<size_t>(config_.hidden_size);
    for (size_t i = 0; i < wanted.size(); ++i) {  // ascending, so that a row is read before it is overwritten
        const size_t from = static_cast<size_t>(wanted[i]);
        if (from != i) std::memcpy(x_.data() + i * hidden, x_.data() + from * hidden, hidden * sizeof(float));
    }
}

void Stack::run_layers(const Input* first, const std::function<void(int)>& after, bool keep_only) {
    const int rows = static_cast<int>(rows_.size());
    rotary_tables();
    for (int i = 0; i < config_.layers; ++i) {
        clock_.enter(StageClock::PROJECTIONS);
        const Input normed = i == 0 && first ? *first : norm(x_.data(), layers_[i].attention_norm, rows);
        if (keep_only && i + 1 == config_.layers) {
            project(i, normed, false);
            break;
        }
        attention(i, normed);
        clock_.enter(StageClock::MLP);
        const Input input = norm(x_.data(), layers_[i].mlp_norm, rows);
        if (config_.moe[i]) {
            routed(layers_[i], input);
        } else {
            const size_t stride = padded(config_.hidden_size);
            swiglu(layers_[i].mlp, input, room(out_, rows * stride), stride, true);
        }
        after(i);
    }
    clock_.enter(StageClock::REST);
}

void Stack::project(int i, const Input& input, bool queries) {
    const Config& c = config_;
    const Layer& layer = layers_[i];
    const int rows = static_cast<int>(rows_.size()), half = c.head_dim / 2;
    const size_t q_stride = padded(c.heads * c.head_dim), kv_stride = padded(c.kv_heads * c.head_dim);
    float* q = room(q_, rows * q_stride);
    float* k = room(k_, rows * kv_stride);
    float* v = room(v_, rows * kv_stride);
    const int q_blocks = queries ? layer.q.w.blocks : 0, kv_blocks = layer.k.w.blocks;
    pool_.split(q_blocks + 2 * kv_blocks, 1, [&](int begin, int end) {
        const auto part = [&](const Linear& linear, int start, int blocks, float* y, size_t stride) {
            const int first = std::max(begin - start, 0), last = std::min(end - start, blocks);
            if (first < last) multiply(linear, input, first, last, y, stride);
        };
        part(layer.q, 0, q_blocks, q, q_stride);
        part(layer.k, q_blocks, kv_blocks, k, kv_stride);
        part(layer.v, q_blocks + kv_blocks, kv_blocks, v, kv_stride);
    });

    // Norms, rotation, and the way into the cache. KV heads outermost: neighbouring tasks write other cache lines.
    const float shrink = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_dim)));
    const bool rounds = cache_.layout().kind == CacheKind::q8;
    Panels rounded;
    if (rounds && queries) rounded = query_panels();
    const auto norm_head = [&](float* at, const float* weight) {
        kernels_.normalise(at, weight, kernels_.rms_scale(at, c.head_dim, c.eps), c.head_dim, at);
    };
    const int from = queries ? 0 : c.heads;
    pool_.split((c.heads + c.kv_heads - from) * rows, 32, [&](int begin, int end) {
        for (int item = begin; item < end; ++item) {
            const int head = from + item / rows, r = item % rows;
            const float *cos = cos_.data() + static_cast<size_t>(r) * half, *sin = sin_.data() + static_cast<size_t>(r) * half;
            if (head < c.heads) {
                float* at = q + r * q_stride + static_cast<size_t>(head) * c.head_dim;
                if (layer.q_norm) norm_head(at, layer.q_norm);
                kernels_.rotate(at, cos, sin, half);
                kernels_.scale(at, shrink, c.head_dim);
                if (rounds) kernels_.quantise(at, c.head_dim, rounded, r * c.heads + head, 0, rounded.groups);
                continue;
            }
            const int kv = head - c.heads;
            float* key = k + r * kv_stride + static_cast<size_t>(kv) * c.head_dim;
            if (layer.k_norm) norm_head(key, layer.k_norm);
            kernels_.rotate(key, cos, sin, half);
            const Row& row = rows_[r];
            kernels_.keep(cache_.layout(), blocks_[row.share][row.place / BLOCK] + cache_.head_at(i, kv), row.place % BLOCK,
                          key, v + r * kv_stride + static_cast<size_t>(kv) * c.head_dim);
        }
    });
}

void Stack::attention(int i, const Input& input) {
    const Config& c = config_;
    const Layer& layer = layers_[i];
    const int rows = static_cast<int>(rows_.size());
    project(i, input, true);
    clock_.enter(StageClock::ATTENTION);
    attend(i);
    clock_.enter(StageClock::PROJECTIONS);

    const Input mixed = quantised(mixed_.data(), static_cast<size_t>(c.heads) * c.head_dim, rows, c.heads * c.head_dim);
    const size_t stride = padded(c.hidden_size);
    float* out = room(out_, rows * stride);
    pool_.split(layer.o.w.blocks, 1, [&](int first, int last) {
        multiply(layer.o, mixed, first, last, out, stride);
        const int from = first * OUTS, to = std::min(last * OUTS, c.hidden_size);
        for (int r = 0; r < rows; ++r) {
            kernels_.add(x_.data() + static_cast<size_t>(r) * c.hidden_size + from, out + r * stride + from, to - from);
        }
    });
}

// y = down(silu(gate(x)) * up(x)), or x_ += that.
void Stack::swiglu(const Mlp& mlp, const Input& input, float* y, size_t stride, bool residual) {
    const int rows = input.rows;
    const size_t inner = padded(mlp.inner);
    float* gate = room(gate_, rows * inner);
    float* up = room(up_, rows * inner);
    pool_.split(mlp.gate.w.blocks, 1, [&](int first, int last) {
        multiply(mlp.gate, input, first, last, gate, inner);
        multiply(mlp.up, input, first, last, up, inner);
        const int from = first * OUTS, to = std::min(last * OUTS, mlp.inner);
        for (int r = 0; r < rows; ++r) kernels_.silu_mul(gate + r * inner + from, up + r * inner + from, to - from);
    });
    const Input hidden = quantised(gate, inner, rows, mlp.inner);
    pool_.split(mlp.down.w.blocks, 1, [&](int first, int last) {
        multiply(mlp.down, hidden, first, last, y, stride);
        if (!residual) return;
        const int from = first * OUTS, to = std::min(last * OUTS, mlp.down.w.out);
        for (int r = 0; r < rows; ++r) {
            kernels_.add(x_.data() + static_cast<size_t>(r) * config_.hidden_size + from, y + r * stride + from, to - from);
        }
    });
}

}  // namespace outpace
