"""What a pass costs, beside what the machine could do at best. `outpace bench kernels` prints it (cli/bench.py).

On a machine that others use too, a figure is only good beside another one taken at the same time: row counts, contexts
and prompt lengths are measured in turns, round after round, and a figure is the median over the rounds.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .. import _native
from ..backends.base import Rows
from ..backends.native import NativeBackend
from ..types import UsageError

ROWS = range(1, 17)
PROMPTS = (64, 512)
CONTEXTS = (0, 1024, 4096)
SPLIT_ROWS = (1, 8)
VERIFIED = 8  # rows of a pass that verifies, where contexts are compared
CONTEXT_OF_ROWS = 32  # committed tokens when row counts are compared: attention is small, as in the roofline
BIG_BUFFER = 1 << 30  # bytes; more than the last cache of nearly all processors
SMALL_BUFFER = 1 << 20

K = TypeVar("K", bound=Hashable)


def measure_kernels(
    target: NativeBackend,
    *,
    contexts: Sequence[int] = CONTEXTS,
    seconds: float = 12.0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measures a model that nobody else uses meanwhile. It needs a free slot more than there are contexts,
    passes of 16 rows or more and room for the contexts. seconds: for comparing row counts; the rest takes about
    twice that. Contexts are filled with random keys and values, which attention takes as long for as for a text's.

    Returns what can be written as JSON:

    machine           processor, kernel family (isa), threads
    bandwidth         what these threads read from plain buffers, in turns with the passes: "big" is 1 GiB, "same_size"
                      as large as the weights that a pass reads (at most 1 GiB), which may lie in the last cache;
                      {"bytes", "bytes_per_s" (median), "best_bytes_per_s"} each
    int8_peak         8-bit operations a second of the dot-product instruction; None where that is not measured
    weights           bytes in memory, and bytes that a pass of one row reads (pass)
    pass_ms           row count -> median milliseconds of the whole forward, logits of every row included
    pass_min_ms, pass_ratio, rounds   the fastest; the median over one row's median; how many of each were taken
    share             bytes that a pass of one row reads / its time / bandwidth: of medians {"of_big", "of_same_size"}
                      and of the fastest {"of_big_best", "of_same_size_best"}
    int8_share        of the peak, at 16 rows: operations of the matrices / median time / peak; None for experts
    stages_ms         row count -> stage -> mean milliseconds of a pass: projections (norm, q, k, v, o, rotation),
                      attention (over the cache), mlp, head, rest
    layers            how many layers the stages sum over
    kv_cache          how the cache is held
    decode            context -> tokens a second of plain decoding, one row a pass, no sampling
    verify            context -> median milliseconds of a pass of 8 rows over that of one row
    prefill           tokens -> tokens a second of a prompt read in one pass
    left_out          why a figure is missing, one line each

    Raises UsageError when the model's capacity is too small.
    """
    capacity = target.capacity
    if capacity.rows < max(ROWS):
        raise UsageError(f"needs passes of {max(ROWS)} rows, this model was opened for {capacity.rows}")
    if any(context < 0 for context in contexts):
        raise UsageError("a context cannot be negative")
    found: dict[str, Any] = {
        "machine": {"processor": processor(), "isa": target.isa, "threads": target.threads},
        "left_out": [],
    }
    progress("passes of 1 to 16 rows, and the machine's limits")
    found |= _rows(target, seconds)
    most = max(ROWS)
    operations, peak = _operations(target, most), found["int8_peak"]
    found["int8_share"] = operations / (found["pass_ms"][most] / 1e3) / peak if operations and peak else None
    progress("where the time goes")
    found["layers"] = target.config.num_hidden_layers
    found["stages_ms"] = {rows: _stages(target, rows, seconds / 8) for rows in SPLIT_ROWS}
    progress("prompts")
    fit = [n for n in PROMPTS if n <= min(capacity.rows, capacity.positions)]
    found["prefill"] = _prefill(target, fit, seconds / 2)
    progress("long contexts")
    found["kv_cache"] = target.kv_cache
    found |= _contexts(target, contexts, seconds / 2, found["left_out"])
    return found


def in_turns(
    jobs: Iterable[tuple[K, Callable[[], object]]],
    seconds: float,
    *,
    least: int = 5,
    most: int = 200,
    settle: float = 0.0,
) -> dict[K, list[float]]:
    """Runs every job once a round, in an order that changes, until the time is over; returns each job's seconds.

    The first round warms up and is not counted. settle: seconds to wait before each job, which then runs once more
    uncounted: for jobs of libraries that disturb whoever comes next.
    """
    order = list(jobs)
    times: dict[K, list[float]] = {key: [] for key, _ in order}
    rng = random.Random(0)
    rounds, end = 0, 0.0
    while rounds <= least or (rounds <= most and time.perf_counter() < end):
        rng.shuffle(order)
        for key, job in order:
            if settle:
                time.sleep(settle)
                job()
            start = time.perf_counter()
            job()
            if rounds:
                times[key].append(time.perf_counter() - start)
        if not rounds:
            end = time.perf_counter() + seconds
        rounds += 1
    return times


def tokens(target: NativeBackend, count: int) -> list[int]:
    """Random tokens, always the same."""
    rng = random.Random(count)
    return [rng.randrange(target.config.vocab_size) for _ in range(count)]


def read_prompt(target: NativeBackend, slot: int, prompt: Sequence[int]) -> None:
    """Appends a prompt to a slot, in passes as large as they may be."""
    step = target.capacity.rows
    for at in range(0, len(prompt), step):
        part = prompt[at : at + step]
        target.forward([Rows(slot, part, logits=[])])
        target.commit(slot, range(len(part)))


def _rows(target: NativeBackend, seconds: float) -> dict[str, Any]:
    """Passes of 1 to 16 rows in turns with the reading of plain buffers, so that all had the same machine."""
    read, threads = target.pass_bytes, target.threads
    readers = {
        "big": _native.Reader(BIG_BUFFER, threads),
        "same_size": _native.Reader(min(max(read, SMALL_BUFFER), BIG_BUFFER), threads),
    }
    slot = target.new_slot()
    read_prompt(target, slot, tokens(target, CONTEXT_OF_ROWS))
    row_tokens = tokens(target, max(ROWS))
    # Rows that are never committed leave the slot as it was.
    jobs: list[tuple[int | str, Callable[[], object]]] = [
        (n, partial(target.forward, [Rows(slot, row_tokens[:n])])) for n in ROWS
    ]
    jobs += [(name, reader.read) for name, reader in readers.items()]
    times = in_turns(jobs, seconds)
    target.free_slot(slot)
    median = {n: statistics.median(times[n]) for n in ROWS}
    bandwidth = {
        name: {
            "bytes": reader.bytes,
            "bytes_per_s": reader.bytes / statistics.median(times[name]),
            "best_bytes_per_s": reader.bytes / min(times[name]),
        }
        for name, reader in readers.items()
    }
    return {
        "bandwidth": bandwidth,
        "int8_peak": _native.int8_peak(threads, 0.5) or None,
        "weights": {"bytes": target.memory[0], "pass": read},
        "share": {
            **{f"of_{name}": read / median[1] / entry["bytes_per_s"] for name, entry in bandwidth.items()},
            **{
                f"of_{name}_best": read / min(times[1]) / entry["best_bytes_per_s"] for name, entry in bandwidth.items()
            },
        },
        "rounds": len(times[1]),
        "pass_ms": {n: 1e3 * median[n] for n in ROWS},
        "pass_min_ms": {n: 1e3 * min(times[n]) for n in ROWS},
        "pass_ratio": {n: median[n] / median[1] for n in ROWS},
    }


def _stages(target: NativeBackend, rows: int, seconds: float) -> dict[str, float]:
    slot = target.new_slot()
    read_prompt(target, slot, tokens(target, CONTEXT_OF_ROWS))
    batch = [Rows(slot, tokens(target, rows))]
    target.forward(batch)
    target.time_stages(True)
    passes, end = 0, time.perf_counter() + seconds
    while passes < 3 or time.perf_counter() < end:
        target.forward(batch)
        passes += 1
    stages = target.time_stages(False)
    target.free_slot(slot)
    return {stage: 1e3 * total / passes for stage, total in stages.items()}


def _prefill(target: NativeBackend, counts: Sequence[int], seconds: float) -> dict[int, float]:
    slot = target.new_slot()
    times = in_turns(
        ((n, partial(target.forward, [Rows(slot, tokens(target, n), logits=[n - 1])])) for n in counts),
        seconds,
        least=3,
    )
    target.free_slot(slot)
    return {n: n / statistics.median(times[n]) for n in counts}


def _contexts(
    target: NativeBackend, contexts: Sequence[int], seconds: float, left_out: list[str]
) -> dict[str, dict[int, float]]:
    most = target.capacity.positions - VERIFIED
    fit = [context for context in sorted(set(contexts)) if context <= most]
    left_out += [f"context {n}: the model was opened for {most + VERIFIED}" for n in sorted(set(contexts) - set(fit))]
    # The longest is filled once; the others are its beginnings, and all are measured in turns.
    longest = target.new_slot()
    target.fill_slot(longest, max(fit, default=0))
    slots = {context: target.fork_slot(longest) for context in fit}
    for context, slot in slots.items():
        target.truncate(slot, context)
    times = in_turns(
        (
            ((context, rows), partial(target.forward, [Rows(slot, tokens(target, rows))]))
            for context, slot in slots.items()
            for rows in (1, VERIFIED)
        ),
        seconds,
    )
    for slot in (longest, *slots.values()):
        target.free_slot(slot)
    median = {key: statistics.median(of) for key, of in times.items()}
    return {
        "decode": {context: 1 / median[context, 1] for context in fit},
        "verify": {context: median[context, VERIFIED] / median[context, 1] for context in fit},
    }


def _operations(target: NativeBackend, rows: int) -> float | None:
    """Multiplications and additions (each counted) of a pass's matrices; None for a model with experts."""
    config = target.config
    if config.num_experts:
        return None
    layer = config.hidden_size * (2 * config.q_proj_dim() + 2 * config.kv_proj_dim() + 3 * config.intermediate_size)
    return 2.0 * rows * (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size)


def processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
