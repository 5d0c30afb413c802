"""What makes the command line start, and end, quickly.

Neighbours: the package calls `prepare` before anything else, app.py the rest. Measured on the way to the first token:
newer typers check values with pydantic, whose import takes as long as NumPy's; OpenBLAS starts threads that the native
core never uses; Python's garbage collector looks through all modules dozens of times while they are imported, and
through a vocabulary's hundred thousand strings while they are read; at the end each of them is let go singly.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any


def prepare() -> None:
    """Settings for a process that runs one command; before anything else is imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # whoever wants NumPy's products faster says so
    gc.set_threshold(200_000)


def leave(end: SystemExit) -> None:
    """Ends the process at once, when all output is out; returns where the long way must be taken, errors told."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    if end.code is None or isinstance(end.code, int):
        os._exit((end.code or 0) & 0xFF)


class PlainValues:
    """A typer parameter's reader that takes what is plainly right and leaves the rest, errors above all, to typer's."""

    def __init__(self, param: Any) -> None:
        self.param = param
        self.thorough = param.get_runtime_param

    @classmethod
    def install(cls, param: Any) -> None:
        """Puts itself before the parameter's own reader, where this typer has one."""
        if hasattr(param, "get_runtime_param") and hasattr(param, "type_descriptor"):
            reader = cls(param)
            param.get_runtime_param = lambda: reader

    def coerce(self, value: Any, **more: Any) -> Any:
        """The value of the parameter's type for what was written, None for nothing."""
        wanted = self.param.type_descriptor.annotation
        many = self.param.multiple or self.param.nargs == -1
        if value is None and not many:
            return None
        if wanted is str and isinstance(value, str):
            return value
        if wanted is int and isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit():
            return int(value)
        if many and not value:
            return ()
        return self.thorough().coerce(value, **more)
