// Temperature, min-p, top-k, top-p and the exponential race of sampling.py, mostly without looking at a token twice.
//
// The race's winner is arg-min(E_i / w_i), w_i = exp((x_i - max) / T), E_i = -log(u_i), u_i a hash of (key, i). Only
// tokens that can still win need their exact E and w: since -log(u) >= 1 - u, a token with (1 - u_i) >= best * bound(w_i)
// cannot. Filters work on the few tokens above a cut that holds all they keep. Sweeps over the whole vocabulary are the
// kernels' (sampler_impl.h), in float32 with bounds; whatever decides is computed in float64 as the reference does.

#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"

namespace outpace {
namespace {

double uniform(std::uint64_t key, std::uint64_t token) {
    std::uint64_t z = (token + 1) * 0x9E3779B97F4A7C15ull + key;  // SplitMix64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return (static_cast<double>(z >> 11) + 0.5) * 0x1p-53;
}

struct Candidate {
    std::int64_t token;
    double weight;
};

// More probable, then the lower id.
bool before(const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

class Choice {
  public:
    Choice(const float* logits, std::size_t n, const std::int64_t* ids, const SampleRule& rule, std::uint64_t key)
        : x_(logits), n_(n), ids_(ids), rule_(rule), key_(key), kernels_(family()) {
        static thread_local std::vector<std::int32_t> scratch;
        if (scratch.size() < n) scratch.resize(n);
        at_ = scratch.data();
    }

    std::int64_t token() {
        if (n_ == 0) return -1;
        top_ = kernels_.top(x_, n_);
        if (!std::isfinite(top_)) return -1;
        if (rule_.temperature == 0.0) {
            kernels_.at_least(x_, n_, top_, 1, at_);
            return id(at_[0]);
        }
        inverse_ = static_cast<float>(1.0 / rule_.temperature);
        const bool limits_k = rule_.top_k > 0 && static_cast<std::size_t>(rule_.top_k) < n_;
        const bool limits_p = rule_.top_p < 1.0;
        if (!limits_k && !limits_p && rule_.min_p == 0.0) return race_of_all();
        if (rule_.min_p > 0.0) {
            keep_min_p();
        } else if (limits_k) {
            keep_above(cut_for_k(static_cast<std::size_t>(rule_.top_k)));
        } else {
            return top_p_of_all();
        }
        if (limits_k && kept_.size() > static_cast<std::size_t>(rule_.top_k)) {
            std::nth_element(kept_.begin(), kept_.begin() + (rule_.top_k - 1), kept_.end(), before);
            kept_.resize(static_cast<std::size_t>(rule_.top_k));
        }
        if (limits_p) {
            double total = 0.0;
            for (const Candidate& c : kept_) total += c.weight;
            keep_mass(total);
        }
        return race_of_kept();
    }

    std::vector<TokenShare> nearest(std::size_t count) {
        const std::int64_t chosen = token();
        if (chosen < 0 || count == 0) return {};
        const bool greedy = rule_.temperature == 0.0;
        if (greedy) rule_.temperature = 1.0;  // of the shares
        keep_above(static_cast<float>(double(top_) - NO_CHANCE * rule_.temperature));
        double total = 0.0;
        for (const Candidate& c : kept_) total += c.weight;
        double rest = kernels_.weight_sum(x_, n_, top_, static_cast<float>(1.0 / rule_.temperature)) - total;
        if (!greedy) {
            if (filter(total)) rest = 0.0;
            total = 0.0;
            for (Candidate& c : kept_) total += c.weight /= -std::log(uniform(key_, c.token));
        }
        total += std::max(0.0, rest);
        const std::size_t n = std::min(count, kept_.size());
        std::partial_sort(kept_.begin(), kept_.begin() + n, kept_.end(), before);
        // The chosen one may lie below the cut, or round-off may have put another one first.
        const auto its = std::find_if(kept_.begin(), kept_.end(), [&](const Candidate& c) { return c.token == chosen; });
        std::vector<TokenShare> found{{chosen, (its != kept_.end() ? *its : kept_[0]).weight / total}};
        for (std::size_t i = 0; i < n && found.size() < count; ++i) {
            if (kept_[i].token != chosen) found.push_back({kept_[i].token, kept_[i].weight / total});
        }
        return found;
    }

  private:
    static constexpr double NO_CHANCE = 7.0;  // so far below the best logit, at temperature 1, is no candidate

    std::int64_t id(std::size_t i) const { return ids_ ? ids_[i] : static_cast<std::int64_t>(i); }

    // min-p, top-k and top-p of the kept, whose weights add up to `total`; whether there is any such limit.
    bool filter(double total) {
        const bool limits_k = rule_.top_k > 0 && static_cast<std::size_t>(rule_.top_k) < n_;
        if (rule_.min_p > 0.0) {
            kept_.erase(std::remove_if(kept_.begin(), kept_.end(),
                                       [&](const Candidate& c) { return c.weight < rule_.min_p; }),
                        kept_.end());
        }
        if (limits_k && kept_.size() > static_cast<std::size_t>(rule_.top_k)) {
            std::nth_element(kept_.begin(), kept_.begin() + (rule_.top_k - 1), kept_.end(), before);
            kept_.resize(static_cast<std::size_t>(rule_.top_k));
        }
        if (rule_.top_p < 1.0) {
            if (limits_k || rule_.min_p > 0.0) {
                total = 0.0;
                for (const Candidate& c : kept_) total += c.weight;
            }
            keep_mass(total);
        }
        return limits_k || rule_.top_p < 1.0 || rule_.min_p > 0.0;
    }

    static const Kernels& family() {
        static const Kernels& kernels = choose_kernels();
        return kernels;
    }

    double weight(std::size_t i) const { return std::exp((double(x_[i]) - double(top_)) / rule_.temperature); }

    void keep_above(float cut) {
        kept_.clear();
        const std::size_t found = kernels_.at_least(x_, n_, cut, n_, at_);
        for (std::size_t i = 0; i < found; ++i) {
            const double w = weight(at_[i]);
            if (w > 0.0) kept_.push_back({id(at_[i]), w});
        }
    }

    void keep_min_p() {
        // w >= min_p means x >= max + T * log(min_p); the cut lies a little lower, the weights decide.
        const double cut = double(top_) + rule_.temperature * (std::log(rule_.min_p) - 1e-3) - 1e-5 * std::fabs(top_);
        keep_above(static_cast<float>(cut));
        kept_.erase(std::remove_if(kept_.begin(), kept_.end(), [&](const Candidate& c) { return c.weight < rule_.min_p; }),
                    kept_.end());
    }

    // A cut above which at least k, and not very many more, logits lie.
    float cut_for_k(std::size_t k) {
        const std::size_t enough = std::min(n_, 4 * k + 256);
        float few = 0.0f, gap = 4.0f;  // below `few` there are fewer than k
        for (int step = 0; step < 40; ++step) {
            const std::size_t found = kernels_.at_least(x_, n_, top_ - gap, enough, at_);
            if (found >= k && found < enough) return top_ - gap;
            if (found < k) {
                few = gap;
                gap = step < 8 ? 2.0f * gap : std::numeric_limits<float>::infinity();
                if (!std::isfinite(gap)) break;
            } else {
                if (gap - few < 1e-3f) return top_ - gap;
                gap = 0.5f * (few + gap);
            }
        }
        return -std::numeric_limits<float>::infinity();
    }

    // The fewest of the kept, most probable first, that together hold top_p of the total; false if they all do not.
    bool keep_mass(double total) {
        std::size_t sorted = 0;
        double mass = 0.0;
        // Sorting a whole vocabulary is dear: sort the best few, and more while they fall short.
        for (std::size_t count = 128;; count *= 8) {
            count = std::min(count, kept_.size());
            std::partial_sort(kept_.begin() + sorted, kept_.begin() + count, kept_.end(), before);
            for (std::size_t i = sorted; i < count; ++i) {
                mass += kept_[i].weight / total;
                doubt_ = std::min(doubt_, std::fabs(mass - rule_.top_p));
                if (mass >= rule_.top_p) {
                    kept_.resize(i + 1);
                    return true;
                }
            }
            sorted = count;
            if (count == kept_.size()) return false;
        }
    }

    std::int64_t top_p_of_all() {
        // The total is known to about 1e-6; where that could matter, it is computed exactly.
        const double about = kernels_.weight_sum(x_, n_, top_, inverse_);
        for (double gap = 4.0; gap < 64.0; gap *= 2.0) {
            keep_above(static_cast<float>(double(top_) - gap * rule_.temperature));
            doubt_ = 1.0;
            if (!keep_mass(about)) continue;
            if (doubt_ > 1e-5) return race_of_kept();
            break;
        }
        keep_above(-std::numeric_limits<float>::infinity());
        double total = 0.0;
        for (const Candidate& c : kept_) total += c.weight;
        keep_mass(total);
        return race_of_kept();
    }

    std::int64_t race_of_kept() {
        std::int64_t winner = -1;
        double best = std::numeric_limits<double>::infinity();
        for (const Candidate& c : kept_) {
            const double time = -std::log(uniform(key_, static_cast<std::uint64_t>(c.token))) / c.weight;
            if (time < best || (time == best && c.token < winner)) {
                best = time;
                winner = c.token;
            }
        }
        return winner;
    }

    std::int64_t race_of_all() {
        // The most probable token goes first: its time is the bound that the others must beat.
        kernels_.at_least(x_, n_, top_, 1, at_);
        std::size_t winner = at_[0];
        double best = -std::log(uniform(key_, id(winner)));
        constexpr std::size_t STRETCH = 4096;
        for (std::size_t first = 0; first < n_; first += STRETCH) {
            const std::size_t last = std::min(n_, first + STRETCH);
            const std::size_t found = kernels_.racers(x_, ids_, first, last, top_, inverse_, key_, best, at_);
            for (std::size_t i = 0; i < found; ++i) {
                const std::size_t token = at_[i];
                const double w = weight(token);
                if (!(w > 0.0)) continue;
                const double time = -std::log(uniform(key_, id(token))) / w;
                if (time < best || (time == best && token < winner)) {
                    best = time;
                    winner = token;
                }
            }
        }
        return id(winner);
    }

    const float* x_;
    std::size_t n_;
    const std::int64_t* ids_;
    SampleRule rule_;
    std::uint64_t key_;
    const Kernels& kernels_;
    std::int32_t* at_;  // [n]
    float top_ = 0.0f, inverse_ = 0.0f;
    double doubt_ = 1.0;  // how near top_p a partial mass came
    std::vector<Candidate> kept_;
};

}  // namespace

std::int64_t choose(const float* logits, std::size_t n, const std::int64_t* ids, const SampleRule& rule,
                    std::uint64_t key) {
    return Choice(logits, n, ids, rule, key).token();
}

std::vector<TokenShare> candidates(const float* logits, std::size_t n, const std::int64_t* ids, const SampleRule& rule,
                                   std::uint64_t key, std::size_t count) {
    return Choice(logits, n, ids, rule, key).nearest(count);
}

}  // namespace outpace
