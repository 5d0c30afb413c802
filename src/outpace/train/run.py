"""`outpace train` from the model's name to the trained head: data, training, figures on the held-out prompts.

Neighbours: cli/train.py shows it; data.py, loop.py and evaluate.py do it. Everything a run needs lies in its folder, so
that it can be stopped at any time and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import hub
from ..api import load
from ..backends.cores import usable_cores
from ..bench.prompts import CLASSES, held_out
from ..models.quantise import Precision
from ..types import SampleOpts, Stats, UsageError
from .data import Shards, fingerprint, record
from .loop import CHECKPOINT, Recipe, Status, Trainer
from .sources import Composer, Conversations
from .target import Target, default_taps
from .torch_or_say import torch
from .via import Server

KINDS = ("eagle3",)
PRECISION: Precision = "int8"  # what the target answers with: as `outpace generate` does
SLOTS = 32  # answers at once: more give no more tokens per second
CONTEXT = 1024
DRAFTS, MEASURED_TOKENS = 7, 200  # a chain's guesses and an answer's tokens, on the held-out prompts

Show = Callable[[str, float, str], None]  # what is being done, the part that is done, and how it stands


@dataclass(slots=True)
class Measured:
    """Decoding with a head. drafted[i], accepted[i]: of guess i + 1."""

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
        """For each place of a chain, how often its guess was kept where those before it were."""
        reached = [self.drafted[0], *self.accepted[:-1]]
        return [kept / max(count, 1) for kept, count in zip(self.accepted, reached, strict=True)]

    def add(self, stats: Stats) -> None:
        """One answer."""
        self.tokens += stats.tokens
        self.rounds += stats.rounds
        for totals, counts in ((self.drafted, stats.drafted_at), (self.accepted, stats.accepted_at)):
            for i, count in enumerate(counts):
                totals[i] += count


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run gave. left_out: prompts and answers that were of no use, by reason. held_out: by class of the held-out
    prompts, and "all". coverage: of the draft vocabulary."""

    folder: Path
    answers: int
    left_out: Mapping[str, int]
    status: Status
    coverage: float
    held_out: dict[str, Measured]


def train(
    target: str,
    out: Path,
    *,
    kind: str = "eagle3",
    minutes: float = 60.0,
    data_minutes: float | None = None,
    data: Path | None = None,
    shards: Path | None = None,
    via: str | None = None,
    via_model: str | None = None,
    seed: int = 0,
    resume: bool = False,
    threads: int | None = None,
    recipe: Recipe | None = None,
    show: Show | None = None,
) -> Trained:
    """Trains a head for `target` in `minutes`, of which `data_minutes` (two fifths by default) go to making data.

    out: the head's folder. data: a file of prompts (rows.py); composed ones without it. shards: the folder of the data
    that are made (OUT/data). via: the URL of a server of the target that writes the answers, via_model: the target's
    name there. resume: goes on with the run there. show: is told how it goes.
    Raises UsageError, ModelError, NumericalError; KeyboardInterrupt after leaving what there is in the folder.
    """
    if kind not in KINDS:
        raise UsageError(f"kind must be one of {', '.join(KINDS)}, got {kind!r:.40}")
    data_minutes = 0.4 * minutes if data_minutes is None else data_minutes
    if not (0 < minutes <= 60 * 24 * 30 and 0 <= data_minutes < minutes):
        raise UsageError("minutes must be more than 0, and more than those for the data")
    tell = show or (lambda what, part, how: None)
    made = shards or out / "data"
    if (out / CHECKPOINT).exists() != resume and not (resume and (made / "shards.json").exists()):
        said = "go on with --resume, or name another folder" if not resume else "there is nothing to go on with"
        raise UsageError(f"{out}: {'holds a training run' if not resume else 'no run there'}: {said}")
    source = Composer(seed) if data is None else Conversations(data)
    server = None if via is None else Server(via, via_model)
    threads = usable_cores() if threads is None else threads
    torch.set_num_threads(threads)
    path = hub.resolve(target)
    made_by = fingerprint(path, PRECISION)
    parts = Target.load(path)
    taps = default_taps(parts.config)
    context = min(CONTEXT, parts.config.max_position_embeddings)

    more: dict[str, Any] = {"slots": SLOTS, "context": context, "threads": threads, "progress": False}
    with load(target, precision=PRECISION, draft="none", **more) as model:
        seconds = 60 * data_minutes
        if seconds or data is not None:

            def making(tokens: int, prompts: int, spent: float) -> None:
                rate = tokens / max(spent, 1e-9)
                tell("data", spent / max(seconds, 1e-9), f"{tokens:,} tokens, {prompts:,} prompts, {rate:.0f} tokens/s")

            more = {"made_by": made_by, "taps": taps, "source": source, "server": server}
            record(model, made, **more, seconds=seconds, progress=making)
    found = Shards(made, made_by)
    resumed = resume and (out / CHECKPOINT).exists()
    trainer = Trainer(parts, found, out, name=target, seed=seed, recipe=recipe or Recipe(), resume=resumed)
    seconds = 60 * (minutes - data_minutes)

    def training(status: Status) -> None:
        rate = status.positions / max(status.seconds, 1e-9)
        agree = " ".join(f"{part:.2f}" for part in status.agree)
        how = f"step {status.step}, loss {status.loss:.3f}, agreement {agree}, {rate:.0f} positions/s"
        tell("training", status.seconds / seconds, how)

    status = trainer.run(seconds, training)
    tell("held-out prompts", 0.0, "decoding them with the head")
    return Trained(out, found.answers, found.left_out, status, trainer.coverage, measure(target, out, threads))


def measure(target: str, head: Path, threads: int | None = None, most: int = MEASURED_TOKENS) -> dict[str, Measured]:
    """Decodes the held-out prompts greedily with chains of seven guesses of a head, with the engine that users run.

    most: tokens of an answer. By class, and "all".
    """
    found = {name: Measured() for name in (*CLASSES, "all")}
    more: dict[str, Any] = {"slots": 8, "threads": threads, "progress": False}
    with load(target, precision=PRECISION, head=head, draft=KINDS[0], draft_tokens=DRAFTS, **more) as model:
        for name in CLASSES:
            prompts = [model.chat_ids(list(prompt.messages)) for prompt in held_out() if prompt.kind == name]
            rooms = [min(most, model.target.capacity.positions - len(prompt)) for prompt in prompts]
            asked = [
                (p, SampleOpts.greedy(max_tokens=room)) for p, room in zip(prompts, rooms, strict=True) if room > 0
            ]
            for result in model.generate_many([p for p, _ in asked], [opts for _, opts in asked]):
                for into in (found[name], found["all"]):
                    into.add(result.stats)
    return found
