"""The oracle of learned heads: how each algorithm drafts, in NumPy, one row at a time.

The native core is tested against this file, and this file against the classes of the `speculators` package. Slot s of a
head's cache belongs to position s of the text; the caller owns the cache, and rolling back is `cache.truncate(slots)`.

mtp and eagle3 guess step by step, a row each: slot s pairs the feature at s with the token at s + 1 and guesses the
token at s + 2; from the second guess on, the head's own hidden state takes the feature's place.
dflash guesses a block at once: its context is the features' keys and values, its rows are the anchor (the newest token)
and mask tokens, which see the context and each other. Sources: config.py. What runs these as a backend, and checks what
comes in: backends/reference_head.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..cache import KVCache
from ..models.decoder import Decoder, _rotate, _sigmoid, _softmax, rms_norm
from ..models.names import EMBEDDING, FINAL_NORM
from ..models.quantise import FloatMatrix
from ..models.rotary import rotary_tables
from ..types import F32, I64
from .config import HeadConfig


class Head:
    """A head ready to draft: `AutoregressiveHead` or `BlockHead`, by `make_head`. Stateless.

    tensors: those of config.head_tensors, and the target's embedding float32 [V, H] and head float32 [V, H] under
    their names where the head has none of its own; every one decoded.
    """

    def __init__(self, config: HeadConfig, tensors: Mapping[str, F32], d2t: I64 | None = None) -> None:
        self.config = config
        self.d2t = d2t
        matrices = {name: FloatMatrix(array) for name, array in tensors.items() if array.ndim == 2}
        lm_head = tensors["lm_head.weight"]
        if len(lm_head) != config.draft_vocab_size:  # the target's: the draft vocabulary's rows of it
            assert d2t is not None
            matrices["lm_head.weight"] = FloatMatrix(lm_head[d2t])
        vectors = {name: array for name, array in tensors.items() if array.ndim == 1}
        self.layers = _Layers(config.layers, matrices, vectors)

    def new_cache(self, positions: int) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(self.config.layers, positions)

    def _norm(self, x: F32, name: str) -> F32:
        return rms_norm(x, self.layers.vectors[name], self.config.layers.rms_norm_eps)

    def _matrix(self, name: str, x: F32) -> F32:
        return self.layers._linear(name, x)


class _Layers(Decoder):
    """A decoder's layers that take, beside a row, what the first attends with (eagle3), or whole blocks (dflash)."""

    def row_of(self, x: F32, attends: F32 | None, row: int, sees: I64, cache: KVCache) -> F32:
        """One row x [H] through all layers; row, sees: as `Decoder.run`. attends: what the first layer's attention
        reads in place of the normalised x. Returns the output [H] of the last layer."""
        cos, sin = (table[0] for table in rotary_tables(self.config, np.array([len(sees) - 1])))
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            first = attends is not None and layer == 0
            normed = attends if first else self._norm(x, prefix + "input_layernorm.weight")
            assert normed is not None
            x = x + self._attention(layer, prefix + "self_attn.", normed, row, sees, cos, sin, cache)
            x = x + self._mlp(layer, x)
        return x

    def context(self, feature: F32, cache: KVCache) -> None:
        """Commits one row whose keys and values are projected from a feature [H], the same in every layer."""
        cache.append(1)
        cos, sin = (table[0] for table in rotary_tables(self.config, np.array([cache.length])))
        for layer in range(self.config.num_hidden_layers):
            self._write(layer, 0, feature, cos, sin, cache)
        cache.commit([0])

    def block(self, x: F32, causal_in_windows: bool, cache: KVCache) -> F32:
        """Rows x [n, H] at the positions after the context, which see it and each other; nothing is committed.

        In sliding layers all rows see the window before the block, and only the rows up to their own if causal.
        """
        config, start, n = self.config, cache.length, len(x)
        cache.append(n)
        cos, sin = rotary_tables(config, np.arange(start, start + n))
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            normed = [self._norm(row, prefix + "input_layernorm.weight") for row in x]
            for i in range(n):
                self._write(layer, i, normed[i], cos[i], sin[i], cache)
            window = config.window(layer)
            first = 0 if window is None else max(0, start - window)
            out = []
            for i in range(n):
                last = start + (i + 1 if window is not None and causal_in_windows else n)
                q = self._heads(prefix + "self_attn.q", normed[i])
                mixed = self._mix(_rotate(q, cos[i], sin[i]), *cache.read(layer, np.arange(first, last)))
                row = x[i] + self._linear(prefix + "self_attn.o_proj", mixed)
                out.append(row + self._mlp(layer, row))
            x = np.stack(out)
        cache.drop()
        return x

    def _write(self, layer: int, row: int, x: F32, cos: F32, sin: F32, cache: KVCache) -> None:
        prefix = f"model.layers.{layer}.self_attn."
        value = self._linear(prefix + "v_proj", x).reshape(-1, self.config.head_dim)
        cache.write(layer, row, _rotate(self._heads(prefix + "k", x), cos, sin), value)

    def _heads(self, part: str, x: F32) -> F32:
        """q or k of a row by head, [heads, D], normalised where the layers do that."""
        heads = self._linear(part + "_proj", x).reshape(-1, self.config.head_dim)
        return self._norm(heads, part + "_norm.weight") if self.config.qk_norm else heads

    def _mix(self, q: F32, keys: F32, values: F32) -> F32:
        """Attention of one row: q [A, D] over keys and values [K, n, D]; returns [A * D]."""
        queries = q.reshape(len(keys), -1, self.config.head_dim)
        scores = np.matmul(queries, keys.transpose(0, 2, 1)) * np.float32(self.config.head_dim**-0.5)
        mixed: F32 = np.matmul(_softmax(scores), values).reshape(-1)
        return mixed

    def _mlp(self, layer: int, x: F32) -> F32:
        prefix = f"model.layers.{layer}."
        mlp = self._experts if self.config.is_moe(layer) else self._swiglu
        return mlp(prefix + "mlp.", self._norm(x, prefix + "post_attention_layernorm.weight"))


class AutoregressiveHead(Head):
    """mtp and eagle3."""

    def fuse(self, feature: F32) -> F32:
        """The target's tapped states [taps * T] as the feature [H] of a slot."""
        if self.config.algorithm == "mtp":
            return feature
        if self.config.feature_norm == "whole":
            feature = self._norm(feature, "input_norm.weight")
        elif self.config.feature_norm == "each":
            parts = np.split(feature, len(self.config.taps))
            feature = np.concatenate([self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)])
        return self._matrix("fc", feature)

    def row(self, token: int, hidden: F32, row: int, sees: I64, cache: KVCache) -> tuple[F32, F32]:
        """A pending row of the cache, which attends the places `sees`, its own last: token with a feature [H].

        Returns its logits [draft vocabulary] and the hidden state [H] that is the next row's feature.
        """
        config = self.config
        embedding, normed = self.layers.matrices[EMBEDDING].row(token), self._norm(hidden, "hidden_norm.weight")
        if config.algorithm == "mtp":
            pair = [self._norm(embedding, "embedding_norm.weight"), normed]
            x = self._matrix("fc", np.concatenate(pair if config.concat == "embedding_first" else pair[::-1]))
            out = self.layers.row_of(x, None, row, sees, cache)
        else:
            embedding = self._norm(embedding, "model.layers.0.input_layernorm.weight")
            x = normed if config.norm_before_residual else hidden
            out = self.layers.row_of(x, np.concatenate([embedding, normed]), row, sees, cache)
        final = self._norm(out, FINAL_NORM)
        return self.layers.logits(final), final if config.norm_output else out


class BlockHead(Head):
    """dflash, with DSpark's Markov and confidence heads."""

    def read(self, features: F32, cache: KVCache) -> None:
        """Commits the slots of features float32 [n, taps * T]. Raises CapacityError when the cache is full."""
        for feature in features:
            self.layers.context(self._norm(self._matrix("fc", feature), "hidden_norm.weight"), cache)

    def block(self, anchor: int, cache: KVCache, rows: int | None = None) -> F32:
        """The final hidden states [rows, H] of a block (all of it by default) that begins with the anchor."""
        config = self.config
        rows = config.block_size if rows is None else rows
        tokens = [anchor] + [config.mask_token] * (rows - 1)
        x = np.stack([self.layers.matrices[EMBEDDING].row(token) for token in tokens])
        return self._norm(self.layers.block(x, not config.sliding_window_non_causal, cache), FINAL_NORM)

    def markov(self, before: int, hidden: F32, state: F32) -> tuple[F32, F32]:
        """The bias [draft vocabulary] on a row's logits by the token before it, and the state [R] for the next row."""
        kind, rank = self.config.markov, self.config.markov_rank
        if kind == "none":
            return np.zeros(self.config.draft_vocab_size, np.float32), state
        embedding = self.layers.matrices["markov_w1.weight"].row(before)
        if kind == "gated":
            embedding = embedding * _sigmoid(self._matrix("markov_gate", np.concatenate([hidden, embedding])))
        elif kind == "rnn":
            z = self._matrix("markov_joint", np.concatenate([state, embedding, hidden]))
            gate, new, out = _sigmoid(z[:rank]), np.tanh(z[rank : 2 * rank]), z[2 * rank :]
            state = gate * state + (1 - gate) * new
            embedding = np.tanh(out)
        return self._matrix("markov_w2", embedding), state

    def confidence(self, before: int, hidden: F32) -> float | None:
        """The head's estimate, 0 to 1, that a row's guess is kept."""
        if self.config.confidence == "none":
            return None
        if self.config.confidence == "hidden_markov":
            hidden = np.concatenate([hidden, self.layers.matrices["markov_w1.weight"].row(before)])
        return float(_sigmoid(self._matrix("confidence", hidden))[0])


def make_head(config: HeadConfig, tensors: Mapping[str, F32], d2t: I64 | None = None) -> AutoregressiveHead | BlockHead:
    """The head that `config` describes. Arguments as `Head`."""
    kind = BlockHead if config.algorithm == "dflash" else AutoregressiveHead
    return kind(config, tensors, d2t)
