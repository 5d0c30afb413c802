// A decoder-only model: its weights, its KV cache and the forward pass over rows of several slots.
//
// The mathematics is that of src/outpace/models/decoder.py, which the tests compare with. Neighbours: matrix.h holds
// weights, cache.h keys and values, kernels.h does arithmetic, pool.h cuts it into tasks over outputs, rows or heads
// (never over a sum, so that neither threads nor company change a bit).
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cache.h"
#include "kernels.h"
#include "matrix.h"
#include "measure.h"
#include "pool.h"

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

// One slot's rows of a pass. parents: index within the share or -1.
struct Share {
    int slot = 0;
    std::vector<int> tokens, parents;
};

class Model {
  public:
    // Throws std::invalid_argument for sizes that do not fit together.
    Model(Config config, int slots, int positions, int rows, int threads, CacheKind cache);

    // Weights by their Hugging Face names, until `ready`, which throws std::invalid_argument when one is missing or has
    // another shape. Pointers as in matrix.h; nothing is kept of them.
    void put_int8(const std::string& name, const int8_t* q, const float* scale, const float* offset, int out, int in);
    void put_f32(const std::string& name, const float* w, int out, int in);
    void put_16(const std::string& name, const uint16_t* w, Matrix::Kind kind, int out, int in);
    void put_super(const std::string& name, const Supers& from, Matrix::Kind kind, int out, int in);
    void put_vector(const std::string& name, const float* v, int n);
    // A packed matrix whose bytes outlive the model (matrix.h, `place`).
    void put_packed(const std::string& name, const Matrix& like, const uint8_t* data, size_t bytes);
    void ready();
    void forget();  // all weights that were given before `ready`
    // The weights as they are held, to be kept in a file.
    const std::map<std::string, Matrix>& matrices() const { return matrices_; }
    const std::map<std::string, std::vector<float>>& vectors() const { return vectors_; }

    // wanted: rows of the whole pass whose logits go to `logits` [wanted][vocab_size]. tapped: [taps][rows][hidden_size].
    // Throws std::invalid_argument, Full or std::bad_alloc before anything changes.
    void forward(const std::vector<Share>& shares, const std::vector<int>& wanted, float* logits,
                 const std::vector<int>& taps, float* tapped);

    int open();
    void close(int slot);
    int fork(int slot);
    int length(int slot);
    void commit(int slot, const std::vector<int>& rows);
    void truncate(int slot, int length);
    // For benchmarks: makes an empty slot hold `length` positions of random keys and values. Throws as forward.
    void fill(int slot, int length);
    // For tests: a slot's keys and values of a layer as attention reads them, [2][kv_heads][length][head_dim].
    std::vector<float> cached(int slot, int layer);

    const Config& config() const { return config_; }
    int threads() const { return pool_.threads(); }
    size_t weight_bytes() const { return arena_.bytes() + placed_; }
    size_t cache_bytes();
    size_t pass_bytes() const;  // weights that a pass of one row reads
    // Starts (or ends) the timing of stages, from zero; returns the seconds of each stage so far. In measure.cpp.
    std::array<double, StageClock::STAGES> time_stages(bool on);
    const Kernels& kernels() const { return kernels_; }

  private:
    // A linear layer: y = x * w^T + bias.
    struct Linear {
        Matrix w;
        const float* bias = nullptr;
    };
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
    };
    // Rows of one share that go through the cache together; chunks: first .. first + count.
    struct Tile {
        int begin, end, first, count;
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
    Matrix take(const std::string& name, int out, int in);
    const float* take_vector(const std::string& name, int n);
    const float* maybe_vector(const std::string& name, int n);
    Linear linear(const std::string& name, int out, int in);
    Mlp mlp(const std::string& prefix, int inner);

    void check(const std::vector<Share>& shares, const std::vector<int>& wanted, const std::vector<int>& taps);
    void layout(const std::vector<Share>& shares);
    void rotary_tables();
    Panels panels(int rows, int width, std::vector<int8_t>& q, std::vector<float>& meta);
    Panels query_panels();
    template <class Body> void by_panel(const Panels& to, const Body& body);
    Input norm(const float* x, const float* weight, int rows);
    Input quantised(const float* x, size_t stride, int rows, int width);
    void multiply(const Linear& linear, const Input& input, int first, int last, float* y, size_t stride);
    void attention(int layer);
    void attend(int layer);
    void swiglu(const Mlp& mlp, const Input& input, float* y, size_t stride, bool residual);
    void routed(const Layer& layer, const Input& input);

    const Config config_;
    const Kernels& kernels_;
    const int max_rows_;
    Pool pool_;
    Arena arena_;
    size_t placed_ = 0;  // bytes of matrices that lie elsewhere
    Cache cache_;
    std::mutex mutex_;
    StageClock clock_;
    bool ready_ = false, int8_ = false;
    std::map<std::string, Matrix> matrices_;
    std::map<std::string, std::vector<float>> vectors_;
    Matrix embedding_, head_;
    const float* final_norm_ = nullptr;
    std::vector<Layer> layers_;

    // The pass.
    std::vector<Row> rows_;
    std::vector<int> paths_;
    std::vector<std::vector<uint8_t*>> blocks_;  // per share
    std::vector<float> x_, h_, q_, k_, v_, mixed_, out_, gate_, up_, meta_, cos_, sin_;
    std::vector<float> query_meta_, acc_, largest_, sums_;
    std::vector<float> routes_, expert_x_, expert_gate_, expert_up_, expert_out_, expert_meta_;
    std::vector<Tile> tiles_;
    std::vector<int8_t> bytes_, query_bytes_, expert_bytes_;
};

}  // namespace outpace
