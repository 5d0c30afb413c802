"""What a model will need of the machine's memory, told before it is loaded.

Neighbours: native.py's own figures (`NativeBackend.memory`) are what this foretells, by the layouts that csrc/matrix.h
and csrc/kernels.h describe. The available memory is Linux's estimate, cut by control groups (cgroup v2 or v1).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache import CacheKind, CacheOption, cache_kind
from ..config import ModelConfig
from ..models.names import EMBEDDING, HEAD, expected_tensors, is_matrix
from ..models.quantise import HeadPrecision, head_precision, held_kind
from ..types import CapacityError, size
from ..weights.weight_map import WeightMap
from .cgroups import OF, ROOT, control_groups

if TYPE_CHECKING:
    from ..heads.config import HeadConfig

OUTS, GROUP, BLOCK = 16, 32, 64  # outputs of a block, weights of a group, positions of a cache block
ROWS = 512  # of a pass over a long prompt
HEAD_ROWS = 256  # of a head's
CHUNK, PARTIALS = 256, 1 << 22  # positions of a partial result of attention, and numbers of these kept at once
LEAST_CONTEXT = 2048  # tokens of cache that must fit, when nothing is said about the context
_FOUR_BITS = ("Q4_0", "Q4_1")
_OFFSETS = ("Q4_1", "Q5_1")
_WIDE_SCALES = ("IQ4_XS",)  # products of two numbers, which no float16 holds
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_SUPER_BITS = {"Q3_K": 4, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
_MINIMA = ("Q4_K", "Q5_K")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. precision: "int8", "bf16" or "f32". kv_cache: "f32", "f16" or "q8". cache: of one sequence of `context`
    tokens. activations: roughly."""

    precision: str
    kv_cache: str
    context: int
    weights: int
    cache_per_token: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations


def estimate(
    config: ModelConfig,
    weights: WeightMap,
    precision: str,
    context: int | None = None,
    kv_cache: CacheOption = "auto",
) -> Memory:
    """What the native backend will need for these tensors, none of which is decoded or taken.

    context: tokens of one sequence, prompt and answer; the model's own limit by default. Raises UsageError for an
    unknown kv_cache.
    """
    kinds = {name: weights.kind(name) for name in weights}
    return _estimate(config, kinds, precision, context, cache_kind(kv_cache, precision))


def estimate_head(
    head: HeadConfig,
    weights: WeightMap,
    lm_head: str,
    precision: HeadPrecision,
    context: int,
    kv_cache: CacheOption = "auto",
) -> Memory:
    """What a learned head will need beside a native model; no tensor is decoded or taken.

    lm_head: the kind of the target's, of which a head without one of its own holds the draft vocabulary's rows.
    precision: the head's own (quantise.head_precision). context, kv_cache: the target's. Raises as `estimate`.
    """
    kinds, shapes = _head_parts(head, weights, lm_head)
    layers = head.layers
    cache = cache_kind(kv_cache, precision[0])
    found = _estimate(layers, kinds, precision[0], context, cache, shapes, precision[1])
    features = 4 * min(HEAD_ROWS, context) * head.feature_width
    return replace(found, activations=_activations(layers, context, HEAD_ROWS) + features)


def step_bytes(head: HeadConfig, weights: WeightMap, lm_head: str, precision: HeadPrecision, target: str) -> int:
    """Bytes of weights that a draft step reads (dflash: a block), as NativeHead.pass_bytes. Arguments as
    `estimate_head`; target: the kind in which the target holds its own head, for heads that take it whole."""
    kinds, shapes = _head_parts(head, weights, lm_head)
    total = 0 if HEAD in shapes else held_bytes(target, (head.layers.vocab_size, head.layers.hidden_size), "held")
    for name, shape in shapes.items():
        read = name == HEAD or name.startswith("model.layers.") or (name == "fc.weight" and head.algorithm == "mtp")
        if read and len(shape) == 2:
            total += held_bytes(kinds[name], shape, precision[name == HEAD] if is_matrix(name, shape) else "f32")
    return total


def _head_parts(
    head: HeadConfig, weights: WeightMap, lm_head: str
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Kinds and shapes of what a head holds."""
    from ..heads.config import head_tensors

    kinds, shapes = {name: weights.kind(name) for name in weights}, head_tensors(head)
    if not head.own_lm_head and head.draft_vocab_size < head.layers.vocab_size:
        kinds[HEAD], shapes[HEAD] = lm_head, (head.draft_vocab_size, head.layers.hidden_size)
    return kinds, shapes


def held_bytes(kind: str, shape: tuple[int, ...], precision: str) -> int:
    """What the core holds a matrix [..., out, in] of a file's kind in; precision "held": the kind as it is."""
    kind = kind if precision == "held" else held_kind(kind, precision)
    return math.prod(shape[:-2]) * _block_bytes(kind, shape[-1]) * _ceil(shape[-2], OUTS) // OUTS


def precision_of_heads(config: ModelConfig, weights: WeightMap, precision: str) -> HeadPrecision:
    """quantise.head_precision beside this model, none of whose tensors has been taken."""
    shapes = expected_tensors(config).items()
    names = [name for name, shape in shapes if name.startswith("model.layers.") and is_matrix(name, shape)]
    kinds = [weights.kind(name) for name in names if weights.has(name)]
    last = HEAD if weights.has(HEAD) else EMBEDDING
    return head_precision(precision, kinds, weights.kind(last) if weights.has(last) else "F32")


def _estimate(
    config: ModelConfig,
    kinds: Mapping[str, str],
    precision: str,
    context: int | None,
    kv_cache: CacheKind,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    lm_head: str | None = None,
) -> Memory:
    """shapes: of the tensors; by default those of a whole model. lm_head: its precision, where it is another one."""
    held = 0
    for name, shape in (expected_tensors(config) if shapes is None else shapes).items():
        if len(shape) == 1:
            held += 4 * shape[0]
        else:
            its = lm_head if lm_head is not None and name == HEAD else precision
            held += held_bytes(kinds.get(name, "F32"), shape, its if is_matrix(name, shape) else "f32")
    context = config.max_position_embeddings if context is None else context
    per_token = config.num_hidden_layers * config.num_key_value_heads * _cached_bytes(config.head_dim, kv_cache)
    cache = per_token * _ceil(context, BLOCK)
    return Memory(precision, kv_cache, context, held, per_token, cache, _activations(config, context))


def _cached_bytes(head_dim: int, kv_cache: CacheKind) -> int:
    """A position's key and value of one KV head (HeadLayout in csrc/kernels.h)."""
    padded = _ceil(head_dim, 16)
    if kv_cache == "q8":
        return 2 * (padded + 4 * _ceil(head_dim, GROUP) // GROUP)
    return (2 if kv_cache == "f16" else 4) * (head_dim + padded)


def _block_bytes(kind: str, width: int) -> int:
    """A block of 16 outputs: weights, and the scales, offsets, factors and minima of a kind in groups."""
    if kind in _FLOAT_BYTES:
        return _FLOAT_BYTES[kind] * OUTS * width
    groups = _ceil(width, GROUP) // GROUP
    weights = groups * GROUP * OUTS // 8  # at one bit
    if kind in _SUPER_BITS:
        factors = _ceil(groups // 8 * OUTS * 2, 64) * (2 if kind in _MINIMA else 1)
        return factors + groups * 2 * OUTS + weights * _SUPER_BITS[kind]
    scales = _ceil(groups, 2) * OUTS * (4 if kind in _WIDE_SCALES else 2) * (2 if kind in _OFFSETS else 1)
    return scales + weights * (4 if kind in _FOUR_BITS else 8)


def _activations(config: ModelConfig, context: int, rows: int = ROWS) -> int:
    """The buffers of a long prompt's pass, and logits of the rows that a round verifies."""
    inner = max(config.intermediate_size, config.shared_expert_ffn_size)
    floats = 4 * config.hidden_size + 2 * config.q_proj_dim() + 2 * config.kv_proj_dim() + 2 * inner
    if config.num_experts:
        floats += config.num_experts_used * 2 * (config.hidden_size + config.expert_ffn_size)
    rounded = (config.hidden_size + config.q_proj_dim() + inner) // 2  # bytes and scales, in floats
    rows = min(rows, context)
    partials = min(PARTIALS, rows * config.q_proj_dim() * _ceil(context, CHUNK) // CHUNK)
    return 4 * (rows * (floats + rounded) + partials + 2 * 17 * config.vocab_size)


def _ceil(value: int, step: int) -> int:
    return -(-value // step) * step


# ------------------------------------------------------------------------------------------------------ the machine


def available_memory() -> int | None:
    """Bytes that this process may still take: what the system has to give, cut by its control groups; None where
    neither can be read."""
    found = [free for free in (_system(), *_groups()) if free is not None]
    return max(0, min(found)) if found else None


def _system() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # no such estimate: what the machine has
    except (AttributeError, OSError, ValueError):
        return None


def _groups(root: Path = ROOT, of: Path = OF) -> list[int]:
    """What the process's control groups, and those around them, leave it. Pages of files can be given back."""
    left = []
    for folder, version in control_groups("memory", root, of):
        limit, used, cached = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if version == 1
            else ("memory.max", "memory.current", "inactive_file")
        )
        try:
            most = int((folder / limit).read_text())
            now = int((folder / used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        left.append(most - now + _field(folder / "memory.stat", cached))
    return left


def _field(file: Path, name: str) -> int:
    try:
        return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.split()[:1] == [name])
    except (OSError, ValueError, IndexError, StopIteration):
        return 0


# ------------------------------------------------------------------------------------------------------- refusing


def check_fits(
    where: object,
    config: ModelConfig,
    weights: WeightMap,
    precision: str,
    context: int | None,
    kv_cache: CacheOption = "auto",
    beside: int = 0,
) -> None:
    """Raises CapacityError, saying how much is missing and what would fit, when weights and cache cannot be held.

    context: tokens that must fit; None: LEAST_CONTEXT of them, or the model's own limit where that is less.
    where: the model's name in the message. beside: bytes that a model or a head which drafts for it will take.
    Where the available memory is unknown nothing is checked.
    """
    available = available_memory()
    if available is None:
        return
    least = min(LEAST_CONTEXT, config.max_position_embeddings) if context is None else context
    kinds = {name: weights.kind(name) for name in weights}
    need = _estimate(config, kinds, precision, least, cache_kind(kv_cache, precision))
    wanted = need.total + beside
    if wanted <= available:
        return
    if need.total <= available:
        offer = "without what drafts for it it would fit (--draft suffix)"
    else:
        offer = _what_fits(config, kinds, precision, least, kv_cache, available)
    drafts = f", {size(beside)} for what drafts for it" if beside else ""
    raise CapacityError(
        f"{where} needs {size(wanted)} of memory (weights {size(need.weights)} in {precision}, cache "
        f"{size(need.cache)} for {least} tokens in {need.kv_cache}{drafts}, the rest for a pass), {size(available)} "
        f"are available: {size(wanted - available)} are missing; {offer}"
    )


def _what_fits(
    config: ModelConfig, kinds: dict[str, str], precision: str, context: int, kv_cache: CacheOption, available: int
) -> str:
    four_bits = {name: "Q8_0" if name in (EMBEDDING, HEAD) else "Q4_0" for name in expected_tensors(config)}
    for what, to, how in (
        (kinds, precision, ""),
        (kinds, "int8", "--precision int8"),
        (four_bits, "int8", "the model as a 4-bit file (outpace quantize --to q4)"),
    ):
        if how and to == precision and what is kinds:
            continue
        # Halve the context until it fits; a very short one is not worth the offer.
        for tokens in (context >> shift for shift in range(0 if how else 1, 20)):
            if tokens < min(context, BLOCK):
                break
            if _estimate(config, what, to, tokens, cache_kind(kv_cache, to)).total <= available:
                shorter = "" if tokens == context else f"--context {tokens}"
                return " with ".join(filter(None, (how, shorter))) + " would fit"
    return "it does not fit in 4 bits either: use a smaller model"
