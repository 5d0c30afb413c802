// A learned head: layers (stack.h) that read the target's hidden states and guess its next tokens.
//
// The mathematics is that of src/outpace/heads/reference.py, which the tests compare with; what the fields mean is
// written in heads/config.py. A slot's row s pairs the feature at position s with the token at s + 1.
#pragma once

#include "model.h"

namespace outpace {

struct HeadShape {
    enum class Algorithm { mtp, eagle3, dflash };
    enum class FeatureNorm { none, whole, each };
    enum class Markov { none, vanilla, gated, rnn };
    Algorithm algorithm;
    int taps, target_hidden_size, draft_vocab_size;
    bool norm_output, norm_before_residual, embedding_first;
    FeatureNorm feature_norm;
    int block_size, mask_token;
    bool causal_windows;
    Markov markov;
    int markov_rank;
    bool confidence, confidence_reads_markov;
};

// A share whose states are features of the target, or this head's own hidden states.
struct HeadShare : Share {
    bool own = false;
};

class Head : public Stack {
  public:
    // config: of the head's layers. target: complete, and outlives the head; its threads, and its embedding and head
    // where the head brings none of its own, are used. Throws std::invalid_argument.
    Head(const Model& target, Config config, HeadShape shape, int slots, int positions, int rows, CacheKind cache);

    void ready() override;
    size_t pass_bytes() const override;

    // mtp, eagle3. features: [rows of shares without `own`][feature width], owned: [the others][hidden_size].
    // logits: [wanted][draft_vocab_size], hidden: [wanted][hidden_size]. Throws as Model::forward.
    void forward(const std::vector<HeadShare>& shares, const std::vector<int>& wanted, const float* features,
                 const float* owned, float* logits, float* hidden);

    // dflash. Commits rows for `count` features. Throws as Model::forward.
    void read(int slot, int count, const float* features);
    // logits: [slots][rows][draft_vocab_size], hidden: [slots][rows][hidden_size]. No slot's committed rows
    // change, and nothing is pending afterwards. Throws as Model::forward.
    void block(const std::vector<int>& slots, const std::vector<int>& anchors, int rows, float* logits, float* hidden);
    // bias: [draft_vocab_size]; state: [markov_rank], becomes the next row's.
    void markov(int before, const float* hidden, float* state, float* bias);
    float confidence(int before, const float* hidden);

    const HeadShape& shape() const { return shape_; }
    int feature_width() const { return shape_.taps * shape_.target_hidden_size; }

  private:
    void fuse(const float* features, int count, float* to);
    void finish(int rows, bool norm_output, float* logits, float* hidden);
    void check_algorithm(bool block) const;
    void check_token(int token) const;
    // y = linear(x), one row.
    void apply(const Linear& linear, const float* x, float* y);

    const Model& target_;
    const HeadShape shape_;
    Matrix embedding_, markov_w1_;
    Linear lm_head_, fc_, markov_w2_, markov_gate_, confidence_;
    const float *final_norm_ = nullptr, *hidden_norm_ = nullptr, *embedding_norm_ = nullptr, *input_norm_ = nullptr;
    std::vector<const float*> fc_norms_;
    std::vector<float> fused_, pair_, features_;
};

}  // namespace outpace
