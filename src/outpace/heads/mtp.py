"""The multi-token-prediction head inside a model, for people who build the loop by hand (speculator.py).

Tensor names are those of checkpoints that bring such a head (mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden,
mtp.layers.0.*, mtp.norm). How it computes: reference.py. What runs it: backends/head.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config import ModelConfig
from ..types import ModelError
from ..weights.tensor import Tensor
from ..weights.weight_map import WeightMap
from .config import HeadConfig
from .formats import read_head
from .loading import assemble, borrowed

Hidden = Literal["after_norm", "before_norm"]


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A head as it was found. own: its tensors by the names of heads/config.py; shared: the target's embedding and
    head, which it computes with. Nothing is decoded."""

    config: HeadConfig
    own: Mapping[str, Tensor]
    shared: Mapping[str, Tensor]

    @property
    def tap(self) -> int:
        """The target's hidden state that it reads, as backends/base.py counts them."""
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
        found = {name: weights.take_tensor(name) for name in weights.keys() if name.startswith("mtp.")}  # noqa: SIM118
        after = hidden == "after_norm"
        wanted = {"taps": (config.num_hidden_layers - (not after),), "norm_output": after}
        loaded = assemble(read_head({}, found, config), config, wanted, Path())
        own = {name: loaded.weights.take_tensor(name) for name in loaded.weights.keys()}  # noqa: SIM118
        return cls(loaded.config, own, borrowed(loaded.config, weights, config))
