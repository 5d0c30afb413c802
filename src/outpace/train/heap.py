"""Gives memory back that a run no longer needs, so that it stays as small as its batches.

Two things grow with every step: batches of ever new shapes leave gaps in the C library's heap, which it keeps for
itself, and pages of the memory-mapped data that were read once count as this process's. Neighbours: loop.py calls it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from typing import Any

from numpy.typing import NDArray


def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # not glibc: musl, macOS and Windows give back by themselves
        return None
    return found


_malloc_trim = _trim()


def give_back(mapped: Iterable[NDArray[Any]] = ()) -> None:
    """Returns the heap's free pages to the system, and those of arrays that np.load has mapped for reading: what of
    these is read again comes from the system's cache of the file, if it still has room for it."""
    if _malloc_trim is not None:
        _malloc_trim(0)
    if hasattr(mmap, "MADV_DONTNEED"):
        for array in mapped:
            array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
