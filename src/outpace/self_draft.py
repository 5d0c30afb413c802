"""A model drafts for itself: its own weights at 4 bits, with some layers left out if asked for. Where that pays.

Neighbours: models/rounding.py makes the weights, drafters/draft_model.py drafts with them, api.py loads both models.
"""

from __future__ import annotations

from dataclasses import replace

from .backends.memory import available_memory, estimate
from .models.loading import LoadedModel
from .models.rounding import TEXT, DraftWeights, with_layers
from .text.tokenizer import Tokenizer
from .types import UsageError

RULE = 1  # raised by whoever changes what models/rounding.py makes: what is kept on the disk is then made again
MOST = 0.9  # of the model's own bytes: a draft that is not smaller cannot be quicker
PAYS = 0.4  # a draft token costs about its share of the model's bytes: at 0.4 and an acceptance of 0.8 two tokens gain
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
    text = tokenizer.encode(TEXT, add_bos=False) or [0]
    weights = DraftWeights(loaded.config, loaded.weights, text, layers)
    return replace(loaded, config=with_layers(loaded.config, layers), weights=weights)


def smaller(draft: LoadedModel, target: LoadedModel, precision: str) -> bool:
    """Whether the draft has clearly fewer bytes than the target at this precision."""
    return _bytes(draft, "int8") <= MOST * _bytes(target, precision)


def pays(target: LoadedModel, precision: str) -> bool:
    """Whether draft="auto" drafts with the model itself: its draft has at most PAYS of its bytes (a target of 16 or 32
    bits), of which there are LEAST or more, and the memory is there for both."""
    own = _bytes(target, precision)
    if own < LEAST:
        return False
    everything = tuple(range(target.config.num_hidden_layers))
    kinds = DraftWeights(target.config, target.weights, (), everything)
    draft, whole = estimate(target.config, kinds, "int8"), estimate(target.config, target.weights, precision)
    available = available_memory()
    return draft.weights <= PAYS * own and (available is None or draft.total + whole.total <= available)


def _bytes(model: LoadedModel, precision: str) -> int:
    return estimate(model.config, model.weights, precision, 1).weights
