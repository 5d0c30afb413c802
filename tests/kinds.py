"""Random weights in the kinds that the native core holds as they are, for tests: tensors, and models made of them."""

from __future__ import annotations

from typing import Any

import numpy as np

import tiny
from outpace import _native
from outpace.backends.base import Rows
from outpace.config import ModelConfig
from outpace.models.names import is_matrix
from outpace.weights.formats import KINDS, Supers, round_bfloat16
from outpace.weights.tensor import Tensor
from outpace.weights.weight_map import WeightMap

FACTORS_AT = {"Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SUPERS = list(FACTORS_AT)
LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2}


def quantised(kind: str, shape: tuple[int, int], seed: int = 0, gain: float = 1.0) -> Tensor:
    """Random blocks, their factors small and of either sign; gain: how large the weights become, nearly."""
    form = KINDS[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (int(np.prod(shape)) // form.block, form.size), dtype=np.uint8)
    for at in FACTORS_AT.get(kind, (0,)):
        factors = random.uniform(-1, 1, len(blocks)) * gain * {"Q3_K": 0.02, "Q6_K": 0.0003}.get(kind, 0.002)
        blocks[:, at : at + 2] = factors.astype("<f2").view(np.uint8).reshape(-1, 2)
    return Tensor(shape, kind, blocks.reshape(-1))


def supers(tensor: Tensor) -> Supers:
    found = tensor.supers()
    assert found is not None
    return found


def product(x: np.ndarray, s: Supers, threads: int = 1) -> np.ndarray:
    return _native.matmul_super(x, s.kind, s.q, s.d, s.scale, s.dmin, s.minimum, threads)


def inputs(rows: int, width: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def model(kind: str, variant: str = "tied", **changes: Any) -> tuple[ModelConfig, WeightMap]:
    """A model whose matrices are of one kind."""
    config, arrays = tiny.random_model(variant, **LARGE | changes)
    tensors = {}
    for i, (name, array) in enumerate(arrays.items()):
        if not is_matrix(name, array.shape):
            tensors[name] = Tensor.from_array(array)
        elif kind in ("F16", "BF16"):
            bits = round_bfloat16(array) if kind == "BF16" else array.astype(np.float16).view(np.uint16)
            tensors[name] = Tensor(array.shape, kind, bits.reshape(-1).view(np.uint8))
        else:
            tensors[name] = quantised(kind, array.shape, i, gain=0.6)
    return config, WeightMap(tensors)


TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 67, 24)]


def logits(backend: Any, tokens: list[int] = TOKENS) -> np.ndarray:
    slot = backend.new_slot()
    found: np.ndarray = backend.forward([Rows(slot, tokens)]).logits
    backend.free_slot(slot)
    return found
