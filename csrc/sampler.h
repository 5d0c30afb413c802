// The fast path of src/outpace/sampling.py: the same token from the same logits, options and key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace outpace {

struct SampleRule {
  double temperature;  // 0: arg-max
  std::int64_t top_k;  // <= 0: no limit
  double top_p;        // >= 1: no limit
  double min_p;        // 0: no limit
};

// temperature: 0 or in 1e-6 .. 1e6, where float arithmetic can bound the weights.
// The token chosen from logits [n] by the noise of `key` (sampling.py: distribution, then Noise.draw). ids: null, or the
// tokens [n], ascending, that the logits are of; no other token can be chosen. Returns -1 where the logits hold NaN or
// +inf or are all -inf: the caller then takes the reference's path, which explains.
std::int64_t choose(const float* logits, std::size_t n, const std::int64_t* ids, const SampleRule& rule,
                    std::uint64_t key);

struct TokenShare {
  std::int64_t token;
  double share;
};

// At most `count` tokens, the chosen one first, then those nearest to being chosen, with what sampling.py's
// Sampler.candidates calls their share. Arguments as above; none where `choose` returns -1.
std::vector<TokenShare> candidates(const float* logits, std::size_t n, const std::int64_t* ids, const SampleRule& rule,
                              std::uint64_t key, std::size_t count);

}  // namespace outpace
