"""`outpace train` from the model's name to the trained head: data, training, figures on the held-out prompts.

Neighbours: cli/train.py shows it; data.py, loop.py and evaluate.py do it. Everything a run needs lies in its folder, so
that it can be stopped at any time and go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import hub
from ..api import load
from ..backends.cores import usable_cores
from ..bench.prompts import CLASSES, held_out
from ..models.quantise import Precision
from ..types import SampleOpts, UsageError
from .data import Example, Shards, answered, fingerprint, record
from .evaluate import Score, score
from .loop import CHECKPOINT, Recipe, Status, Trainer
from .prompts import Prompt
from .target import Target, default_taps
from .torch_or_say import torch

KINDS = ("eagle3",)
PRECISION: Precision = "int8"  # what the target answers with: as `outpace generate` does
SLOTS = 32  # answers at once: more give no more tokens per second
CONTEXT = 1024

Show = Callable[[str, float, str], None]  # what is being done, the part that is done, and how it stands


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run gave. scores: by class of the held-out prompts, and "all". coverage: of the draft vocabulary."""

    folder: Path
    answers: int
    status: Status
    coverage: float
    scores: dict[str, Score]


def train(
    target: str,
    out: Path,
    *,
    kind: str = "eagle3",
    minutes: float = 60.0,
    data_minutes: float | None = None,
    data: Path | None = None,
    seed: int = 0,
    resume: bool = False,
    threads: int | None = None,
    recipe: Recipe | None = None,
    show: Show | None = None,
) -> Trained:
    """Trains a head for `target` in `minutes`, of which `data_minutes` (two fifths by default) go to making data.

    out: the head's folder. data: the data's (OUT/data). resume: goes on with the run there. show: is told how it goes.
    Raises UsageError, ModelError, NumericalError; KeyboardInterrupt after leaving what there is in the folder.
    """
    if kind not in KINDS:
        raise UsageError(f"kind must be one of {', '.join(KINDS)}, got {kind!r:.40}")
    data_minutes = 0.4 * minutes if data_minutes is None else data_minutes
    if not (0 < minutes <= 60 * 24 * 30 and 0 <= data_minutes < minutes):
        raise UsageError("minutes must be more than 0, and more than those for the data")
    tell = show or (lambda what, part, how: None)
    data = data or out / "data"
    if (out / CHECKPOINT).exists() != resume and not (resume and (data / "shards.json").exists()):
        said = "go on with --resume, or name another folder" if not resume else "there is nothing to go on with"
        raise UsageError(f"{out}: {'holds a training run' if not resume else 'no run there'}: {said}")
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
        if seconds:

            def making(tokens: int, prompts: int, spent: float) -> None:
                rate = tokens / max(spent, 1e-9)
                tell("data", spent / seconds, f"{tokens:,} tokens, {prompts:,} prompts, {rate:.0f} tokens/s")

            record(model, data, made_by=made_by, taps=taps, seed=seed, seconds=seconds, progress=making)
        shards = Shards(data, made_by)
        questions = held_out()
        asked = [(Prompt(q.kind, (q.messages[-1]["content"],)), SampleOpts.greedy()) for q in questions]
        test: dict[str, list[Example]] = {}
        for name in CLASSES:
            of_it = [pair for pair in asked if pair[0].kind == name]
            test[name] = list(answered(model, of_it, taps))
            tell("held-out answers", len(test) / len(CLASSES), name)

    resumed = resume and (out / CHECKPOINT).exists()
    trainer = Trainer(parts, shards, out, name=target, seed=seed, recipe=recipe or Recipe(), resume=resumed)
    seconds = 60 * (minutes - data_minutes)

    def training(status: Status) -> None:
        rate = status.positions / max(status.seconds, 1e-9)
        agree = " ".join(f"{part:.2f}" for part in status.agree)
        how = f"step {status.step}, loss {status.loss:.3f}, agreement {agree}, {rate:.0f} positions/s"
        tell("training", status.seconds / seconds, how)

    status = trainer.run(seconds, training)
    scores = {name: score(trainer.head, trainer.lm_head.float(), trainer.d2t, test[name]) for name in CLASSES}
    everything = [sequence for name in CLASSES for sequence in test[name]]
    scores["all"] = score(trainer.head, trainer.lm_head.float(), trainer.d2t, everything)
    return Trained(out, shards.answers, status, trainer.coverage, scores)
