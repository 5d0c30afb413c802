"""The oracle: the decoder's forward pass in NumPy, one row at a time, as plainly as it can be written.

Every other backend is tested against this file, and this file against transformers. One row (one token at one
position) runs through all layers before the next one starts, so a row's bits cannot depend on its company. Rows see
the cache at the places they are told: the committed rows and their own ancestors.

Sources: the Qwen3 report (arXiv 2505.09388) and its predecessors Qwen2 and Llama; RMSNorm (arXiv 1910.07467), rotary
embeddings (rotary.py), grouped queries (arXiv 2305.13245), SwiGLU (arXiv 2002.05202), routed
experts (arXiv 2101.03961).
Shapes in comments: H hidden size, A attention heads, K key-value heads, D head_dim, n rows that are seen.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..cache import KVCache
from ..config import ModelConfig
from ..types import F32, I64
from .names import EMBEDDING, FINAL_NORM, HEAD
from .quantise import Matrix
from .rotary import rotary_tables


class Decoder:
    """matrices: name -> Matrix for every 2-D tensor (names.py); vectors: name -> float32 for norms and biases."""

    def __init__(self, config: ModelConfig, matrices: Mapping[str, Matrix], vectors: Mapping[str, F32]) -> None:
        self.config = config
        self.matrices = matrices
        self.vectors = vectors

    @property
    def head(self) -> Matrix:
        """The matrix that logits come from."""
        return self.matrices[EMBEDDING if self.config.tie_word_embeddings else HEAD]

    def row(self, token: int, row: int, sees: I64, cache: KVCache) -> dict[int, F32]:
        """One row through all layers.

        Arguments and result as `run`, which it enters with the token's embedding.
        """
        return self.run(self.matrices[EMBEDDING].row(token), row, sees, cache)

    def run(self, x: F32, row: int, sees: I64, cache: KVCache) -> dict[int, F32]:
        """One row, x [H] being what enters the first layer.

        row: its index among the cache's pending rows, where its keys and values go. sees: int64 [n], the places in
        the cache that it attends in order of position, its own last; its position is n - 1. Returns the hidden states
        [H] by tap (backends/base.py): -1 is x, i the output of layer i, num_hidden_layers the final norm.
        """
        config = self.config
        hidden = {-1: x}
        cos, sin = (table[0] for table in rotary_tables(config, np.array([len(sees) - 1])))
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm.weight")
            x = x + self._attention(layer, prefix + "self_attn.", normed, row, sees, cos, sin, cache)
            normed = self._norm(x, prefix + "post_attention_layernorm.weight")
            mlp = self._experts if config.is_moe(layer) else self._swiglu
            x = x + mlp(prefix + "mlp.", normed)
            hidden[layer] = x
        hidden[config.num_hidden_layers] = self._norm(x, FINAL_NORM)
        return hidden

    def logits(self, final: F32) -> F32:
        """float32 [vocab_size] of a row's final norm [H]."""
        return self.head(final)

    def _attention(
        self, layer: int, prefix: str, x: F32, row: int, sees: I64, cos: F32, sin: F32, cache: KVCache
    ) -> F32:
        config = self.config
        q = self._linear(prefix + "q_proj", x).reshape(-1, config.head_dim)  # [A, D]
        k = self._linear(prefix + "k_proj", x).reshape(-1, config.head_dim)  # [K, D]
        v = self._linear(prefix + "v_proj", x).reshape(-1, config.head_dim)
        if config.qk_norm:
            q, k = self._norm(q, prefix + "q_norm.weight"), self._norm(k, prefix + "k_norm.weight")
        cache.write(layer, row, _rotate(k, cos, sin), v)
        window = config.window(layer)
        keys, values = cache.read(layer, sees if window is None else sees[-window:])  # [K, n, D]
        # Query head a reads key-value head a // (A / K).
        queries = cache.query(_rotate(q, cos, sin) * np.float32(config.head_dim**-0.5))
        queries = queries.reshape(config.num_key_value_heads, -1, config.head_dim)  # [K, A / K, D]
        scores = np.matmul(queries, keys.transpose(0, 2, 1))  # [K, A / K, n]
        mixed = np.matmul(_softmax(scores), values)
        return self._linear(prefix + "o_proj", mixed.reshape(-1))

    def _swiglu(self, prefix: str, x: F32) -> F32:
        gate = self._linear(prefix + "gate_proj", x)
        return self._linear(prefix + "down_proj", _silu(gate) * self._linear(prefix + "up_proj", x))

    def _experts(self, prefix: str, x: F32) -> F32:
        """The most probable experts, weighted and summed from the most probable on; the lowest index on a tie."""
        config = self.config
        probs = _softmax(self._linear(prefix + "gate", x))
        chosen = np.argsort(-probs, kind="stable")[: config.num_experts_used]
        weights = probs[chosen]
        if config.norm_topk_prob:
            weights = weights / weights.sum()
        weights = weights * np.float32(config.expert_weights_scale)
        out = np.zeros_like(x)
        for expert, weight in zip(chosen, weights, strict=True):
            out = out + weight * self._swiglu(f"{prefix}experts.{expert}.", x)
        if config.shared_expert_ffn_size:
            gate = _sigmoid(self._linear(prefix + "shared_expert_gate", x))
            out = out + gate * self._swiglu(prefix + "shared_expert.", x)
        return out

    def _linear(self, name: str, x: F32) -> F32:
        y = self.matrices[name + ".weight"](x)
        bias = self.vectors.get(name + ".bias")
        return y if bias is None else y + bias

    def _norm(self, x: F32, name: str) -> F32:
        return rms_norm(x, self.vectors[name], self.config.rms_norm_eps)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """RMSNorm over the last axis."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: F32 = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Turns each pair (i, i + D / 2) of [..., D] by its angle; cos, sin: [D / 2]."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _softmax(x: F32) -> F32:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    total: F32 = e / e.sum(axis=-1, keepdims=True)
    return total


def _sigmoid(x: F32) -> F32:
    e = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(np.float32)


def _silu(x: F32) -> F32:
    return x * _sigmoid(x)
