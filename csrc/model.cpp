#include "model.h"

#include <algorithm>
#include <cstring>

namespace outpace {

Model::Model(Config config, int slots, int positions, int rows, int threads, CacheKind cache)
    : Stack(std::move(config), slots, positions, rows,
            std::make_shared<Crew>(within(threads, 1, 256, "threads")), cache) {}

void Model::ready() {
    std::lock_guard<std::mutex> lock(mutex_);
    const Config& c = config_;
    embedding_ = take("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
    head_ = c.tied ? embedding_ : take("lm_head.weight", c.vocab_size, c.hidden_size);
    final_norm_ = take_vector("model.norm.weight", c.hidden_size);
    take_layers(c.hidden_size);
    ready_ = true;
}

size_t Model::pass_bytes() const { return head_.bytes() + layer_bytes(); }

void Model::forward(const std::vector<Share>& shares, const std::vector<int>& wanted, float* logits,
                    const std::vector<int>& taps, float* tapped) {
    std::lock_guard<std::mutex> lock(mutex_);
    check(shares, wanted);
    for (int tap : taps) {
        if (tap < -1 || tap > config_.layers) {
            refuse("tap " + std::to_string(tap) + " is not in -1 .. " + std::to_string(config_.layers));
        }
    }
    clock_.start();
    layout(shares);
    const int rows = static_cast<int>(rows_.size()), hidden = config_.hidden_size;
    const size_t all = static_cast<size_t>(rows) * hidden;
    float* x = room(x_, all);
    const auto tap = [&](int which, const float* states) {
        for (size_t t = 0; t < taps.size(); ++t) {
            if (taps[t] == which) std::memcpy(tapped + t * all, states, all * sizeof(float));
        }
    };
    pool_.split(rows, 16, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) embedding_.row(rows_[r].token, x + static_cast<size_t>(r) * hidden);
    });
    tap(-1, x);
    run_layers(nullptr, [&](int layer) { tap(layer, x); });
    if (std::find(taps.begin(), taps.end(), config_.layers) != taps.end()) {
        tap(config_.layers, norm(x, final_norm_, rows).x);
    }
    if (!wanted.empty()) {
        gather(wanted);
        clock_.enter(StageClock::HEAD);
        const Input final = norm(x, final_norm_, static_cast<int>(wanted.size()));
        multiply_all({head_, nullptr}, final, logits, config_.vocab_size);
        clock_.enter(StageClock::REST);
    }
    pend(shares);
}

}  // namespace outpace
