"""`outpace train` from the model's name to the trained head: data, training, figures on the held-out prompts.

Neighbours: cli/train.py shows it; data.py, loop.py and evaluate.py do it. Everything a run needs lies in its folder, so
that it can be stopped at any time and go on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import hub
from ..api import load
from ..backends.cores import usable_cores
from ..bench.drafter import measure_drafter
from ..models.quantise import Precision
from ..types import UsageError
from .data import Shards, fingerprint, record
from .kinds import kind_of
from .loop import CHECKPOINT, Recipe, Status, Trainer, check_run, read_run
from .parallel import Workers
from .sources import Composer, Conversations
from .target import Target, default_taps
from .torch_or_say import torch
from .via import Server

PRECISION: Precision = "int8"  # what the target answers with: as `outpace generate` does
SLOTS = 32  # answers at once: more give no more tokens per second
CONTEXT = 1024
MOST_MINUTES = 60 * 24 * 30
TOKENS, TIMED = 200, 2  # at the end: tokens of an answer, and prompts of each class whose speed is measured

Show = Callable[[str, float, str], None]  # what is being done, the part that is done, and how it stands


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run gave. left_out: prompts and answers that were of no use, by reason. coverage: of the draft vocabulary.
    held_out: of bench/drafter.py; None where nobody asked."""

    folder: Path
    answers: int
    left_out: Mapping[str, int]
    status: Status
    coverage: float
    held_out: dict[str, Any] | None


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
    loss: str = "kl",
    own_head: bool = False,
    evaluate: bool = True,
    recipe: Recipe | None = None,
    show: Show | None = None,
) -> Trained | None:
    """Trains a head for `target` in `minutes`, of which `data_minutes` (two fifths by default) go to making data.

    out: the head's folder. data: a file of prompts (rows.py); composed ones without it. shards: the folder of the data
    that are made (OUT/data). via: the URL of a server of the target that writes the answers, via_model: the target's
    name there. loss: of losses.LOSSES. own_head: see Recipe. evaluate: measures the head on the held-out prompts at the
    end. resume: goes on with the run there. show: is told how it goes.
    Of several processes (parallel.py) the first makes the data, shows and measures; the others return None.
    Raises UsageError, ModelError, NumericalError; KeyboardInterrupt after leaving what there is in the folder.
    """
    recipe = replace(recipe or Recipe(**kind_of(kind).recipe), loss=loss, own_head=own_head)
    data_minutes = 0.4 * minutes if data_minutes is None else data_minutes
    if not (0 < minutes <= MOST_MINUTES and 0 <= data_minutes < minutes):
        raise UsageError(f"minutes must be more than 0, and more than those for the data, at most {MOST_MINUTES}")
    tell = show or (lambda what, part, how: None)
    made = shards or out / "data"
    if (out / CHECKPOINT).exists() != resume and not (resume and (made / "shards.json").exists()):
        said = "go on with --resume, or name another folder" if not resume else "there is nothing to go on with"
        raise UsageError(f"{out}: {'holds a training run' if not resume else 'no run there'}: {said}")
    source = Composer(seed) if data is None else Conversations(data)
    server = None if via is None else Server(via, via_model)
    workers = Workers.join()
    threads = max(1, usable_cores() // workers.here) if threads is None else threads
    torch.set_num_threads(threads)
    path = hub.resolve(target)
    made_by = fingerprint(path, PRECISION)
    parts = Target.load(path)
    taps = default_taps(parts.config)
    kind_of(kind).config(parts.config, taps, 1)  # what cannot be trained is refused before any work
    if resume and (out / CHECKPOINT).exists():
        check_run(out, read_run(out), kind, own_head, made_by)
    if workers.first:
        _make_folder(out)
    if (data_minutes or data is not None) and workers.first:
        context = min(CONTEXT, parts.config.max_position_embeddings)
        more: dict[str, Any] = {"slots": SLOTS, "context": context, "threads": threads, "progress": False}
        with load(target, precision=PRECISION, draft="none", **more) as model:
            seconds = 60 * data_minutes

            def making(tokens: int, prompts: int, spent: float) -> None:
                rate = tokens / max(spent, 1e-9)
                tell("data", spent / max(seconds, 1e-9), f"{tokens:,} tokens, {prompts:,} prompts, {rate:.0f} tokens/s")

            more = {"made_by": made_by, "taps": taps, "source": source, "server": server}
            record(model, made, **more, seconds=seconds, progress=making)
    workers.wait()
    found = Shards(made, made_by)
    resumed = resume and (out / CHECKPOINT).exists()
    options: dict[str, Any] = {"name": target, "kind": kind, "seed": seed, "recipe": recipe, "resume": resumed}
    trainer = Trainer(parts, found, out, workers=workers, **options)
    seconds = 60 * (minutes - data_minutes)

    def training(status: Status) -> None:
        rate = (status.positions - earlier.positions) / max(status.seconds - earlier.seconds, 1e-9)
        agree = " ".join(f"{part:.2f}" for part in status.agree)
        how = f"step {status.step}, loss {status.loss:.3f}, agreement {agree}, {rate:.0f} positions/s"
        if not math.isnan(status.checked):
            how += f", {status.checked:.2f} tokens per round"
        tell("training", status.seconds / seconds, how)

    earlier = replace(trainer.status)
    status = trainer.run(seconds, training if workers.first else None)
    workers.leave()
    if not workers.first:
        return None
    held_out = None
    if evaluate:

        def measuring(what: str, part: float) -> None:
            tell("held-out prompts", part, what)

        options = {"tokens": TOKENS, "timed": TIMED, "precision": PRECISION, "threads": threads}
        held_out = measure_drafter(target, out, progress=measuring, **options)
    return Trained(out, found.answers, found.left_out, status, trainer.coverage, held_out)


def _make_folder(out: Path) -> None:
    """Raises UsageError where nothing could be written at the end of all the work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot be the folder of a head: {error.strerror or error}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise UsageError(f"{out}: cannot be written: choose another folder with --out")
