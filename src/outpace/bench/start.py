"""How long a start takes: new processes, from their beginning to the first token. `outpace bench start` prints it.

Neighbours: cli/bench.py; what is measured is the command line itself, as anybody runs it. Wall time suffers from other
work on the machine, processor time less; runs of all modes are taken in turns, so that they share the same minutes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..types import OutpaceError, UsageError
from .kernels import processor

LIBRARIES = "numpy, tokenizers, jinja2, typer"  # what a start imports of others


def measure_start(model: str, *, runs: int = 15, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Starts `outpace generate` for one token again and again, `runs` times each mode, after a run that does not count
    (it lays out the weights, and writes Python's bytecode).

    Returns what can be written as JSON:

    processor   the machine's
    load        its load average over the last minute, before and after
    modes       mode -> {"first_token_s", "whole_s", "processor_s"}, each {"median", "least", "samples"}: wall time to
                the first byte of the answer, of the whole process, and processor time (user and system, all threads).
                Modes: "second start" (weights mapped from the disk cache), "without the cache", and "libraries": a
                process that only imports what other projects a start needs

    Raises UsageError where the system does not tell a process's times, OutpaceError when a start fails.
    """
    if not hasattr(os, "wait4"):
        raise UsageError("outpace bench start needs a system that tells the times of a process (Linux, macOS)")
    generate = ["-m", "outpace", "generate", "--model", model, "--max-tokens", "1", "--quiet", "--offline", "hi"]
    modes = {
        "second start": generate,
        "without the cache": [*generate, "--no-cache"],
        "libraries": ["-c", f"import {LIBRARIES}; print(1)"],
    }
    samples: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in modes}
    load = [_load()]
    for run in range(runs + 1):
        progress(f"run {run} of {runs}")
        for mode, arguments in modes.items():
            found = _times(arguments)
            if run:
                samples[mode].append(found)
    load.append(_load())
    names = ("first_token_s", "whole_s", "processor_s")
    return {
        "processor": processor(),
        "load": load,
        "modes": {
            mode: {name: _summary(values) for name, values in zip(names, zip(*each, strict=True), strict=True)}
            for mode, each in samples.items()
        },
    }


def _times(arguments: Sequence[str]) -> tuple[float, float, float]:
    """Wall seconds to the first byte on stdout and to the end, and processor seconds, of one Python process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - begin
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        whole = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise OutpaceError(f"a start failed with exit code {process.returncode}: see above")
    return first, whole, usage.ru_utime + usage.ru_stime


def _summary(samples: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(samples),
        "least": min(samples),
        "samples": [round(seconds, 4) for seconds in samples],
    }


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
