// Decoder layers: their weights, their KV cache and a pass over rows of several slots. What a model and a learned head
// have in common; model.h and head.h add what stands before the first layer and after the last.
//
// The mathematics is that of src/outpace/models/decoder.py, which the tests compare with. Neighbours: matrix.h holds
// weights, cache.h keys and values, kernels.h does arithmetic, pool.h cuts it into tasks over outputs, rows or heads
// (never over a sum, so that neither threads nor company change a bit). stack.cpp has slots, layout, projections and
// MLP; attention.cpp and experts.cpp the rest of a layer.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cache.h"
#include "kernels.h"
#include "matrix.h"
#include "measure.h"
#include "pool.h"
#include "weights.h"

namespace outpace {

struct Config {
    int vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim;
    float eps;
    bool tied, qk_norm;
    int experts, experts_used, expert_ffn_size, shared_ffn_size;
    float expert_scale;
    bool norm_topk;
    std::vector<int> windows;          // per layer, 0 for none
    std::vector<int> moe;              // per layer, 1 when it routes over experts
    std::vector<float> frequencies;    // radians a position, head_dim / 2
    float rotary_factor;               // multiplies cos and sin
};

// One slot's rows of a pass. parents: -1 or an earlier row of the slot's pending ones, which are those of this share, or
// with `append` those of the passes before and then these.
struct Share {
    int slot = 0;
    std::vector<int> tokens, parents;
    bool append = false;
};

// The threads that compute, and the lock that whoever uses them holds. A model and its head share both.
struct Crew {
    explicit Crew(int threads) : pool(threads) {}
    Pool pool;
    std::mutex mutex;
};

class Stack : public Weights {
  public:
    virtual ~Stack() = default;
    // All tensors were put in. Throws std::invalid_argument when one is missing or has another shape.
    virtual void ready() = 0;
    virtual size_t pass_bytes() const = 0;  // weights that a pass of one row reads

    int open();
    void close(int slot);
    int fork(int slot);
    int length(int slot);
    int pending(int slot);  // rows that were not committed
    void commit(int slot, const std::vector<int>& rows);
    void truncate(int slot, int length);
    // For benchmarks: makes an empty slot hold `length` positions of random keys and values. Throws as a pass does.
    void fill(int slot, int length);
    // For tests: a slot's keys and values of a layer as attention reads them, [2][kv_heads][length][head_dim].
    std::vector<float> cached(int slot, int layer);

    const Config& config() const { return config_; }
    const std::shared_ptr<Crew>& crew() const { return crew_; }
    int threads() const { return pool_.threads(); }
    size_t cache_bytes();
    // Starts (or ends) the timing of stages, from zero; returns the seconds of each stage so far.
    std::array<double, StageClock::STAGES> time_stages(bool on);
    const Kernels& kernels() const { return kernels_; }

  protected:
    // Throws std::invalid_argument for sizes that do not fit together.
    Stack(Config config, int slots, int positions, int rows, std::shared_ptr<Crew> crew, CacheKind cache);

    struct Mlp {
        Linear gate, up, down;
        int inner = 0;
    };
    struct Layer {
        const float *attention_norm, *mlp_norm, *q_norm = nullptr, *k_norm = nullptr;
        Linear q, k, v, o;
        Mlp mlp;                      // dense
        Linear router, shared_gate;   // routed
        std::vector<Mlp> experts;
        Mlp shared;
    };
    // What a row of the pass needs to know.
    struct Row {
        int share, token, position, place;  // place: where its keys and values go in the slot
        int direct;                         // positions below lie in their own place ...
        int path;                           // ... and those from there on at paths_[path + i]
        int last, origin;                   // the last position it sees; a window ends at `origin` and `last` comes after
    };
    // Rows of activations on their way into matrices: as floats, and quantised where the matrices are.
    struct Input {
        const float* x;
        size_t stride;
        int rows;
        Panels panels;
    };

    template <class T> static T* room(std::vector<T>& buffer, size_t n) {
        if (buffer.size() < n) buffer.resize(n);
        return buffer.data();
    }
    // inputs: width of what the first layer's q, k and v read. Then whether matrices beside the layers' are quantised.
    void take_layers(int inputs);
    size_t layer_bytes() const;

    // Throws std::invalid_argument, Full or std::bad_alloc before anything changes. wanted: ascending rows of the pass.
    void check(const std::vector<Share>& shares, const std::vector<int>& wanted);
    // rows_ of a pass, whose places in the cache are made writable. Throws std::bad_alloc before anything changes; then
    // the pending rows of these slots are gone, but for those that shares append to.
    void layout(const std::vector<Share>& shares);
    // The rows of the pass that was laid out are pending from here on: called when all of them are computed.
    void pend(const std::vector<Share>& shares);
    // x_ [rows_][hidden_size] through all layers. first: what the first layer's attention reads in place of the
    // normalised x_, or null. after(i): called when x_ is the output of layer i. keep_only: nobody wants the output of the
    // last layer, which then only keeps its keys and values.
    void run_layers(const Input* first, const std::function<void(int)>& after, bool keep_only = false);
    // Keys and values of a layer, made of `input`, into the cache; with `queries` also q_.
    void project(int layer, const Input& input, bool queries);
    void rotary_tables();

    Input norm(const float* x, const float* weight, int rows);
    Input quantised(const float* x, size_t stride, int rows, int width);
    void multiply(const Linear& linear, const Input& input, int first, int last, float* y, size_t stride);
    void multiply_all(const Linear& linear, const Input& input, float* y, size_t stride);
    // Rows `wanted` of x_ to its front.
    void gather(const std::vector<int>& wanted);

    const Config config_;
    const Kernels& kernels_;
    const int max_rows_;
    const std::shared_ptr<Crew> crew_;
    Pool& pool_;
    Cache cache_;
    StageClock clock_;
    bool int8_ = false;            // some matrix reads rounded activations
    bool causal_windows_ = false;  // in layers with a window no row sees a later position than its own
    std::vector<Layer> layers_;
    std::vector<Row> rows_;
    std::vector<float> x_;

  private:
    // Rows of one share that go through the cache together; chunks: first .. first + count.
    struct Tile {
        int begin, end, first, count;
    };
    Mlp mlp(const std::string& prefix, int inner) const;
    Panels panels(int rows, int width, std::vector<int8_t>& q, std::vector<float>& meta);
    Panels query_panels();
    template <class Body> void by_panel(const Panels& to, const Body& body);
    void attention(int layer, const Input& input);
    void attend(int layer);
    void swiglu(const Mlp& mlp, const Input& input, float* y, size_t stride, bool residual);
    void routed(const Layer& layer, const Input& input);

    std::vector<int> paths_;
    std::vector<std::vector<uint8_t*>> blocks_;  // per share
    std::vector<float> h_, q_, k_, v_, mixed_, out_, gate_, up_, meta_, cos_, sin_;
    std::vector<float> query_meta_, acc_, largest_, sums_;
    std::vector<float> routes_, expert_x_, expert_gate_, expert_up_, expert_out_, expert_meta_;
    std::vector<Tile> tiles_;
    std::vector<int8_t> bytes_, query_bytes_, expert_bytes_;
};

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline size_t padded(int n) { return static_cast<size_t>(ceil_div(n, OUTS)) * OUTS; }

}  // namespace outpace
