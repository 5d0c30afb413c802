"""How many threads a model gets when nobody says: one for each core that does a full share of the work.

A pass is hundreds of short stages, and the slowest thread decides when a stage ends. So of the processors that the
process may use (its affinity):

- Efficiency cores are left out where there are others. Linux tells them apart by cpu_capacity (ARM) or by the list of
  Intel's performance cores. Frequencies are not asked: equal cores may have different ones.
- Two hardware threads of one core count once: they share its arithmetic, and a few cores draw all that the memory
  gives. One core alone gets both its threads, because a single thread does not draw even that.
- A control group's quota (cgroup v2 or v1, of the process's own group or one around it) cuts the number.

Where the system tells none of this (macOS, Windows) it is the number of processors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from .cgroups import control_groups

MOST = 256  # threads of a pool
FULL = 0.5  # share of the best core's capacity from which a core counts as a performance core


def usable_cores(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> int:
    """Threads to use by default, 1 to 256. root: where /sys and /proc are. allowed: processors, by default the
    process's affinity."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    strong = _performance(root, set(allowed))
    cores = len({_siblings(root, cpu) for cpu in strong})
    threads = min(2, len(strong)) if cores == 1 else cores
    quota = _quota(root)
    return max(1, min(threads, MOST, threads if quota is None else math.ceil(quota)))


def _performance(root: Path, cpus: set[int]) -> set[int]:
    """These processors without the efficiency cores among them."""
    listed = _listed(root / "sys/devices/cpu_core/cpus") & cpus
    if listed:
        return listed
    capacity = {cpu: _number(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity") for cpu in cpus}
    best = max(capacity.values(), default=0)
    return {cpu for cpu in cpus if capacity[cpu] >= FULL * best}


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """The hardware threads of a processor's core; itself alone where the system does not say."""
    found = _listed(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return frozenset(found if cpu in found else {cpu})


def _quota(root: Path) -> float | None:
    """Processors that the control groups grant, None for no limit."""
    granted = []
    for folder, version in control_groups("cpu", root / "sys/fs/cgroup", root / "proc/self/cgroup"):
        try:
            if version == 2:
                limit, period = (folder / "cpu.max").read_text().split()
            else:
                limit, period = ((folder / f"cpu.cfs_{part}_us").read_text() for part in ("quota", "period"))
            if int(limit) > 0:  # -1: no limit
                granted.append(int(limit) / int(period))
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            continue
    return min(granted, default=None)


def _listed(file: Path) -> set[int]:
    """Processors of a list such as 0-3,8; empty where it cannot be read."""
    found: set[int] = set()
    try:
        for part in file.read_text().split(","):
            first, dash, last = part.strip().partition("-")
            found.update(range(int(first), min(int(last if dash else first), 1 << 16) + 1))
    except (OSError, ValueError):
        return set()
    return found


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0
