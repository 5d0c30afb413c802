"""Models of true sizes with random weights, made as fast as memory can be written: for measuring speed, not for text.

The sizes are those of the models' published config.json files. Weights are random bytes laid out as the blocks of a
quantised file, so that nothing has to be rounded; each tensor is made when the backend takes it and never kept.
"""

from __future__ import annotations

import math

import numpy as np

from ..config import ModelConfig
from ..models.names import expected_tensors
from ..types import ModelError, UsageError
from ..weights.formats import KINDS, round_bfloat16
from ..weights.tensor import Tensor
from ..weights.weight_map import WeightMap


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )


SHAPES = {
    "smollm2-135m": ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
        qk_norm=False,
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
}
KIND_OF_BITS = {8: "Q8_0", 4: "Q4_0"}
# Kinds of random weights, and where the float16 scales of a block lie; a float's blocks are scales and nothing else.
SCALES_AT: dict[str, tuple[int, ...]] = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "F16": (0,),
    "BF16": (0,),
}


def shape(name: str) -> ModelConfig:
    """The configuration of a named shape. Raises UsageError for a name that is not in SHAPES."""
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def random_weights(config: ModelConfig, kind: str | int) -> WeightMap:
    """Every tensor that the configuration demands: matrices of random bytes (all of them, embedding and head too) of
    `kind`, a name in SCALES_AT or the bits of KIND_OF_BITS; vectors of ones. Raises UsageError for other kinds, and
    where the shape's rows are no whole blocks."""
    if isinstance(kind, int):
        if kind not in KIND_OF_BITS:
            raise UsageError(f"bits must be 8 or 4, got {kind!r}")
        kind = KIND_OF_BITS[kind]
    kind = kind.upper()
    if kind not in SCALES_AT:
        raise UsageError(f"kind must be one of {', '.join(SCALES_AT).lower()}, got {kind.lower()!r}")
    for name, shape in expected_tensors(config).items():
        if len(shape) == 2 and shape[1] % KINDS[kind].block:
            raise UsageError(
                f"this shape has no {kind} form: rows of {name} have {shape[1]} weights, no multiple of "
                f"{KINDS[kind].block}"
            )
    return _RandomWeights(config, kind)


class _RandomWeights(WeightMap):
    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__({})
        self._shapes = expected_tensors(config)
        self._kind = kind
        size = KINDS[kind].size
        # Blocks of a float16 scale and random weights; a large matrix repeats them, which no kernel can notice.
        blocks = np.random.default_rng(0).integers(0, 256, (1 << 14, size), dtype=np.uint8)
        scales = np.float32(1e-3) * np.linspace(0.5, 1.5, len(blocks), dtype=np.float32)
        bits = round_bfloat16(scales) if kind == "BF16" else scales.astype("<f2").view(np.uint16)
        for at in SCALES_AT[kind]:
            blocks[:, at : at + 2] = bits.view(np.uint8).reshape(-1, 2)
        self._blocks = blocks

    def take_tensor(self, name: str) -> Tensor:
        """Makes the tensor. Raises ModelError when the model has none of that name, or it was taken."""
        if name not in self._shapes:
            raise ModelError(f"the shape has no tensor {name!r}")
        shape = self._shapes.pop(name)
        if len(shape) == 1:
            return Tensor.from_array(np.ones(shape, dtype=np.float32))
        data = np.resize(self._blocks, (math.prod(shape) // KINDS[self._kind].block, self._blocks.shape[1]))
        return Tensor(shape, self._kind, data.reshape(-1))

    def kind(self, name: str) -> str:
        return self._kind if len(self._shapes[name]) == 2 else "F32"

    def has(self, name: str) -> bool:
        return name in self._shapes

    def keys(self) -> list[str]:
        return list(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __len__(self) -> int:
        return len(self._shapes)
