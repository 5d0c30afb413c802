"""`outpace quantize`: a model as a smaller GGUF file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from .manage import Offline
from .options import Quiet
from .terminal import note


def quantize(
    model: Annotated[str, typer.Argument(help="A built-in name, a Hugging Face id, a folder or a .gguf file.")],
    out: Annotated[Path, typer.Argument(help="The .gguf file to write.")],
    *,
    to: Annotated[str, typer.Option("--to", help="q8 (8 bits) or q4 (4 bits; embedding and head 8).")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    offline: Offline = False,
    quiet: Quiet = False,
) -> None:
    """Writes a model as GGUF with weights of 8 or 4 bits.

    A q8 file answers as the model itself does with --precision int8; q4 is half as large and less exact.
    """
    from .. import hub
    from ..models.export import export_gguf
    from ..models.loading import load_model
    from ..types import size

    loaded = load_model(hub.resolve(model, offline=offline, progress=not quiet))
    moving = not quiet and sys.stderr.isatty()
    try:
        made = export_gguf(loaded, to, out, force=force, progress=_bar(out.name) if moving else None)  # type: ignore[arg-type]
    finally:
        if moving:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if not quiet:
        kinds = ", ".join(f"{kind} x{count}" for kind, count in made.kinds.items())
        note(f"wrote {made.path} ({size(made.bytes)}: {kinds})")
    for text in (*loaded.notices, *made.notices):
        note(text)


def _bar(name: str) -> Callable[[int, int], None]:
    """Tells a terminal how much is written, when that is another hundredth."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // total
        if percent != shown:
            shown = percent
            print(f"\rwriting {name} {percent:3d}% [{'#' * (percent // 5):20s}]", end="", file=sys.stderr, flush=True)

    return show
