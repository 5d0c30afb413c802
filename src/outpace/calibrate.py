"""Which reading of a head's file fits it: conventions that public files leave open are tried on the target's own text.

A wrong reading costs no correctness, only acceptance: so acceptance decides. The target answers a few prompts greedily;
at every token of the answers each reading drafts a chain of three, and what the answer says next tells how much of it
would have been kept. One convention after another takes the value that does best. The result is kept in the cache
(`kept_conventions`) and used whenever the head is opened; the files stay as they are.

Neighbours: heads/loading.py knows the conventions, docs/heads.md their defaults; opening.py opens heads by the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .api import LanguageModel
from .drafters import BlockDrafter, HeadDrafter
from .drafters.base import State, Want, drafts_of
from .heads.config import HeadConfig
from .heads.loading import load_head
from .json_file import write_json
from .models.loading import load_model
from .opening import conventions_file, conventions_key, open_head
from .sampling import Sampler
from .types import F32, ModelError, NumericalError, SampleOpts, UsageError

PROMPTS = (
    "How does a bicycle stay upright while it is moving?",
    "Write a Python function that returns the median of a list of numbers, and explain each line.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show your steps.",
    "Write a short letter that thanks a neighbour for looking after the garden.",
)
ANSWER = 96  # tokens of each
CHAIN = 3  # drafted at each of them
MARGIN = 0.02  # tokens a round by which another value must be better than the file's or the format's


@dataclass(frozen=True, slots=True)
class Trial:
    """tokens_per_round: of a chain of three, the target's own token included; None: the file cannot be read this way,
    or what it computes then is no number, and why."""

    conventions: Mapping[str, Any]
    tokens_per_round: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """trials: in the order they were made, the file's own reading first. best: values that differ from that reading."""

    trials: Sequence[Trial]
    best: Mapping[str, Any]


def calibrate(
    model: LanguageModel, model_path: Path, head_path: Path, *, progress: Callable[[str], None] = lambda text: None
) -> Calibration:
    """Tries the conventions of the head at `head_path` on the model loaded from `model_path`, and keeps the best.

    Raises what load_head raises for the file's own reading.
    """
    loaded = load_model(model_path)
    first = load_head(head_path, loaded.config)
    options = alternatives(first.config, first.d2t_in_file if first.d2t is not None else None)
    progress("the model answers")
    texts = _answers(model, sorted({tap for taps in options.get("taps", [first.config.taps]) for tap in taps}))
    trials: list[Trial] = []

    def tried(conventions: Mapping[str, Any]) -> float:
        """Tokens a round; -1.0 for a reading that is impossible."""
        progress(", ".join(f"{name} {value}" for name, value in conventions.items()) or "the file's own reading")
        try:
            head = load_head(head_path, loaded.config, conventions=conventions)
            drafter = open_head(head, loaded, model.target)
            try:
                found = _tokens_per_round(drafter, texts, model.config.vocab_size)
            finally:
                drafter.close()
        except (ModelError, NumericalError, UsageError) as error:  # of the file, or of what it computes read this way
            trials.append(Trial(conventions, None, str(error)))
            return -1.0
        trials.append(Trial(conventions, found))
        return found

    best: dict[str, Any] = {}
    score = tried({})
    for name, values in options.items():
        for value in values[1:]:
            found = tried({**best, name: value})
            if found > score + MARGIN:
                score, best = found, {**best, name: value}
    write_json(conventions_file(head_path), {"key": conventions_key(head_path, model_path), "conventions": best})
    return Calibration(trials, best)


def alternatives(config: HeadConfig, d2t: str | None) -> dict[str, list[Any]]:
    """Convention -> its values, the present one first. d2t: how the file's is read, None without one."""
    found: dict[str, list[Any]] = {}

    def flags(*names: str) -> None:
        for name in names:
            present = getattr(config, name)
            found[name] = [present, not present]

    layers = config.target_layers
    if config.algorithm == "mtp":
        found["taps"] = [config.taps, (layers - 1 if config.taps == (layers,) else layers,)]
        flags("norm_output")
        found["concat"] = [config.concat, "hidden_first" if config.concat == "embedding_first" else "embedding_first"]
        return found
    moved = [tuple(tap + by for tap in config.taps) for by in (-1, 1)]
    found["taps"] = [config.taps, *(taps for taps in moved if all(-1 <= tap < layers for tap in taps))]
    if config.algorithm == "eagle3":
        flags("norm_output", "norm_before_residual")
    else:
        flags("sample_from_anchor")
        if any(config.layers.window(layer) for layer in range(config.layers.num_hidden_layers)):
            flags("sliding_window_non_causal")
    if d2t is not None:
        found["d2t"] = [d2t, "absolute" if d2t == "offset" else "offset"]
    return found


@dataclass(frozen=True, slots=True)
class _Text:
    """tokens: prompt and answer. taps: tap -> float32 [tokens but the last, hidden_size]."""

    tokens: list[int]
    prompt: int
    taps: Mapping[int, F32]


def _answers(model: LanguageModel, taps: Sequence[int]) -> list[_Text]:
    prompts: list[Sequence[int]] = []
    for text in PROMPTS:
        if model.template is not None:
            prompts.append(model.chat_ids([{"role": "user", "content": text}]))
        elif model.tokenizer is not None:
            prompts.append(model.tokenizer.encode(text))
        else:
            prompts.append([ord(character) % model.config.vocab_size for character in text])
    room = model.target.capacity.positions
    prompts = [prompt[: max(1, room - ANSWER - CHAIN)] for prompt in prompts]
    opts = SampleOpts.greedy(max_tokens=min(ANSWER, max(1, room - max(map(len, prompts)))))
    results = model.generate_many(prompts, opts, speculate=False, taps=taps)
    return [_Text([*r.prompt_ids, *r.token_ids], len(r.prompt_ids), r.taps) for r in results]


def _tokens_per_round(drafter: HeadDrafter | BlockDrafter, texts: Sequence[_Text], vocab_size: int) -> float:
    """Drafts at every token of the answers, as plain decoding would pass them."""
    kept = places = 0
    for text in texts:
        features = np.concatenate([text.taps[tap] for tap in drafter.taps], axis=1)
        state = State(text.tokens[: text.prompt + 1], Sampler(SampleOpts.greedy(), vocab_size, text.tokens[:1]))
        state.features.start = drafter.begin(state, 0)
        state.features.append(features[: text.prompt])
        for at in range(text.prompt + 1, len(text.tokens)):
            (draft,) = drafts_of(drafter.propose([Want(state, CHAIN)]))
            kept += len(draft.follow(text.tokens[at : at + CHAIN]))
            places += 1
            state.tokens.append(text.tokens[at])
            state.features.append(features[at - 1 : at])
        drafter.forget(state)
    return 1.0 + kept / max(1, places)


def forget(head_path: Path) -> None:
    """The head is read as its file says again."""
    with suppress(OSError):
        conventions_file(head_path).unlink()
