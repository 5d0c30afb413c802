"""`outpace index`: a corpus as a datastore, from which drafts are taken."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .manage import AsJson, Offline
from .options import DEFAULT_MODEL, Quiet
from .terminal import counted, note


def index(
    corpus: Annotated[list[str], typer.Argument(help="Text files, and folders of them.")],
    out: Annotated[Path, typer.Argument(help="The file to write, for --datastore.")],
    *,
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model whose answers it will be used for: its vocabulary counts.")
    ] = DEFAULT_MODEL,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Indexes texts, so that answers which repeat them come faster (--datastore FILE).

    Documents, code, earlier answers: files of UTF-8 text in any format; of JSON with "text" or "messages", as `outpace
    generate --json` and /save in a chat write it, the texts. Other files are skipped, and in folders what is
    hidden, node_modules and the like. A corpus that has grown is indexed anew.
    """
    from .. import hub
    from ..drafters.datastore import build
    from ..models.loading import load_model
    from ..opening import load_tokenizer
    from ..types import size

    silent = quiet or as_json
    tokenizer = load_tokenizer(load_model(hub.resolve(model, offline=offline, progress=not silent)))
    moving = not silent and sys.stderr.isatty()
    start = time.perf_counter()
    try:
        made = build(out, corpus, tokenizer, model=model, force=force, progress=_Bar().show if moving else None)
    finally:
        if moving:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    about = made.head
    if as_json:
        found = {
            "path": str(made.path),
            "bytes": about.places[2],
            "files": made.files,
            "skipped": made.skipped,
            "unreadable": made.unreadable,
            "documents": about.documents,
            "tokens": about.suffixes,
            "seconds": round(time.perf_counter() - start, 3),
        }
        print(json.dumps(found))
    elif not quiet:
        left = f", {counted(made.skipped, 'file')} skipped as no text" if made.skipped else ""
        left += f", {counted(made.unreadable, 'file')} could not be read" if made.unreadable else ""
        note(
            f"wrote {made.path} ({size(about.places[2])}: {counted(about.suffixes, 'token')} in "
            f"{counted(about.documents, 'document')} of {counted(made.files, 'file')}{left})"
        )


class _Bar:
    """Tells a terminal what is being done and how far it is, when that is another hundredth."""

    def __init__(self) -> None:
        self._shown = ("", -1)

    def show(self, what: str, done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        if (what, percent) != self._shown:
            self._shown = (what, percent)
            print(f"\r{what} {percent:3d}% [{'#' * (percent // 5):20s}]", end="", file=sys.stderr, flush=True)
