"""The multi-token-prediction head inside a model, for people who build the loop by hand (speculator.py).

Tensor names are those of checkpoints that bring such a head (mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden,
mtp.layers.0.*, mtp.norm). How it computes: reference.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..config import ModelConfig
from ..types import ModelError
from ..weights.weight_map import WeightMap
from .formats import read_head
from .loading import assemble, shared_tensors
from .reference import AutoregressiveHead

Hidden = Literal["after_norm", "before_norm"]


class MtpHead(AutoregressiveHead):
    """A head ready to draft. Stateless: the caller owns the cache.

    tap: the target's hidden state that it wants, as backends/base.py counts them.
    """

    @property
    def tap(self) -> int:
        """The one tap of an mtp head."""
        return self.config.taps[0]

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
        own = {name: weights.take_tensor(name) for name in weights.keys() if name.startswith("mtp.")}  # noqa: SIM118
        after = hidden == "after_norm"
        wanted = {"taps": (config.num_hidden_layers - (not after),), "norm_output": after}
        loaded = assemble(read_head({}, own, config), config, wanted, Path())
        return cls(loaded.config, shared_tensors(loaded, weights, config))
