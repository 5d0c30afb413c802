"""A model drafts for itself: its own weights at 4 bits, with some layers left out if asked for. Where that pays.

Neighbours: models/rounding.py makes the weights, drafters/draft_model.py drafts with them, opening.py loads both.
"""

from __future__ import annotations

from dataclasses import replace

from .backends.memory import Memory, available_memory, estimate
from .cache import CacheOption
from .models.loading import LoadedModel
from .text.tokenizer import Tokenizer
from .types import UsageError

RULE = 1  # raised by whoever changes what models/rounding.py makes: what is kept on the disk is then made again
MOST = 0.9  # of the model's own bytes: a draft that is not smaller cannot be quicker
# A draft token costs about its share of the model's bytes. Two of them at 0.28 gained (SmolLM2 at 16 bits), at 0.53 (8
# bits) they needed more tokens a round than there were: docs/LOG.md.
PAYS = 0.4
LEAST = 128 << 20  # bytes of weights: below, a pass is too quick for its drafts to count


def kept_layers(layers: int, count: int | None) -> tuple[int, ...]:
    """Which `count` of a model's layers draft, ascending; all of them for None: the first and the last ones, which a
    model can do without least (docs/LOG.md). Raises UsageError."""
    count = layers if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= layers:
        raise UsageError(f"draft_layers must be in 1 .. {layers}, the model's layers, got {count!r}")
    first = (count + 1) // 2
    return (*range(first), *range(layers - count + first, layers))


def self_draft(loaded: LoadedModel, tokenizer: Tokenizer, layers: tuple[int, ...]) -> LoadedModel:
    """The model that drafts, of the files of `loaded`, whose tensors it takes when they are asked for.

    It computes in "int8", whatever its target does.
    """
    from .models.rounding import TEXT, DraftWeights, with_layers  # a start without such a draft does without

    text = tokenizer.encode(TEXT, add_bos=False) or [0]
    weights = DraftWeights(loaded.config, loaded.weights, text, layers)
    return replace(loaded, config=with_layers(loaded.config, layers), weights=weights)


def smaller(draft: LoadedModel, target: LoadedModel, precision: str) -> bool:
    """Whether the draft has clearly fewer bytes than the target at this precision."""
    return _bytes(draft, "int8") <= MOST * _bytes(target, precision)


def memory(target: LoadedModel, context: int | None = None, kv_cache: CacheOption = "auto") -> Memory:
    """What a model of all layers will need that drafts for this one; no tensor is touched."""
    from .models.rounding import DraftWeights

    everything = range(target.config.num_hidden_layers)
    return estimate(
        target.config, DraftWeights(target.config, target.weights, (), everything), "int8", context, kv_cache
    )


def pays(target: LoadedModel, precision: str, kv_cache: CacheOption = "auto") -> bool:
    """Whether draft="auto" drafts with the model itself: its draft has at most PAYS of its bytes (a target of 16 or 32
    bits), of which there are LEAST or more, and the memory is there for both."""
    whole = estimate(target.config, target.weights, precision, None, kv_cache)
    if whole.weights < LEAST:
        return False
    draft, available = memory(target, None, kv_cache), available_memory()
    return draft.weights <= PAYS * whole.weights and (available is None or draft.total + whole.total <= available)


def _bytes(model: LoadedModel, precision: str) -> int:
    return estimate(model.config, model.weights, precision, 1).weights
