"""The multi-token-prediction head of a model, in NumPy: one decoder layer that guesses the token after the next.

Slot p pairs the embedding of token p + 1 with the target's hidden state at p, and predicts token p + 2:

    x = fc(concat(pre_fc_norm_embedding(embed(token p + 1)), pre_fc_norm_hidden(hidden p)))
    logits = lm_head(norm(layer(x)))

Embedding and lm_head are the target's. The head's own output takes the hidden state's place for the guess after.
Tensor names are those of checkpoints that bring such a head (mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden,
mtp.layers.0.*, mtp.norm). Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2) in the form of Qwen3-Next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from ..cache import KVCache
from ..config import ModelConfig
from ..types import F32, ModelError
from ..weights.weight_map import WeightMap
from .decoder import Decoder, rms_norm
from .names import EMBEDDING, FINAL_NORM, HEAD, expected_tensors
from .quantise import FloatMatrix

Hidden = Literal["after_norm", "before_norm"]


class MtpHead:
    """A head ready to draft. Stateless: the caller owns the cache.

    tap: the target's hidden state that it wants, as backends/base.py counts them.
    """

    def __init__(
        self, config: ModelConfig, layer: Decoder, fc: FloatMatrix, norms: tuple[F32, F32], hidden: Hidden
    ) -> None:
        self.config = config
        self._layer = layer
        self._fc = fc
        self._embedding_norm, self._hidden_norm = norms
        after = hidden == "after_norm"
        self.tap = config.num_hidden_layers if after else config.num_hidden_layers - 1
        self._own_tap = 1 if after else 0

    @classmethod
    def from_loader(cls, config: ModelConfig, weights: WeightMap, *, hidden: Hidden = "after_norm") -> MtpHead:
        """Takes the mtp.* tensors out of a model's map; embedding and head are shared with the target and stay in it.

        config: the target's. hidden: whether the head was trained on hidden states after the target's final norm
        (and goes on with its own after mtp.norm) or before; public checkpoints differ.
        Raises ModelError for a missing, unknown or mis-shaped tensor, naming it.
        """
        if hidden not in ("after_norm", "before_norm"):
            raise ModelError(f"hidden must be after_norm or before_norm, got {hidden!r}")
        if not weights.has("mtp.fc.weight"):
            raise ModelError("the model has no multi-token-prediction head: tensor mtp.fc.weight is missing")
        own = replace(config, num_hidden_layers=1, layer_types=None, use_sliding_window=False, dense_layers=())
        size = config.hidden_size
        shapes = {
            "mtp.fc.weight": (size, 2 * size),
            "mtp.pre_fc_norm_embedding.weight": (size,),
            "mtp.pre_fc_norm_hidden.weight": (size,),
            "mtp.norm.weight": (size,),
        }
        layer = {name: shape for name, shape in expected_tensors(own).items() if ".layers." in name}
        shapes |= {_mtp_name(name): shape for name, shape in layer.items()}
        unknown = [name for name in weights.keys() if name.startswith("mtp.") and name not in shapes]  # noqa: SIM118
        if unknown:
            raise ModelError(f"mtp head: {len(unknown)} unknown tensors, such as {unknown[0]}")
        taken = {name: _checked(name, weights.take(name)[0], shape) for name, shape in shapes.items()}
        matrices = {name: FloatMatrix(taken[_mtp_name(name)]) for name, shape in layer.items() if len(shape) == 2}
        vectors = {name: taken[_mtp_name(name)] for name, shape in layer.items() if len(shape) == 1}
        vectors[FINAL_NORM] = taken["mtp.norm.weight"]
        for name in {EMBEDDING, EMBEDDING if config.tie_word_embeddings else HEAD}:
            shared = weights.take_tensor(name)
            weights.put(name, shared)
            matrices[name] = FloatMatrix(_checked(name, shared.f32(), (config.vocab_size, size)))
        norms = taken["mtp.pre_fc_norm_embedding.weight"], taken["mtp.pre_fc_norm_hidden.weight"]
        return cls(config, Decoder(own, matrices, vectors), FloatMatrix(taken["mtp.fc.weight"]), norms, hidden)

    def new_cache(self, positions: int) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(self._layer.config, positions)

    def step(self, token: int, hidden: F32, cache: KVCache) -> tuple[F32, F32]:
        """The next slot: appends and commits one row. Returns (logits [vocab_size], hidden for the slot after [H])."""
        eps = self.config.rms_norm_eps
        embedding = rms_norm(self._layer.matrices[EMBEDDING].row(token), self._embedding_norm, eps)
        x = self._fc(np.concatenate([embedding, rms_norm(hidden, self._hidden_norm, eps)]))
        cache.append(1)
        states = self._layer.run(x, 0, np.arange(cache.length + 1), cache)
        cache.commit([0])
        return self._layer.logits(states[1]), states[self._own_tap]


def _mtp_name(name: str) -> str:
    return name.replace("model.layers.", "mtp.layers.")


def _checked(name: str, array: F32, shape: tuple[int, ...]) -> F32:
    if array.shape != shape:
        raise ModelError(f"tensor {name} has shape {list(array.shape)}, expected {list(shape)}")
    return array
