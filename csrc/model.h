// A decoder-only model: embedding, layers (stack.h), final norm and head.
#pragma once

#include "stack.h"

namespace outpace {

class Model : public Stack {
  public:
    Model(Config config, int slots, int positions, int rows, int threads, CacheKind cache);

    void ready() override;
    size_t pass_bytes() const override;
    // wanted: rows of the whole pass whose logits go to `logits` [wanted][vocab_size]. tapped: [taps][rows][hidden_size].
    // Throws std::invalid_argument and Full before anything changes, std::bad_alloc at any time: committed rows stay as
    // they are, and no row of the pass is pending.
    void forward(const std::vector<Share>& shares, const std::vector<int>& wanted, float* logits,
                 const std::vector<int>& taps, float* tapped);

    const Matrix& embedding() const { return embedding_; }
    const Matrix& head() const { return head_; }

  private:
    Matrix embedding_, head_;
    const float* final_norm_ = nullptr;
};

}  // namespace outpace
