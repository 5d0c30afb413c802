"""Opening and writing weight files safely, for gguf.py and safetensors.py.

A file is mapped read-only, so that weights are never copied into memory as a whole, and written to a temporary
neighbour that replaces the target only when it is complete.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..types import ModelError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def refuse_pickle(path: Path) -> None:
    """Raises ModelError for a file of a pickle format, whatever it contains."""
    if path.suffix.lower() in PICKLES:
        raise ModelError(
            f"{path}: pickle files ({path.suffix}) are refused, because reading one runs code from the file; "
            "use the model's safetensors or GGUF files"
        )


def map_file(path: Path) -> NDArray[np.uint8]:
    """The file's bytes as a read-only uint8 view. Raises ModelError when it cannot be read or is empty."""
    refuse_pickle(path)
    try:
        if not os.path.isfile(path):
            raise ModelError(f"{path}: {'not a regular file' if os.path.exists(path) else 'no such file'}")
        if path.stat().st_size == 0:
            raise ModelError(f"{path}: the file is empty")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it takes the place of `path` when the block ends well and vanishes when it does not.

    Raises ModelError when the disk refuses (no space, no permission, no such folder).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
