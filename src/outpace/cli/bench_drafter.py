"""`outpace bench drafter`: what a draft head brings on the held-out prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .bench import AsJson, Model, Threads, table
from .options import DEFAULT_MODEL
from .terminal import note, show


def drafter(
    model: Model = None,
    *,
    path: Annotated[
        Path | None,
        typer.Option("--head", help="A draft head of the model.", show_default="the one the model has"),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts of each class for the acceptance; 0: none.")] = 8,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 200,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of the answers. Repeatable.", show_default="0, 0.7")
    ] = None,
    timed: Annotated[int, typer.Option(help="Prompts of each class for the speed; 0: none.")] = 8,
    precision: Annotated[str, typer.Option(help="The model's arithmetic: int8, int4, bf16 or f32.")] = "int8",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measures a draft head on the forty held-out prompts.

    Tokens per round as a chain of seven tokens and as a tree of eight rows, and the speed over plain decoding."""
    from ..bench.drafter import TEMPERATURES, measure_drafter
    from ..models.quantise import check_precision

    label = model or DEFAULT_MODEL
    quiet = as_json or not sys.stderr.isatty()
    found = measure_drafter(
        label,
        path,
        prompts=prompts,
        tokens=tokens,
        temperatures=TEMPERATURES if temperature is None else temperature,
        timed=timed,
        precision=check_precision(precision),
        threads=threads,
        progress=lambda what, part: None if quiet else note(f"{what} {part:.0%} ..."),
    )
    found = {"model": label, "head": None if path is None else str(path), **found}
    if as_json:
        show(json.dumps(found) + "\n")
    else:
        print_report(found)


def print_report(found: dict[str, Any]) -> None:
    """What measure_drafter found, for people."""
    from rich.console import Console

    console = Console(highlight=False)
    if runs := found["acceptance"]:
        drafts = found["drafts"]
        names = list(runs[0]["tokens_per_round"])
        table(
            f"tokens per round, drafts of {drafts} tokens",
            ["", *names],
            [[_name(run), *(f"{run['tokens_per_round'][name]:.2f}" for name in names)] for run in runs],
            console,
        )
        table(
            "kept by position",
            ["", *map(str, range(1, drafts + 1))],
            [[_name(run), *(f"{kept:.2f}" for kept in run["kept_by_position"])] for run in runs],
            console,
        )
    if speed := found.get("speed"):
        table(
            "speed over plain decoding, greedy, one answer at a time",
            ["drafts", "factor", "95 %", "tokens a round"],
            [
                [
                    {"head": "the head alone", "auto": "head and look-ups"}[mode],
                    f"{each['factor']:.2f}",
                    f"{each['interval'][0]:.2f} to {each['interval'][1]:.2f}",
                    f"{each['tokens_per_round']:.2f}",
                ]
                for mode, each in speed.items()
            ],
            console,
        )


def _name(run: dict[str, Any]) -> str:
    return f"{run['shape']}, T {run['temperature']:g}"
