// Temperature, min-p, top-k, top-p and the exponential race of sampling.py, in one sweep over the logits where it can.
//
// The race's winner is arg-min(E_i / w_i), w_i = exp((x_i - max) / T), E_i = -log(u_i), u_i a hash of (key, i). Only
// tokens that can still win need their exact E and w: since -log(u) >= 1 - u, a token with (1 - u_i) >= best * bound(w_i)
// cannot. So nearly every token costs one hash and one cheap bound on exp.

#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace outpace {
namespace {

double uniform(std::uint64_t key, std::uint64_t token) {
  std::uint64_t z = (token + 1) * 0x9E3779B97F4A7C15ull + key;  // SplitMix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return (static_cast<double>(z >> 11) + 0.5) * 0x1p-53;
}

// At least exp(x) and at most 7 % above it, for x <= 0 (Schraudolph 1999: the exponent's bits from a linear map, whose
// error lies in [0, 6.2 %] when the mantissa is interpolated from above).
float exp_bound(float x) {
  const float y = std::max(x, -87.0f) * 12102203.2f + 1065353216.0f;  // 2^23 / log 2, 127 * 2^23
  const std::int32_t bits = static_cast<std::int32_t>(y);
  float e;
  std::memcpy(&e, &bits, sizeof e);
  return e * 1.0005f;
}

struct Candidate {
  std::int64_t token;
  double weight;
};

std::int64_t race(const std::vector<Candidate>& kept, std::uint64_t key) {
  std::int64_t winner = -1;
  double best = std::numeric_limits<double>::infinity();
  for (const Candidate& c : kept) {
    const double time = -std::log(uniform(key, static_cast<std::uint64_t>(c.token))) / c.weight;
    if (time < best) {
      best = time;
      winner = c.token;
    }
  }
  return winner;
}

std::int64_t race_over_all(const float* logits, std::size_t n, float top, std::size_t top_at, double temperature,
                           std::uint64_t key) {
  const auto weight = [&](std::size_t i) { return std::exp((double(logits[i]) - double(top)) / temperature); };
  // The most probable token goes first: its time is the bound that the others must beat.
  double best = -std::log(uniform(key, top_at)) / 1.0;
  std::size_t winner = top_at;
  const float inverse = static_cast<float>(1.0 / temperature);
  for (std::size_t i = 0; i < n; ++i) {
    const double u = uniform(key, i);
    if (1.0 - u >= best * exp_bound((logits[i] - top) * inverse * 0.9999f)) continue;
    const double w = weight(i);
    if (!(w > 0.0)) continue;
    const double time = -std::log(u) / w;
    if (time < best || (time == best && i < winner)) {
      best = time;
      winner = i;
    }
  }
  return static_cast<std::int64_t>(winner);
}

bool more_probable(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

}  // namespace

std::int64_t choose(const float* logits, std::size_t n, const SampleRule& rule, std::uint64_t key) {
  float top = -std::numeric_limits<float>::infinity();
  std::size_t top_at = 0;
  bool broken = n == 0;
  for (std::size_t i = 0; i < n; ++i) {
    broken |= std::isnan(logits[i]);
    if (logits[i] > top) {
      top = logits[i];
      top_at = i;
    }
  }
  if (broken || !std::isfinite(top)) return -1;
  if (rule.temperature == 0.0) return static_cast<std::int64_t>(top_at);
  const bool limits_k = rule.top_k > 0 && static_cast<std::size_t>(rule.top_k) < n;
  const bool limits_p = rule.top_p < 1.0;
  if (!limits_k && !limits_p && rule.min_p == 0.0)
    return race_over_all(logits, n, top, top_at, rule.temperature, key);

  std::vector<Candidate> kept;
  if (limits_k && rule.min_p == 0.0) {
    // exp keeps the order: choose by logit, and take the exponential of what is left.
    std::vector<float> order(logits, logits + n);
    std::nth_element(order.begin(), order.begin() + (rule.top_k - 1), order.end(), std::greater<float>());
    const float edge = order[static_cast<std::size_t>(rule.top_k - 1)];
    for (std::size_t i = 0; i < n; ++i)
      if (logits[i] >= edge)
        kept.push_back({static_cast<std::int64_t>(i), std::exp((double(logits[i]) - double(top)) / rule.temperature)});
  } else {
    for (std::size_t i = 0; i < n; ++i) {
      const double w = std::exp((double(logits[i]) - double(top)) / rule.temperature);
      if (w > 0.0 && w >= rule.min_p) kept.push_back({static_cast<std::int64_t>(i), w});
    }
  }
  kept.erase(std::remove_if(kept.begin(), kept.end(), [](const Candidate& c) { return !(c.weight > 0.0); }),
             kept.end());
  if (limits_k && kept.size() > static_cast<std::size_t>(rule.top_k)) {
    std::nth_element(kept.begin(), kept.begin() + (rule.top_k - 1), kept.end(), more_probable);
    kept.resize(static_cast<std::size_t>(rule.top_k));
  }
  if (limits_p) {
    double total = 0.0;
    for (const Candidate& c : kept) total += c.weight;
    std::size_t sorted = 0, take = 0;
    double mass = 0.0;
    // Sorting a whole vocabulary is dear: sort the best few, and more while they fall short.
    for (std::size_t count = 128; take == 0; count *= 8) {
      count = std::min(count, kept.size());
      std::partial_sort(kept.begin() + sorted, kept.begin() + count, kept.end(), more_probable);
      for (std::size_t i = sorted; i < count && take == 0; ++i) {
        mass += kept[i].weight / total;
        if (mass >= rule.top_p) take = i + 1;
      }
      sorted = count;
      if (take == 0 && count == kept.size()) take = count;
    }
    kept.resize(take);
  }
  std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  return race(kept, key);
}

}  // namespace outpace
