"""How likely a given text is to the model, token by token: passes over the text with all its logits.

Neighbours: completions.py asks for it (echo with logprobs). Other requests go on between the passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..api import LanguageModel
from ..backends.base import Rows
from ..sampling import Sampler
from ..types import ContextError, SampleOpts, TokenLogprobs

CHUNK = 32  # tokens of a pass: each has a row of logits over the whole vocabulary


def score(model: LanguageModel, ids: Sequence[int], top: int) -> list[TokenLogprobs | int]:
    """Natural-log probabilities of each token given those before it, and the `top` most probable ones; of the first
    token only its id. Raises ContextError, CapacityError where no slot is free."""
    target, engine = model.target, model.engine
    if len(ids) > target.capacity.positions:
        raise ContextError(f"the prompt's {len(ids)} tokens exceed the context of {target.capacity.positions}")
    found: list[TokenLogprobs | int] = [ids[0]]
    sampler = Sampler(SampleOpts.greedy(logprobs=top), target.config.vocab_size)
    step = min(CHUNK, target.capacity.rows)
    with engine.empty_slot() as slot:
        for start in range(0, len(ids) - 1, step):
            part = list(ids[start : min(start + step, len(ids) - 1)])
            with engine.lock:
                logits = target.forward([Rows(slot, part)]).logits
                target.commit(slot, range(len(part)))
            found += [sampler.logprobs(row, token) for row, token in zip(logits, ids[start + 1 :], strict=False)]
    return found
