"""What a draft head brings on the held-out prompts, with the engine that users run: `outpace bench drafter`, and the
end of `outpace train`.

Two parts. Acceptance: tokens per round with drafts of a fixed number of tokens, as a chain and as a tree, greedy and at
a temperature; it depends on head and prompts, not on the machine. Speed: answers one at a time, with the drafts that
the controller chooses over plain decoding, in turns on the same prompt, so that a busy machine slows both.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..api import LanguageModel, load
from ..costs import measure_shape
from ..drafters import BlockDrafter, Drafter, HeadDrafter
from ..drafters.base import Want
from ..models.quantise import Precision
from ..types import Draft, OutpaceError, SampleOpts, Stats, UsageError
from .prompts import CLASSES, HeldOut, held_out

DRAFTS = 7  # tokens of a draft: with the newest one 8 rows of a pass
TOKENS = 200  # most of an answer
TEMPERATURES = (0.0, 0.7)
SHAPES = ("chain", "tree")

Progress = Callable[[str, float], None]  # what is measured, the part that is done


@dataclass(slots=True)
class Acceptance:
    """Answers decoded with drafts of a fixed length. drafted[i], accepted[i]: rounds with a draft, and with an accepted
    token, at depth i + 1."""

    tokens: int = 0
    rounds: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * DRAFTS)

    @property
    def tokens_per_round(self) -> float:
        """The target's own token included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def kept(self) -> list[float]:
        """For each depth, how often a token there was kept where one was before it; the first: of all drafts."""
        reached = [self.drafted[0], *self.accepted[:-1]]
        return [kept / max(count, 1) for kept, count in zip(self.accepted, reached, strict=True)]

    def add(self, stats: Stats) -> None:
        """One answer."""
        self.tokens += stats.tokens
        self.rounds += stats.rounds
        for totals, counts in ((self.drafted, stats.drafted_at), (self.accepted, stats.accepted_at)):
            for i, count in enumerate(counts):
                totals[i] += count


def measure_drafter(
    model: str | Path,
    head: Path | None,
    *,
    prompts: int = 8,
    tokens: int = TOKENS,
    temperatures: Sequence[float] = TEMPERATURES,
    shapes: Sequence[str] = SHAPES,
    timed: int = 8,
    timed_tokens: int = 96,
    precision: Precision = "int8",
    threads: int | None = None,
    progress: Progress = lambda what, part: None,
) -> dict[str, Any]:
    """Measures a head on the held-out prompts: `prompts` of each class for acceptance, `timed` for speed.

    head: None for the one that the model has, inside or in the box. tokens, timed_tokens: most of an answer. Returns
    what can be written as JSON:

    drafts        tokens of a draft of fixed length
    acceptance    for each shape and temperature: tokens_per_round, class (and "all") -> number; kept_by_position
    speed         mode -> factor over plain decoding (median over prompts), interval of that median (bootstrap, 95 %),
                  tokens_per_round. "head": this head alone; "auto": with look-ups in the text. Missing for timed = 0

    Raises what loading raises, UsageError, and OutpaceError for an answer that differs from plain decoding's.
    """
    for name, count, least in (("prompts", prompts, 0), ("tokens", tokens, 2), ("timed", timed, 0)):
        if not least <= count <= 100_000:
            raise UsageError(f"{name} must be in {least} .. 100000, got {count}")
    if any(not 0 <= temperature <= 100 for temperature in temperatures) or set(shapes) - set(SHAPES):
        raise UsageError(f"temperatures must be in 0 .. 100, and shapes of {', '.join(SHAPES)}")
    options: dict[str, Any] = {"precision": precision, "threads": threads, "slots": 8, "progress": False}
    with load(model, head=head, **options) as loaded:
        drafter = next((each for each in loaded.drafters if isinstance(each, (HeadDrafter, BlockDrafter))), None)
        if drafter is None:
            raise UsageError(f"{model} has no draft head of its own: name one with head= (--head)")
        found: dict[str, Any] = {"drafts": DRAFTS, "acceptance": []}
        runs = [(shape, temperature) for temperature in temperatures for shape in shapes] if prompts else []
        asked = _asked(loaded, prompts)
        for i, (shape, temperature) in enumerate(runs):
            progress(f"{shape}, temperature {temperature:g}", i / len(runs))
            drafts = drafter if shape == "chain" else _as_trees(drafter)
            by_class = _accepted(loaded, drafts, asked, tokens, temperature)
            found["acceptance"].append(
                {
                    "shape": shape,
                    "temperature": temperature,
                    "tokens_per_round": {name: each.tokens_per_round for name, each in by_class.items()},
                    "kept_by_position": by_class["all"].kept,
                }
            )
        if timed:
            found["speed"] = _speeds(loaded, drafter, _asked(loaded, timed), timed_tokens, progress)
    return found


def _asked(model: LanguageModel, count: int) -> list[tuple[HeldOut, list[int]]]:
    """`count` prompts of each class as token ids; those that fill the context are left out. A model without
    a chat template goes on with their text."""
    chosen = [prompt for name in CLASSES for prompt in [p for p in held_out() if p.kind == name][:count]]
    pairs = [(prompt, _ids(model, prompt)) for prompt in chosen]
    return [(prompt, ids) for prompt, ids in pairs if len(ids) + 2 < model.target.capacity.positions]


def _ids(model: LanguageModel, prompt: HeldOut) -> list[int]:
    if model.template is None and model.tokenizer is not None:
        return model.tokenizer.encode("\n\n".join(message["content"] for message in prompt.messages) + "\n\n")
    return model.chat_ids(list(prompt.messages))


def _accepted(
    model: LanguageModel,
    drafter: Drafter,
    asked: Sequence[tuple[HeldOut, list[int]]],
    tokens: int,
    temperature: float,
) -> dict[str, Acceptance]:
    found = {name: Acceptance() for name in (*CLASSES, "all")}
    room = model.target.capacity.positions
    with LanguageModel(model.target, model.tokenizer, drafters=[drafter], draft_tokens=DRAFTS) as fixed:
        for name in CLASSES:
            of_class = [ids for prompt, ids in asked if prompt.kind == name]
            opts = [
                SampleOpts(temperature=temperature, seed=i, max_tokens=min(tokens, room - len(ids)))
                for i, ids in enumerate(of_class)
            ]
            for result in fixed.generate_many(of_class, opts):
                for into in (found[name], found["all"]):
                    into.add(result.stats)
    return found


def _speeds(
    model: LanguageModel,
    drafter: Drafter,
    asked: Sequence[tuple[HeldOut, list[int]]],
    tokens: int,
    progress: Progress,
) -> dict[str, Any]:
    shape = measure_shape(model.target)
    modes: dict[str, Sequence[Drafter]] = {"plain": (), "head": (drafter,), "auto": model.drafters}
    factors: dict[str, list[float]] = {mode: [] for mode in modes}
    totals = {mode: Acceptance(drafted=[0] * 16, accepted=[0] * 16) for mode in modes}
    for i, (prompt, ids) in enumerate(asked):
        progress("speed", i / len(asked))
        order = list(modes)
        random.Random(i).shuffle(order)
        opts = SampleOpts.greedy(max_tokens=min(tokens, model.target.capacity.positions - len(ids)))
        answers, seconds = {}, {}
        for mode in order:
            # A new model object each time: what the controller learnt is forgotten, as between two commands.
            with LanguageModel(model.target, model.tokenizer, drafters=modes[mode], shape=shape) as each:
                result = each.generate(ids, opts)
            answers[mode], seconds[mode] = result.token_ids, result.stats.decode_s / max(1, result.stats.decode_tokens)
            totals[mode].add(result.stats)
        if any(answer != answers["plain"] for answer in answers.values()):
            raise OutpaceError(f"the answer to {prompt.id} with drafts differs from the one without: please report it")
        for mode in modes:
            if seconds[mode]:
                factors[mode].append(seconds["plain"] / seconds[mode])
    return {
        mode: {
            "factor": statistics.median(factors[mode]) if factors[mode] else 0.0,
            "interval": interval(factors[mode]),
            "tokens_per_round": totals[mode].tokens_per_round,
        }
        for mode in ("head", "auto")
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """In which the median lies at 95 %, by bootstrap."""
    if not values:
        return (0.0, 0.0)
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def _as_trees(drafter: HeadDrafter | BlockDrafter) -> Drafter:
    return (_HeadTrees if isinstance(drafter, HeadDrafter) else _BlockTrees)(drafter.head)


def _wanting_trees(wanted: Sequence[Want]) -> list[Want]:
    """As the controller asks, but for the most likely tokens whatever they are worth, as deep as they may lie."""
    return [replace(want, worth=1e-6, step=-1.0) for want in wanted]


class _HeadTrees(HeadDrafter):
    """Trees of as many tokens as a chain of fixed length would have."""

    def propose(self, wanted: Sequence[Want]) -> list[Draft | Exception]:
        return super().propose(_wanting_trees(wanted))


class _BlockTrees(BlockDrafter):
    """Trees of as many tokens as a chain of fixed length would have."""

    def propose(self, wanted: Sequence[Want]) -> list[Draft | Exception]:
        return super().propose(_wanting_trees(wanted))
