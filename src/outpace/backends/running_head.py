"""A head that runs where its target runs: in the core beside a native model, else on the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..heads.config import HeadConfig
from ..models.names import HEAD
from ..types import I64
from ..weights.relaid import Relaid
from ..weights.tensor import Tensor
from ..weights.weight_map import WeightMap
from .base import Backend
from .head import HeadBackend
from .native import NativeBackend
from .native_head import NativeHead


def run_head(
    target: Backend,
    config: HeadConfig,
    own: Mapping[str, Tensor],
    borrow: Callable[[], Mapping[str, Tensor]],
    d2t: I64 | None = None,
    relaid: Relaid | None = None,
) -> HeadBackend:
    """own: the head's tensors (heads/config.py). borrow: gives the target's embedding and head, where the head has none
    of its own (loading.borrowed); asked only where the target's backend does not hold them as they are needed.
    relaid: as NativeHead.

    Slots and positions are the target's, the precision is as `head_precision` tells. Raises as NativeHead.
    """
    slots, positions = target.capacity.slots, target.capacity.positions
    if isinstance(target, NativeBackend):
        rows = d2t if not config.own_lm_head else None  # the draft vocabulary's of the target's head

        def weights() -> WeightMap:
            return WeightMap({**own, HEAD: borrow()[HEAD].select(rows)} if rows is not None else dict(own))

        if rows is not None:
            config = replace(config, own_lm_head=True)
        return NativeHead(target, config, weights, d2t, precision=target.head_precision, relaid=relaid)
    from .reference_head import ReferenceHead  # a start in the core does without

    tensors = {name: tensor.f32() for name, tensor in {**borrow(), **own}.items()}
    return ReferenceHead(config, tensors, d2t, slots=slots, positions=positions)
