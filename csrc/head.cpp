#include "head.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace outpace {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

HeadShape checked(HeadShape s, const Config& c) {
    within(s.taps, 1, 64, "taps");
    within(s.target_hidden_size, 1, 1 << 18, "target_hidden_size");
    within(s.draft_vocab_size, 1, c.vocab_size, "draft_vocab_size");
    within(s.markov_rank, s.markov == HeadShape::Markov::none ? 0 : 1, 1 << 16, "markov_rank");
    if (s.algorithm == HeadShape::Algorithm::dflash) {
        within(s.block_size, 1, 256, "block_size");
        within(s.mask_token, 0, c.vocab_size - 1, "mask_token");
    }
    if (s.algorithm == HeadShape::Algorithm::mtp && s.taps * s.target_hidden_size != c.hidden_size) {
        refuse("an mtp head reads one hidden state, of its own width");
    }
    return s;
}

}  // namespace

Head::Head(const Model& target, Config config, HeadShape shape, int slots, int positions, int rows, CacheKind cache)
    : Stack(std::move(config), slots, positions, rows, target.crew(), cache),
      target_(target),
      shape_(checked(shape, config_)) {
    if (target.config().vocab_size != config_.vocab_size) refuse("head and target differ in their vocabulary");
    causal_windows_ = shape_.causal_windows;
}

void Head::ready() {
    std::lock_guard<std::mutex> lock(mutex_);
    using S = HeadShape;
    const Config& c = config_;
    const int hidden = c.hidden_size, rank = shape_.markov_rank;
    const auto shared = [&](const char* name, const Matrix& targets, int out) {
        if (has(name)) return take(name, out, hidden);
        if (targets.out != out || targets.in != hidden) refuse(std::string("tensor ") + name + " is missing");
        return targets;
    };
    embedding_ = shared("model.embed_tokens.weight", target_.embedding(), c.vocab_size);
    lm_head_ = {shared("lm_head.weight", target_.head(), shape_.draft_vocab_size), nullptr};
    final_norm_ = take_vector("model.norm.weight", hidden);
    hidden_norm_ = take_vector("hidden_norm.weight", hidden);
    const bool mtp = shape_.algorithm == S::Algorithm::mtp, eagle3 = shape_.algorithm == S::Algorithm::eagle3;
    fc_ = linear("fc", hidden, mtp ? 2 * hidden : feature_width());
    if (mtp) embedding_norm_ = take_vector("embedding_norm.weight", hidden);
    if (shape_.feature_norm == S::FeatureNorm::whole) input_norm_ = take_vector("input_norm.weight", feature_width());
    fc_norms_.clear();
    if (shape_.feature_norm == S::FeatureNorm::each) {
        for (int i = 0; i < shape_.taps; ++i) {
            fc_norms_.push_back(take_vector("fc_norm." + std::to_string(i) + ".weight", shape_.target_hidden_size));
        }
    }
    if (shape_.markov != S::Markov::none) {
        markov_w1_ = take("markov_w1.weight", c.vocab_size, rank);
        markov_w2_ = linear("markov_w2", shape_.draft_vocab_size, rank);
    }
    if (shape_.markov == S::Markov::gated) markov_gate_ = linear("markov_gate", rank, hidden + rank);
    if (shape_.markov == S::Markov::rnn) markov_gate_ = linear("markov_joint", 3 * rank, 2 * rank + hidden);
    if (shape_.confidence) {
        confidence_ = linear("confidence", 1, hidden + (shape_.confidence_reads_markov ? rank : 0));
    }
    take_layers(eagle3 ? 2 * hidden : hidden);
    int8_ |= !lm_head_.w.floats();
    ready_ = true;
}

size_t Head::pass_bytes() const {
    const bool reads_fc = shape_.algorithm == HeadShape::Algorithm::mtp;
    return lm_head_.w.bytes() + layer_bytes() + (reads_fc ? fc_.w.bytes() : 0);
}

void Head::check_algorithm(bool block) const {
    if (!ready_) refuse("the weights are not complete");
    if ((shape_.algorithm == HeadShape::Algorithm::dflash) != block) {
        refuse(block ? "only dflash heads draft blocks" : "dflash heads draft blocks");
    }
}

void Head::check_token(int token) const {
    if (token < 0 || token >= config_.vocab_size) {
        refuse("token id " + std::to_string(token) + " is not in 0 .. " + std::to_string(config_.vocab_size - 1));
    }
}

// The target's tapped states of `count` rows as features [count][hidden_size].
void Head::fuse(const float* features, int count, float* to) {
    const int width = feature_width(), part = shape_.target_hidden_size;
    const size_t size = static_cast<size_t>(count) * width;
    if (shape_.algorithm == HeadShape::Algorithm::mtp) {
        std::memcpy(to, features, size * sizeof(float));
        return;
    }
    if (shape_.feature_norm != HeadShape::FeatureNorm::none) {
        float* normed = room(features_, size);
        const int parts = input_norm_ ? 1 : shape_.taps, n = input_norm_ ? width : part;
        pool_.split(count * parts, 2, [&](int begin, int end) {
            for (int i = begin; i < end; ++i) {
                const float* x = features + static_cast<size_t>(i) * n;
                kernels_.normalise(x, input_norm_ ? input_norm_ : fc_norms_[i % parts],
                                   kernels_.rms_scale(x, n, config_.eps), n, normed + static_cast<size_t>(i) * n);
            }
        });
        features = normed;
    }
    multiply_all(fc_, quantised(features, width, count, width), to, config_.hidden_size);
}

void Head::forward(const std::vector<HeadShare>& shares, const std::vector<int>& wanted, const float* features,
                   const float* owned, float* logits, float* hidden) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_algorithm(false);
    const std::vector<Share> plain(shares.begin(), shares.end());
    check(plain, wanted);
    clock_.start();
    layout(plain);
    const int rows = static_cast<int>(rows_.size()), n = config_.hidden_size;
    const bool mtp = shape_.algorithm == HeadShape::Algorithm::mtp;

    // Each row's state, fused where it is a feature, into x_.
    int count = 0;
    for (const HeadShare& share : shares) count += share.own ? 0 : static_cast<int>(share.tokens.size());
    const float* fused = room(fused_, static_cast<size_t>(count) * n);
    if (count) fuse(features, count, fused_.data());
    float* x = room(x_, static_cast<size_t>(rows) * n);
    float* to = x;
    for (const HeadShare& share : shares) {
        const float*& from = share.own ? owned : fused;
        const size_t size = share.tokens.size() * static_cast<size_t>(n);
        std::memcpy(to, from, size * sizeof(float));
        from += size;
        to += size;
    }
    // Embedding and state side by side, each normalised.
    float* pair = room(pair_, static_cast<size_t>(rows) * 2 * n);
    const float* embedding_norm = mtp ? embedding_norm_ : layers_[0].attention_norm;
    const bool embedding_first = !mtp || shape_.embedding_first;
    pool_.split(rows, 2, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
            float* row = pair + static_cast<size_t>(r) * 2 * n;
            float *embedding = embedding_first ? row : row + n, *state = embedding_first ? row + n : row;
            float* own = x + static_cast<size_t>(r) * n;
            embedding_.row(rows_[r].token, embedding);
            kernels_.normalise(embedding, embedding_norm, kernels_.rms_scale(embedding, n, config_.eps), n, embedding);
            kernels_.normalise(own, hidden_norm_, kernels_.rms_scale(own, n, config_.eps), n, state);
            if (shape_.norm_before_residual) std::memcpy(own, state, n * sizeof(float));
        }
    });
    const Input input = quantised(pair, 2 * static_cast<size_t>(n), rows, 2 * n);
    if (mtp) multiply_all(fc_, input, x, n);
    run_layers(mtp ? nullptr : &input, [](int) {}, wanted.empty());
    if (!wanted.empty()) {
        gather(wanted);
        finish(static_cast<int>(wanted.size()), shape_.norm_output, logits, hidden);
    }
    pend(plain);
}

// The first rows of x_ -> logits, and the hidden state after the final norm or before.
void Head::finish(int rows, bool norm_output, float* logits, float* hidden) {
    clock_.enter(StageClock::HEAD);
    const Input final = norm(x_.data(), final_norm_, rows);
    std::memcpy(hidden, norm_output ? final.x : x_.data(),
                static_cast<size_t>(rows) * config_.hidden_size * sizeof(float));
    multiply_all(lm_head_, final, logits, shape_.draft_vocab_size);
    clock_.enter(StageClock::REST);
}

void Head::read(int slot, int count, const float* features) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_algorithm(true);
    std::vector<Share> shares(1);
    shares[0].slot = slot;
    std::vector<int> all;
    for (int i = 0; i < count; ++i) {
        shares[0].tokens.push_back(0);
        shares[0].parents.push_back(i - 1);
        all.push_back(i);
    }
    check(shares, {});
    clock_.start();
    layout(shares);
    float* fused = room(fused_, static_cast<size_t>(count) * config_.hidden_size);
    fuse(features, count, fused);
    rotary_tables();
    const Input input = norm(fused, hidden_norm_, count);
    clock_.enter(StageClock::PROJECTIONS);
    for (int i = 0; i < config_.layers; ++i) project(i, input, false);
    clock_.enter(StageClock::REST);
    pend(shares);
    cache_.commit(slot, all);
}

void Head::block(const std::vector<int>& slots, const std::vector<int>& anchors, int rows, float* logits,
                 float* hidden) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_algorithm(true);
    within(rows, 1, shape_.block_size, "rows of a block");
    if (anchors.size() != slots.size()) refuse("a block needs one anchor a slot");
    std::vector<Share> shares;
    for (size_t i = 0; i < slots.size(); ++i) {
        Share share{slots[i], std::vector<int>(static_cast<size_t>(rows), shape_.mask_token), {}, false};
        share.tokens[0] = anchors[i];
        for (int r = 0; r < rows; ++r) share.parents.push_back(r - 1);
        shares.push_back(std::move(share));
    }
    check(shares, {});
    clock_.start();
    layout(shares);
    for (Row& row : rows_) {  // the rows of a block see all of it, and a window ends before it
        const int length = cache_.at(shares[static_cast<size_t>(row.share)].slot).length;
        row.last = length + rows - 1;
        row.origin = length - 1;
        row.direct = row.last + 1;
    }
    const int all = static_cast<int>(rows_.size()), n = config_.hidden_size;
    float* x = room(x_, static_cast<size_t>(all) * n);
    for (int r = 0; r < all; ++r) embedding_.row(rows_[r].token, x + static_cast<size_t>(r) * n);
    run_layers(nullptr, [](int) {});
    finish(all, true, logits, hidden);  // and no row is ever pending
}

void Head::apply(const Linear& linear, const float* x, float* y) {
    multiply_all(linear, quantised(x, static_cast<size_t>(linear.w.in), 1, linear.w.in), y,
                 static_cast<size_t>(linear.w.out));
}

void Head::markov(int before, const float* hidden, float* state, float* bias) {
    std::lock_guard<std::mutex> lock(mutex_);
    using Markov = HeadShape::Markov;
    check_algorithm(true);
    check_token(before);
    if (shape_.markov == Markov::none) refuse("the head has no Markov head");
    const size_t rank = static_cast<size_t>(shape_.markov_rank), n = static_cast<size_t>(config_.hidden_size);
    std::vector<float> embedding(rank), x, y;
    markov_w1_.row(before, embedding.data());
    if (shape_.markov == Markov::gated) {
        x.assign(hidden, hidden + n);
        x.insert(x.end(), embedding.begin(), embedding.end());
        y.resize(rank);
        apply(markov_gate_, x.data(), y.data());
        for (size_t i = 0; i < rank; ++i) embedding[i] *= sigmoid(y[i]);
    } else if (shape_.markov == Markov::rnn) {
        x.assign(state, state + rank);
        x.insert(x.end(), embedding.begin(), embedding.end());
        x.insert(x.end(), hidden, hidden + n);
        y.resize(3 * rank);
        apply(markov_gate_, x.data(), y.data());
        for (size_t i = 0; i < rank; ++i) {
            const float gate = sigmoid(y[i]);
            state[i] = gate * state[i] + (1 - gate) * std::tanh(y[rank + i]);
            embedding[i] = std::tanh(y[2 * rank + i]);
        }
    }
    apply(markov_w2_, embedding.data(), bias);
}

float Head::confidence(int before, const float* hidden) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_algorithm(true);
    check_token(before);
    if (!shape_.confidence) refuse("the head has no confidence head");
    std::vector<float> x(hidden, hidden + config_.hidden_size);
    if (shape_.confidence_reads_markov) {
        x.resize(x.size() + static_cast<size_t>(shape_.markov_rank));
        markov_w1_.row(before, x.data() + config_.hidden_size);
    }
    float y = 0;
    apply(confidence_, x.data(), &y);
    return sigmoid(y);
}

}  // namespace outpace
