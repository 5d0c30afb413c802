#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace outpace {
namespace {

constexpr int TINY_PANEL = 128;  // groups of activations that one thread rounds by itself
constexpr int HEAD_TILE = 8;                 // heads that an attention task takes through the cache together
constexpr size_t PARTIALS = size_t(4) << 20; // numbers: partial results of attention that are kept at once
constexpr size_t SMALL_TASK = 1 << 15;       // queries x positions x dimensions: about a microsecond

int ceil_div(int a, int b) { return (a + b - 1) / b; }
size_t padded(int n) { return static_cast<size_t>(ceil_div(n, OUTS)) * OUTS; }

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

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

int within(int value, int low, int high, const char* name) {
    if (value < low || value > high) {
        refuse(std::string(name) + " must be in " + std::to_string(low) + " .. " + std::to_string(high) + ", got " +
               std::to_string(value));
    }
    return value;
}

}  // namespace

Model::Model(Config config, int slots, int positions, int rows, int threads, CacheKind cache)
    : config_(checked(std::move(config))),
      kernels_(choose_kernels()),
      max_rows_(within(rows, 1, 1 << 20, "rows")),
      pool_(within(threads, 1, 256, "threads")),
      cache_(within(slots, 1, 1 << 20, "slots"), within(positions, 1, 1 << 30, "positions"), config_.layers,
             config_.kv_heads, HeadLayout(cache, config_.head_dim, kernels_.unsigned_bytes)) {}

// ------------------------------------------------------------------------------------------------ weights

void Model::put_int8(const std::string& name, const int8_t* q, const float* scale, const float* offset, int out,
                     int in) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_ || matrices_.count(name)) refuse("tensor " + name + " was already given");
    matrices_[name] = pack_int8(arena_, q, scale, offset, out, in, kernels_.unsigned_bytes);
}

void Model::put_f32(const std::string& name, const float* w, int out, int in) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_ || matrices_.count(name)) refuse("tensor " + name + " was already given");
    matrices_[name] = pack_f32(arena_, w, out, in);
}

void Model::put_16(const std::string& name, const uint16_t* w, Matrix::Kind kind, int out, int in) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_ || matrices_.count(name)) refuse("tensor " + name + " was already given");
    matrices_[name] = pack_16(arena_, w, kind, out, in);
}

void Model::put_super(const std::string& name, const Supers& from, Matrix::Kind kind, int out, int in) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_ || matrices_.count(name)) refuse("tensor " + name + " was already given");
    matrices_[name] = pack_super(arena_, from, kind, out, in);
}

void Model::put_packed(const std::string& name, const Matrix& like, const uint8_t* data, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_ || matrices_.count(name)) refuse("tensor " + name + " was already given");
    matrices_[name] = place(like, data, bytes, kernels_.unsigned_bytes);
    placed_ += bytes;
}

void Model::put_vector(const std::string& name, const float* v, int n) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_ || vectors_.count(name)) refuse("tensor " + name + " was already given");
    vectors_[name].assign(v, v + n);
}

Matrix Model::take(const std::string& name, int out, int in) {
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) refuse("tensor " + name + " is missing");
    const Matrix& m = found->second;
    if (m.out != out || m.in != in) {
        refuse("tensor " + name + " has shape [" + std::to_string(m.out) + ", " + std::to_string(m.in) +
               "], expected [" + std::to_string(out) + ", " + std::to_string(in) + "]");
    }
    return m;
}

const float* Model::maybe_vector(const std::string& name, int n) {
    const auto found = vectors_.find(name);
    if (found == vectors_.end()) return nullptr;
    if (found->second.size() != static_cast<size_t>(n)) {
        refuse("tensor " + name + " has " + std::to_string(found->second.size()) + " values, expected " +
               std::to_string(n));
    }
    return found->second.data();
}

const float* Model::take_vector(const std::string& name, int n) {
    const float* v = maybe_vector(name, n);
    if (!v) refuse("tensor " + name + " is missing");
    return v;
}

Model::Linear Model::linear(const std::string& name, int out, int in) {
    return {take(name + ".weight", out, in), maybe_vector(name + ".bias", out)};
}

Model::Mlp Model::mlp(const std::string& prefix, int inner) {
    const int hidden = config_.hidden_size;
    return {linear(prefix + "gate_proj", inner, hidden), linear(prefix + "up_proj", inner, hidden),
            linear(prefix + "down_proj", hidden, inner), inner};
}

void Model::forget() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_) refuse("the model is complete");
    matrices_.clear();
    vectors_.clear();
    layers_.clear();
    placed_ = 0;
}

void Model::ready() {
    std::lock_guard<std::mutex> lock(mutex_);
    const Config& c = config_;
    embedding_ = take("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
    head_ = c.tied ? embedding_ : take("lm_head.weight", c.vocab_size, c.hidden_size);
    final_norm_ = take_vector("model.norm.weight", c.hidden_size);
    layers_.clear();
    for (int i = 0; i < c.layers; ++i) {
        const std::string prefix = "model.layers." + std::to_string(i) + ".", self = prefix + "self_attn.";
        Layer layer;
        layer.attention_norm = take_vector(prefix + "input_layernorm.weight", c.hidden_size);
        layer.mlp_norm = take_vector(prefix + "post_attention_layernorm.weight", c.hidden_size);
        layer.q = linear(self + "q_proj", c.heads * c.head_dim, c.hidden_size);
        layer.k = linear(self + "k_proj", c.kv_heads * c.head_dim, c.hidden_size);
        layer.v = linear(self + "v_proj", c.kv_heads * c.head_dim, c.hidden_size);
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
    for (const auto& [name, m] : matrices_) int8_ |= !m.floats();
    ready_ = true;
}

// ------------------------------------------------------------------------------------------------ slots

int Model::open() {
    std::lock_guard<std::mutex> lock(mutex_);
    return cache_.open();
}

void Model::close(int slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    cache_.close(slot);
}

int Model::fork(int slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    return cache_.fork(slot);
}

int Model::length(int slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    return cache_.at(slot).length;
}

void Model::commit(int slot, const std::vector<int>& rows) {
    std::lock_guard<std::mutex> lock(mutex_);
    cache_.commit(slot, rows);
}

void Model::truncate(int slot, int length) {
    std::lock_guard<std::mutex> lock(mutex_);
    cache_.truncate(slot, length);
}

void Model::fill(int slot, int length) {
    std::lock_guard<std::mutex> lock(mutex_);
    Cache::Slot& s = cache_.at(slot);
    if (s.length != 0) refuse("slot " + std::to_string(slot) + " is not empty");
    if (length < 0) refuse("a slot cannot hold " + std::to_string(length) + " rows");
    if (length > cache_.positions()) {
        throw Full(std::to_string(length) + " rows do not fit the " + std::to_string(cache_.positions()) +
                   " positions of a slot");
    }
    s.parents.clear();
    cache_.reserve(s, length);
    const int dims = config_.head_dim;
    pool_.split(length, 64, [&](int begin, int end) {
        std::vector<float> key(dims), value(dims);
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

std::vector<float> Model::cached(int slot, int layer) {
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

size_t Model::cache_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return cache_.bytes();
}

// ------------------------------------------------------------------------------------------------ a pass: layout

void Model::check(const std::vector<Share>& shares, const std::vector<int>& wanted, const std::vector<int>& taps) {
    if (!ready_) refuse("the model's weights are not complete");
    if (shares.empty()) refuse("a pass needs at least one slot");
    size_t total = 0;
    for (const Share& share : shares) {
        const Cache::Slot& slot = cache_.at(share.slot);
        const std::string name = "slot " + std::to_string(share.slot);
        const size_t n = share.tokens.size();
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
            if (share.parents[i] < -1 || share.parents[i] >= static_cast<int>(i)) {
                refuse("parents must name an earlier row, or -1, for each row");
            }
        }
        if (n > static_cast<size_t>(cache_.positions() - slot.length)) {
            throw Full(std::to_string(slot.length) + " + " + std::to_string(n) + " rows do not fit the " +
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
    for (int tap : taps) {
        if (tap < -1 || tap > config_.layers) {
            refuse("tap " + std::to_string(tap) + " is not in -1 .. " + std::to_string(config_.layers));
        }
    }
}

void Model::layout(const std::vector<Share>& shares) {
    rows_.clear();
    paths_.clear();
    blocks_.assign(shares.size(), {});
    std::vector<int> depth, path;
    for (size_t s = 0; s < shares.size(); ++s) {
        const Share& share = shares[s];
        Cache::Slot& slot = cache_.at(share.slot);
        cache_.reserve(slot, static_cast<int>(share.tokens.size()));
        for (const auto& block : slot.blocks) blocks_[s].push_back(block.get());
        depth.clear();
        for (size_t i = 0; i < share.tokens.size(); ++i) {
            depth.push_back(share.parents[i] < 0 ? 0 : depth[share.parents[i]] + 1);
            path.assign(depth[i] + 1, 0);
            for (int at = static_cast<int>(i), d = depth[i]; d >= 0; at = share.parents[at], --d) path[d] = at;
            int straight = 0;
            while (straight <= depth[i] && path[straight] == straight) ++straight;
            rows_.push_back({static_cast<int>(s), share.tokens[i], slot.length + depth[i],
                             slot.length + static_cast<int>(i), slot.length + straight,
                             static_cast<int>(paths_.size())});
            for (int d = straight; d <= depth[i]; ++d) paths_.push_back(slot.length + path[d]);
        }
    }
}

void Model::rotary_tables() {
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

Panels Model::panels(int rows, int width, std::vector<int8_t>& q, std::vector<float>& meta) {
    Panels p;
    p.rows = rows;
    p.tile = ceil_div(rows, ceil_div(rows, kernels_.tile));
    p.groups = ceil_div(width, GROUP);
    const size_t groups = static_cast<size_t>(rows) * p.groups;
    p.q = room(q, groups * GROUP);
    p.meta = room(meta, groups * Panels::FIELDS);
    return p;
}

Model::Input Model::norm(const float* x, const float* weight, int rows) {
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
template <class Body> void Model::by_panel(const Panels& to, const Body& body) {
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

Model::Input Model::quantised(const float* x, size_t stride, int rows, int width) {
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
void Model::multiply(const Linear& linear, const Input& input, int first, int last, float* y, size_t stride) {
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

void Model::attention(int i) {
    const Config& c = config_;
    const Layer& layer = layers_[i];
    const int rows = static_cast<int>(rows_.size()), half = c.head_dim / 2;
    const size_t q_stride = padded(c.heads * c.head_dim), kv_stride = padded(c.kv_heads * c.head_dim);
    const Input input = norm(x_.data(), layer.attention_norm, rows);
    float* q = room(q_, rows * q_stride);
    float* k = room(k_, rows * kv_stride);
    float* v = room(v_, rows * kv_stride);
    const int q_blocks = layer.q.w.blocks, kv_blocks = layer.k.w.blocks;
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
    Panels queries;
    if (rounds) queries = query_panels();
    const auto norm_head = [&](float* at, const float* weight) {
        kernels_.normalise(at, weight, kernels_.rms_scale(at, c.head_dim, c.eps), c.head_dim, at);
    };
    pool_.split((c.heads + c.kv_heads) * rows, 32, [&](int begin, int end) {
        for (int item = begin; item < end; ++item) {
            const int head = item / rows, r = item % rows;
            const float *cos = cos_.data() + static_cast<size_t>(r) * half, *sin = sin_.data() + static_cast<size_t>(r) * half;
            if (head < c.heads) {
                float* at = q + r * q_stride + static_cast<size_t>(head) * c.head_dim;
                if (layer.q_norm) norm_head(at, layer.q_norm);
                kernels_.rotate(at, cos, sin, half);
                kernels_.scale(at, shrink, c.head_dim);
                if (rounds) kernels_.quantise(at, c.head_dim, queries, r * c.heads + head, 0, queries.groups);
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

// Queries rounded to 8 bits, each a panel of its own: number row * heads + head.
Panels Model::query_panels() {
    Panels p;
    p.rows = static_cast<int>(rows_.size()) * config_.heads;
    p.tile = 1;
    p.groups = cache_.layout().groups;
    const size_t groups = static_cast<size_t>(p.rows) * p.groups;
    p.q = room(query_bytes_, groups * GROUP);
    p.meta = room(query_meta_, groups * Panels::FIELDS);
    return p;
}

// Attention of all rows: q_ and the cache -> mixed_ [rows][heads * head_dim].
// A row's positions are taken in chunks of 256 by absolute position; each chunk gives a partial result, and the partial
// results are joined in order: the same operations for any number of rows, tasks and threads. A task is one chunk, the
// rows of one share and the heads of one KV head.
void Model::attend(int layer) {
    const Config& c = config_;
    const HeadLayout& layout = cache_.layout();
    const int rows = static_cast<int>(rows_.size()), group = c.heads / c.kv_heads, window = c.windows[layer];
    const int head_tile = std::min(group, HEAD_TILE), head_tiles = ceil_div(group, head_tile);
    const int units = c.kv_heads * head_tiles;
    const size_t q_stride = padded(c.heads * c.head_dim);
    float* mixed = room(mixed_, static_cast<size_t>(rows) * c.heads * c.head_dim);
    Panels rounded;
    if (layout.kind == CacheKind::q8) rounded = query_panels();
    const auto begin_of = [&](int r) { return window ? std::max(0, rows_[r].position + 1 - window) : 0; };

    // As many rows together as may be, but for tasks that are too few for the threads.
    const int estimate = units * (rows_[rows - 1].position / CHUNK - begin_of(rows - 1) / CHUNK + 1);
    int row_tile = std::min(rows, MOST_QUERIES / head_tile);
    if (pool_.threads() > 1) {
        while (row_tile > 1 && estimate * ceil_div(rows, row_tile) < 2 * pool_.threads()) row_tile = ceil_div(row_tile, 2);
    }
    tiles_.clear();
    for (int r = 0; r < rows;) {
        const int begin = r;
        int first = begin_of(r), last = 0;
        for (; r < rows && r - begin < row_tile && rows_[r].share == rows_[begin].share; ++r) {
            first = std::min(first, begin_of(r));
            last = std::max(last, rows_[r].position);
        }
        tiles_.push_back({begin, r, first / CHUNK, last / CHUNK - first / CHUNK + 1});
    }
    // As many tiles at once as there is room for their partial results.
    for (size_t from = 0; from < tiles_.size();) {
        int chunks = tiles_[from].count;
        size_t to = from + 1;
        const auto fits = [&](const Tile& tile) {
            const size_t more = std::max(chunks, tile.count);
            return (tile.end - tiles_[from].begin) * more * c.heads * layout.padded <= PARTIALS;
        };
        for (; to < tiles_.size() && fits(tiles_[to]); ++to) chunks = std::max(chunks, tiles_[to].count);
        const Tile* tiles = tiles_.data() + from;
        const int n_tiles = static_cast<int>(to - from), first_row = tiles[0].begin, last_row = tiles[n_tiles - 1].end;
        from = to;

        // Partial results of each row and head, chunk after chunk.
        const size_t cells = static_cast<size_t>(last_row - first_row) * c.heads, stride = padded(chunks);
        float* acc = room(acc_, cells * chunks * layout.padded);
        float* largest = room(largest_, cells * stride);
        float* sums = room(sums_, cells * stride);
        const auto finish = [&](int r, int head) {
            const size_t cell = static_cast<size_t>(r - first_row) * c.heads + head;
            const int count = rows_[r].position / CHUNK - begin_of(r) / CHUNK + 1;
            kernels_.join(largest + cell * stride, sums + cell * stride, acc + cell * chunks * layout.padded, count, layout,
                          mixed + (static_cast<size_t>(r) * c.heads + head) * c.head_dim);
        };
        const auto task = [&](int unit, int number, const Tile& tile) {
            if (number >= tile.count) return;
            const int kv = unit / head_tiles, first = kv * group + unit % head_tiles * head_tile;
            const int heads = std::min(head_tile, (kv + 1) * group - first), chunk = tile.first + number;
            const auto& blocks = blocks_[rows_[tile.begin].share];
            const Keys keys{layout, blocks.data(), static_cast<int>(blocks.size()), cache_.head_at(layer, kv)};
            Seen seen[MOST_QUERIES];
            Query queries[MOST_QUERIES];
            int n = 0;
            for (int r = tile.begin; r < tile.end; ++r) {
                const Row& row = rows_[r];
                const int begin = std::max(begin_of(r), chunk * CHUNK), end = std::min(row.position + 1, (chunk + 1) * CHUNK);
                if (begin >= end) continue;
                seen[n] = {begin, end, row.direct, paths_.data() + row.path};
                for (int h = 0; h < heads; ++h) {
                    const size_t cell = static_cast<size_t>(r - first_row) * c.heads + first + h;
                    const size_t at = static_cast<size_t>(chunk - begin_of(r) / CHUNK);
                    Query& query = queries[n * heads + h];
                    query = {q_.data() + r * q_stride + static_cast<size_t>(first + h) * c.head_dim, nullptr, nullptr,
                             largest + cell * stride + at, sums + cell * stride + at,
                             acc + (cell * chunks + at) * layout.padded};
                    if (rounded.q) {
                        query.bytes = rounded.q + rounded.q_at(r * c.heads + first + h);
                        query.fields = rounded.meta + rounded.meta_at(r * c.heads + first + h);
                    }
                }
                ++n;
            }
            if (n) kernels_.attend(keys, seen, n, queries, heads);
            if (chunks > 1) return;
            for (int r = tile.begin; r < tile.end; ++r) {
                for (int h = 0; h < heads; ++h) finish(r, first + h);
            }
        };
        // Neighbouring tasks read the same keys. Small tasks go together, or the pool would cost more than they do.
        const auto grain = [](size_t work) { return static_cast<int>(std::max<size_t>(1, SMALL_TASK / (work + 1))); };
        const int positions = chunks > 1 ? CHUNK : rows_[last_row - 1].position + 1;
        const size_t queries = static_cast<size_t>(tiles[0].end - tiles[0].begin) * head_tile;
        pool_.split(units * chunks * n_tiles, grain(queries * positions * c.head_dim), [&](int begin, int end) {
            for (int item = begin; item < end; ++item) {
                task(item / (chunks * n_tiles), item / n_tiles % chunks, tiles[item % n_tiles]);
            }
        });
        if (chunks == 1) continue;
        pool_.split(static_cast<int>(cells), grain(static_cast<size_t>(chunks) * c.head_dim), [&](int begin, int end) {
            for (int cell = begin; cell < end; ++cell) finish(first_row + cell / c.heads, cell % c.heads);
        });
    }
}

// y = down(silu(gate(x)) * up(x)), or x_ += that.
void Model::swiglu(const Mlp& mlp, const Input& input, float* y, size_t stride, bool residual) {
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

// Routed experts: every expert sees all its rows of the pass at once; a row sums its experts from the most probable on.
void Model::routed(const Layer& layer, const Input& input) {
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

// ------------------------------------------------------------------------------------------------ a pass

void Model::forward(const std::vector<Share>& shares, const std::vector<int>& wanted, float* logits,
                    const std::vector<int>& taps, float* tapped) {
    std::lock_guard<std::mutex> lock(mutex_);
    check(shares, wanted, taps);
    clock_.start();
    layout(shares);
    for (const Share& share : shares) cache_.at(share.slot).parents = share.parents;

    const int rows = static_cast<int>(rows_.size()), hidden = config_.hidden_size;
    const size_t all = static_cast<size_t>(rows) * hidden;
    float* x = room(x_, all);
    const auto tap = [&](int which, const float* states) {
        for (size_t t = 0; t < taps.size(); ++t) {
            if (taps[t] == which) std::memcpy(tapped + t * all, states, all * sizeof(float));
        }
    };
    rotary_tables();
    pool_.split(rows, 16, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) embedding_.row(rows_[r].token, x + static_cast<size_t>(r) * hidden);
    });
    tap(-1, x);
    for (int i = 0; i < config_.layers; ++i) {
        clock_.enter(StageClock::PROJECTIONS);
        attention(i);
        clock_.enter(StageClock::MLP);
        const Input input = norm(x, layers_[i].mlp_norm, rows);
        if (config_.moe[i]) {
            routed(layers_[i], input);
        } else {
            const size_t stride = padded(hidden);
            swiglu(layers_[i].mlp, input, room(out_, rows * stride), stride, true);
        }
        tap(i, x);
    }
    clock_.enter(StageClock::REST);
    if (std::find(taps.begin(), taps.end(), config_.layers) != taps.end()) {
        tap(config_.layers, norm(x, final_norm_, rows).x);
    }
    if (wanted.empty()) return;
    // The rows whose logits are wanted, side by side.
    const int n = static_cast<int>(wanted.size());
    for (int i = 0; i < n; ++i) {
        if (wanted[i] != i) {
            std::memcpy(x + static_cast<size_t>(i) * hidden, x + static_cast<size_t>(wanted[i]) * hidden,
                        hidden * sizeof(float));
        }
    }
    clock_.enter(StageClock::HEAD);
    const Input input = norm(x, final_norm_, n);
    const Linear head{head_, nullptr};
    pool_.split(head_.blocks, 1, [&](int first, int last) {
        multiply(head, input, first, last, logits, config_.vocab_size);
    });
    clock_.enter(StageClock::REST);
}

}  // namespace outpace
