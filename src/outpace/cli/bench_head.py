"""`outpace bench head`: what a draft step costs beside a pass of its target, and what an acceptance would bring."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench import AsJson, Bits, Model, Shape, Threads, lines, open_target, table
from .options import DEFAULT_MODEL
from .terminal import note, show

if TYPE_CHECKING:
    from ..backends.native import NativeBackend
    from ..backends.native_head import NativeHead


def head(
    model: Model = None,
    *,
    path: Annotated[
        Path | None, typer.Option("--head", help="A draft head of the model; by default a random EAGLE-3 one.")
    ] = None,
    shape: Shape = None,
    bits: Bits = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Tokens that the random head can guess.", show_default="32000")
    ] = None,
    tau: Annotated[
        list[float] | None,
        typer.Option(help="Simulate a head that reaches so many tokens a round, the bonus token included. Repeatable."),
    ] = None,
    chain: Annotated[int, typer.Option(help="Draft length that --tau was measured with.")] = 7,
    threads: Threads = None,
    seconds: Annotated[float, typer.Option(help="Time for the costs.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Measures steps of a draft head in turns with passes of its target; --tau simulates an acceptance."""
    from ..bench.head import measure_head, simulate_head
    from ..types import UsageError

    if shape is not None and (model is not None or path is not None):
        raise UsageError("name a model or a --shape, not both; a --head goes with a model")
    if bits is not None and shape is None:
        raise UsageError("--bits goes with --shape: a model has the kinds of its file")
    if draft_vocab is not None and path is not None:
        raise UsageError("--draft-vocab is for the random head")
    if not 0 < seconds <= 3600:
        raise UsageError(f"--seconds must be above 0 and at most 3600, got {seconds:g}")
    quiet = as_json or not sys.stderr.isatty()
    label, target, running = _open(model, path, shape, bits or 8, draft_vocab, threads, quiet=quiet)
    found: dict[str, Any] = {"model": label, **measure_head(target, running, seconds=seconds)}
    progress = (lambda text: None) if quiet else (lambda text: note(f"{text} ..."))
    found["simulated"] = [simulate_head(target, running, t, chain=chain, progress=progress) for t in tau or ()]
    if as_json:
        show(json.dumps(found) + "\n")
    else:
        _print(found)


def _open(
    model: str | None,
    path: Path | None,
    shape: str | None,
    bits: int,
    draft_vocab: int | None,
    threads: int | None,
    *,
    quiet: bool,
) -> tuple[str, NativeBackend, NativeHead]:
    """What to call the pair, the target and the head on it. Raises what loading raises."""
    from .. import api
    from ..backends.native import NativeBackend
    from ..backends.native_head import NativeHead
    from ..bench.head import random_head
    from ..drafters import BlockDrafter, HeadDrafter

    if path is None:
        label, target = open_target(model, shape, bits, (0,), threads, "auto", quiet=quiet)
        return f"{label}, random EAGLE-3 head", target, random_head(target, draft_vocab)
    label = model or DEFAULT_MODEL
    loaded = api.load(label, head=path, threads=threads, slots=4, progress=not quiet)
    drafter = next(d for d in loaded.drafters if isinstance(d, (HeadDrafter, BlockDrafter)))
    assert isinstance(loaded.target, NativeBackend)
    assert isinstance(drafter.head, NativeHead)
    return f"{label}, {path}", loaded.target, drafter.head


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console

    from ..types import size

    read = found["bytes"]
    console = Console(highlight=False)
    line = lines(found, console)
    line("a step reads", f"{size(read['head'])}, a pass {size(read['target'])}: {read['ratio']:.1%}")
    line("a step takes", f"{found['step_share']:.1%} of a pass of one row (aim: at most {found['most_share']:.1%})")
    line("64 features", f"{found['read_ms']:.2f} ms to read")
    table(
        "median milliseconds",
        ["rows", "target's pass", "over one row", "head's step"],
        [
            [str(n), f"{ms:.2f}", f"{ms / found['pass_ms'][1]:.2f}", f"{found['step_ms'][n]:.2f}"]
            if n in found["step_ms"]
            else [str(n), f"{ms:.2f}", f"{ms / found['pass_ms'][1]:.2f}", ""]
            for n, ms in sorted(found["pass_ms"].items())
        ],
        console,
    )
    table(
        "tokens a round that a chain needs",
        ["draft length", "to cost no time", "to be 1.5x as fast"],
        [[str(k), f"{need:.2f}", f"{1.5 * need:.2f}"] for k, need in sorted(found["needed"].items())],
        console,
    )
    if found["simulated"]:
        table(
            "simulated: real passes and steps, drafts right as often as asked for",
            ["tokens a round", "controller: factor", "tokens a round", "fixed length: factor", "tokens a round"],
            [
                [f"{s['tau']:g} of a chain of {s['chain']}"]
                + [
                    text
                    for name in ("controller", "fixed")
                    for text in (f"{s[name]['factor']:.2f}", f"{s[name]['tokens_per_round']:.2f}")
                ]
                for s in found["simulated"]
            ],
            console,
        )
