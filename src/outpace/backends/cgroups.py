"""The control groups that this process lives in: where the system keeps limits narrower than the machine's.

Neighbours: memory.py reads what they leave of the memory, cores.py what they grant of the processors.
Source: the kernel's documentation of cgroup v2 (admin-guide/cgroup-v2) and v1 (admin-guide/cgroup-v1).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OF = Path("/proc/self/cgroup")


def control_groups(controller: str, root: Path = ROOT, of: Path = OF) -> Iterator[tuple[Path, int]]:
    """Folders of the process's groups under this controller ("cpu", "memory") and of the groups around them, each with
    its version of the interface, 1 or 2. Every one of them limits the process. Nothing where there are no groups.

    of: the process's list of groups, lines `id:controllers:path`; version 2 names no controllers.
    """
    try:
        lines = of.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        group = base / path.strip("/")
        # Inside a container the path may be the host's: then the limits lie at the root.
        for folder in sorted({base, group, *(parent for parent in group.parents if parent.is_relative_to(base))}):
            yield folder, 1 if controllers else 2
