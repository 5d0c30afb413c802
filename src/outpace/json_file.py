"""The one reader, and writer, of the small JSON files that lie beside a model's weights or are kept about it.

Neighbours: config.py and text/ read theirs through it. Nobody vouches for such a file, so its size is bounded first.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .types import ModelError

MAX_JSON_BYTES = 16 << 20  # such files have kilobytes; more is no configuration


def read_json(path: Path, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON file that holds one object. missing: what stands for a file that is not there; None: an error.

    Raises ModelError when it cannot be read, is too big, damaged or something else.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(min(os.fstat(file.fileno()).st_size, MAX_JSON_BYTES) + 1)
    except FileNotFoundError as error:
        if missing is not None:
            return missing
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_JSON_BYTES:
        raise ModelError(f"{path}: is larger than {MAX_JSON_BYTES >> 20} MiB, which no such file needs")
    try:
        data = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not valid JSON: not UTF-8 text at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(data).__name__}")
    return data


def write_json(path: Path, data: object) -> None:
    """Writes a file, or replaces it whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
