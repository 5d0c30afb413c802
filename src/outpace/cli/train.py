"""`outpace train`: a draft head for a model, made on this machine."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench_drafter import print_report
from .manage import AsJson
from .options import Quiet
from .terminal import note

if TYPE_CHECKING:
    from ..train.run import Trained


def train(
    target: Annotated[str, typer.Argument(help="The model: a name, a folder or a .gguf file.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="The folder of the head and of all that the run needs to go on.")],
    kind: Annotated[str, typer.Option(help="The kind of head: eagle3, mtp or dflash.")] = "eagle3",
    minutes: Annotated[float, typer.Option(help="How long it may take, data included.")] = 60.0,
    data_minutes: Annotated[
        float | None,
        typer.Option(help="Of them, for making data; 0: use what is there.", show_default="two fifths"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A file of your own prompts: JSON lines, ShareGPT or parquet.", show_default="composed ones"),
    ] = None,
    shards: Annotated[
        Path | None, typer.Option(help="The folder of the data that are made.", show_default="OUT/data")
    ] = None,
    via: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI-compatible server of the model, to write the answers.")
    ] = None,
    via_model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name there.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, answers and the head's first weights.")] = 0,
    loss: Annotated[str, typer.Option(help="What a guess costs: kl, tv or hybrid.")] = "kl",
    train_head: Annotated[
        bool, typer.Option("--train-head", help="Give the head output rows of its own, which begin as the model's.")
    ] = False,
    evaluate: Annotated[
        bool, typer.Option(help="Measure the head on the held-out prompts at the end, as `outpace bench drafter` does.")
    ] = True,
    threads: Annotated[int | None, typer.Option(help="Threads.", show_default="one per core")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Trains a head that drafts for a model: no data set, no second machine.

    The model answers prompts of our own, and a small network learns from its hidden states to guess its next tokens.
    Ctrl-C leaves a head that can be used, and --resume goes on.
    """
    from ..train.run import train as run

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a kill ends as Ctrl-C does
    with _Shown(quiet or as_json) as shown:
        made = run(
            target,
            out,
            kind=kind,
            minutes=minutes,
            data_minutes=data_minutes,
            data=data,
            shards=shards,
            via=via,
            via_model=via_model,
            seed=seed,
            resume=resume,
            threads=threads,
            loss=loss,
            own_head=train_head,
            evaluate=evaluate,
            show=shown.show,
        )
    if made is None:  # one of several processes: the first one tells
        return
    found = _figures(made)
    if as_json:
        print(json.dumps(found))
    elif not quiet:
        _tell(made)


def _figures(made: Trained) -> dict[str, Any]:
    found: dict[str, Any] = {
        "path": str(made.folder),
        "answer_tokens": made.answers,
        "left_out": dict(made.left_out),
        "positions": made.status.positions,
        "steps": made.status.step,
        "coverage": round(made.coverage, 4),
    }
    return found if made.held_out is None else found | {"held_out": made.held_out}


def _tell(made: Trained) -> None:
    note(f"wrote {made.folder}: trained on {made.status.positions:,} positions of {made.answers:,} answer tokens")
    if made.left_out:
        note("left out of the data: " + ", ".join(f"{reason} {count:,}" for reason, count in made.left_out.items()))
    if made.coverage < 0.99:
        note(f"its draft vocabulary holds only {made.coverage:.1%} of the answers' tokens: make more data")
    if made.held_out is not None:
        print_report(made.held_out)


class _Shown:
    """A bar on a terminal, else a line now and then; nothing when silent."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self._bar: Any = None
        self._task: Any = None
        self._what = ""
        self._last = 0.0

    def __enter__(self) -> _Shown:
        if not self._silent and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(20),
                TimeRemainingColumn(),
                TextColumn("{task.fields[how]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, what: str, part: float, how: str) -> None:
        if self._bar is not None:
            if what != self._what:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(what, total=1.0, how=how)
            self._bar.update(self._task, completed=min(part, 1.0), how=how)
        elif not self._silent and (what != self._what or time.monotonic() - self._last > 30):
            note(f"{what} {min(part, 1.0):.0%}: {how}")
            self._last = time.monotonic()
        self._what = what
