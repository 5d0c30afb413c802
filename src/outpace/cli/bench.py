"""`outpace bench kernels`: what a pass costs on this machine, beside what the machine could do at best; `outpace bench
start`: how long a start takes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DEFAULT_MODEL
from .terminal import note, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.native import NativeBackend
    from ..models.quantise import Precision

MARGIN = 1024  # tokens beyond the longest context: room for prompts and rows

Model = Annotated[str | None, typer.Argument(help="A name, a folder or a .gguf file.", show_default=DEFAULT_MODEL)]
Shape = Annotated[
    str | None,
    typer.Option(help="In place of a model: qwen3-0.6b, qwen3-1.7b, qwen3-4b or smollm2-135m, random weights."),
]
Bits = Annotated[int | None, typer.Option(help="Of the random weights: 8 or 4.", show_default="8")]
Threads = Annotated[int | None, typer.Option(help="Threads; by default one for each fast core.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def kernels(
    model: Model = None,
    *,
    shape: Shape = None,
    bits: Bits = None,
    kind: Annotated[
        str | None,
        typer.Option(help="Of the random weights, in place of --bits: q8_0, q4_0, q4_1, q3_k ... q6_k, f16 or bf16."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Measure decoding after N tokens (random keys and values). Repeatable.", show_default="0, 1024, 4096"
        ),
    ] = None,
    kv_cache: Annotated[str, typer.Option(help="How keys and values are held: auto, f32, f16 or q8.")] = "auto",
    threads: Threads = None,
    seconds: Annotated[
        float, typer.Option(help="Time for comparing row counts; the rest takes about twice that.")
    ] = 12,
    as_json: AsJson = False,
) -> None:
    """Measures passes of 1 to 16 rows, decoding at several contexts and prompts, and the machine's own limits."""
    from ..bench.kernels import CONTEXTS, measure_kernels
    from ..types import UsageError

    if shape is not None and model is not None:
        raise UsageError("name a model or a --shape, not both")
    if (bits, kind) != (None, None) and shape is None:
        raise UsageError("--bits and --kind go with --shape: a model has the kinds of its file")
    if bits is not None and kind is not None:
        raise UsageError("give --bits or --kind, not both")
    if not 0 < seconds <= 3600:
        raise UsageError(f"--seconds must be above 0 and at most 3600, got {seconds:g}")
    contexts = CONTEXTS if context is None else tuple(context)
    if any(n < 0 for n in contexts):
        raise UsageError("--context cannot be negative")
    quiet = as_json or not sys.stderr.isatty()
    label, target = open_target(model, shape, kind or bits or 8, contexts, threads, kv_cache, quiet=quiet)

    def progress(text: str) -> None:
        if not quiet:
            note(f"{text} ...")

    found = measure_kernels(target, contexts=contexts, seconds=seconds, progress=progress)
    found = {"model": label, **found}
    if as_json:
        show(json.dumps(found) + "\n")
    else:
        print_report(found)


def start(
    model: Model = None,
    *,
    runs: Annotated[int, typer.Option(help="Processes of each kind.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Measures how long a process takes to its first token, with and without the weights' disk cache."""
    from .. import hub
    from ..bench.start import measure_start
    from ..types import UsageError

    if not 1 <= runs <= 1000:
        raise UsageError(f"--runs must be in 1 .. 1000, got {runs}")
    label = model or DEFAULT_MODEL
    quiet = as_json or not sys.stderr.isatty()
    hub.resolve(label, progress=not quiet)  # a download is no start
    found = {"model": label, **measure_start(label, runs=runs, progress=lambda text: None if quiet else note(text))}
    if as_json:
        show(json.dumps(found) + "\n")
        return
    from rich.console import Console

    names = {"first_token_s": "first token", "whole_s": "whole process", "processor_s": "processor time"}
    table(
        f"starts of {label}, ms: median (least) of {runs}",
        ["", *names.values()],
        [
            [mode, *(f"{1e3 * figures[name]['median']:.0f} ({1e3 * figures[name]['least']:.0f})" for name in names)]
            for mode, figures in found["modes"].items()
        ],
        Console(highlight=False),
    )


def open_target(
    model: str | None,
    shape: str | None,
    kind: str | int,
    contexts: tuple[int, ...],
    threads: int | None,
    kv_cache: str,
    *,
    quiet: bool,
) -> tuple[str, NativeBackend]:
    """What to call it, and the model, opened for these contexts; a shape takes any. Raises what loading raises."""
    from .. import hub
    from ..backends.native import NativeBackend
    from ..bench import shapes
    from ..models.loading import load_model

    if shape is not None:
        config = shapes.shape(shape)
        positions = max(config.max_position_embeddings, max(contexts, default=0) + MARGIN)
        config = replace(config, max_position_embeddings=positions)
        label = f"{shape}, {f'{kind} bits' if isinstance(kind, int) else kind.lower()}, random weights"
        weights = shapes.random_weights(config, kind)
        precision: Precision = "bf16" if isinstance(kind, str) and kind.lower() in ("f16", "bf16") else "int8"
    else:
        label = model or DEFAULT_MODEL
        loaded = load_model(hub.resolve(label, progress=not quiet))
        config, weights, precision = loaded.config, loaded.weights, "int8"
    positions = min(config.max_position_embeddings, max(contexts, default=0) + MARGIN)
    return label, NativeBackend(
        config,
        weights,
        precision=precision,
        slots=len(contexts) + 2,
        positions=positions,
        threads=threads,
        kv_cache=kv_cache,  # type: ignore[arg-type]  # the backend checks it
    )


def print_report(found: dict[str, Any]) -> None:
    """The figures as tables on stdout, the machine's limits first."""
    from rich.console import Console

    from ..types import size

    bandwidth, share = found["bandwidth"], found["share"]
    big, same = bandwidth["big"], bandwidth["same_size"]
    console = Console(highlight=False)
    line = lines(found, console)
    line("reading", f"{gigabytes(big)} from {size(big['bytes'])}, {gigabytes(same)} from {size(same['bytes'])}")
    peak = found["int8_peak"]
    line("int8 peak", "not measured for these kernels" if peak is None else f"{peak / 1e12:.2f} Tops/s")
    weights = found["weights"]
    line("weights", f"{size(weights['bytes'])} in memory, {size(weights['pass'])} read by a pass of one row")
    line(
        "one row",
        f"{share['of_big']:.0%} of the bandwidth over {size(big['bytes'])} ({share['of_big_best']:.0%} at best), "
        f"{share['of_same_size']:.0%} over the weights' size ({share['of_same_size_best']:.0%})",
    )
    if found["int8_share"] is not None:
        line("16 rows", f"{found['int8_share']:.0%} of the int8 peak")
    rows = sorted(found["pass_ms"])
    table(
        f"whole forward, median of {found['rounds']} rounds",
        ["rows", "ms", "ratio", "fastest ms", "ratio"],
        [
            [
                str(n),
                f"{found['pass_ms'][n]:.2f}",
                f"{found['pass_ratio'][n]:.2f}",
                f"{found['pass_min_ms'][n]:.2f}",
                f"{found['pass_min_ms'][n] / found['pass_min_ms'][1]:.2f}",
            ]
            for n in rows
        ],
        console,
    )
    counts = sorted(found["stages_ms"])
    table(
        f"where the time goes, ms ({found['layers']} layers; in brackets for one)",
        ["stage", *(f"{n} row{'s' if n > 1 else ''}" for n in counts)],
        [
            [
                stage,
                *(
                    f"{found['stages_ms'][n][stage]:.2f}"
                    + (
                        f" ({found['stages_ms'][n][stage] / found['layers']:.3f})"
                        if stage in ("projections", "attention", "mlp")
                        else ""
                    )
                    for n in counts
                ),
            ]
            for stage in ("projections", "attention", "mlp", "head", "rest")
        ],
        console,
    )
    table(
        f"decoding after a context, cache in {found['kv_cache']}",
        ["tokens", "tokens/s", "8 rows over one"],
        [[str(n), f"{speed:.1f}", f"{found['verify'][n]:.2f}"] for n, speed in sorted(found["decode"].items())],
        console,
    )
    prompts = [[str(n), f"{speed:.0f}"] for n, speed in sorted(found["prefill"].items())]
    table("reading a prompt", ["tokens", "tokens/s"], prompts, console)
    for text in found["left_out"]:
        note(text)


def lines(found: dict[str, Any], console: Any) -> Callable[[str, str], None]:
    """Prints what was measured where; returns what prints a further line."""

    def line(name: str, text: str) -> None:
        console.print(f"{name:<18}{text}", soft_wrap=True)

    machine = found["machine"]
    line("machine", f"{machine['processor']}, {machine['isa']}, {machine['threads']} threads")
    line("model", found["model"])
    return line


def gigabytes(entry: dict[str, float]) -> str:
    """A bandwidth for people."""
    return f"{entry['bytes_per_s'] / 1e9:.1f} GB/s"


def table(title: str, columns: list[str], rows: list[list[str]], console: Any) -> None:
    """One table: the first column names, the others are figures."""
    from rich import box
    from rich.table import Table

    grid = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        grid.add_column(column, justify="right" if i else "left")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
