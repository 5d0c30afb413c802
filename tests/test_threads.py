"""Threads: how many there are by default, what --threads takes, and that they neither burn nor hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tiny
import tiny_folder
from outpace.backends.base import Rows
from outpace.backends.cores import usable_cores
from outpace.backends.native import NativeBackend
from outpace.cli.app import build
from outpace.weights.weight_map import WeightMap

# ------------------------------------------------------------------------------------------------------- by default


def machine(
    root: Path,
    siblings: str = "",
    *,
    capacity: dict[int, int] | None = None,
    performance: str = "",
    groups: str = "",
    files: dict[str, str] | None = None,
) -> Path:
    """A made-up tree of /sys and /proc. siblings: the cores' hardware threads, such as "0,4 1,5" or "0-1 2-3"."""

    def write(path: str, text: str) -> None:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    for core in siblings.split():
        first, _, last = core.partition("-")
        for cpu in range(int(first), int(last) + 1) if last else map(int, core.split(",")):
            write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", core)
    for cpu, value in (capacity or {}).items():
        write(f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(value))
    if performance:
        write("sys/devices/cpu_core/cpus", performance)
    if groups:
        write("proc/self/cgroup", groups)
    for path, text in (files or {}).items():
        write(f"sys/fs/cgroup/{path}", text)
    return root


def test_a_system_that_tells_nothing_has_its_processors(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, range(6)) == 6
    assert usable_cores(tmp_path, []) == 1
    assert usable_cores(tmp_path, range(1000)) == 256


@pytest.mark.parametrize(
    ("siblings", "allowed", "threads"),
    [
        ("0 1 2 3", range(4), 4),
        ("0-1 2-3 4-5 6-7", range(8), 4),
        ("0,4 1,5 2,6 3,7", range(8), 4),
        ("0,4 1,5 2,6 3,7", [0, 1, 4], 2),  # bound to two cores by taskset
        ("0,4 1,5 2,6 3,7", [1, 5], 2),  # one core: both its threads
        ("0,4 1,5 2,6 3,7", [5], 1),
        ("0-3", range(4), 2),  # one core with four threads
    ],
)
def test_a_thread_for_each_core(tmp_path: Path, siblings: str, allowed: list[int], threads: int) -> None:
    assert usable_cores(machine(tmp_path, siblings), allowed) == threads


def test_efficiency_cores_are_left_to_others(tmp_path: Path) -> None:
    intel = machine(tmp_path / "intel", "0-1 2-3 4 5 6 7", performance="0-3")
    assert usable_cores(intel, range(8)) == 2
    assert usable_cores(intel, range(2, 8)) == 2  # one performance core: both its threads
    assert usable_cores(intel, [4, 5, 6]) == 3  # nothing but efficiency cores
    sizes = {0: 250, 1: 250, 2: 250, 3: 250, 4: 780, 5: 780, 6: 780, 7: 1024}
    arm = machine(tmp_path / "arm", "0 1 2 3 4 5 6 7", capacity=sizes)
    assert usable_cores(arm, range(8)) == 4
    assert usable_cores(arm, range(4)) == 4
    assert usable_cores(machine(tmp_path / "equal", capacity=dict.fromkeys(range(4), 1024)), range(4)) == 4


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("9000000 100000", 8),
     ("", 8), ("x y", 8), ("200000 0", 8), ("200000", 8)],
)  # fmt: skip
def test_a_quota_of_version_2_cuts_it(tmp_path: Path, quota: str, threads: int) -> None:
    found = [
        usable_cores(machine(tmp_path / str(i), groups=groups, files={file: quota}), range(8))
        for i, (groups, file) in enumerate(
            [
                ("0::/", "cpu.max"),
                ("0::/user.slice/a.scope", "user.slice/a.scope/cpu.max"),
                ("0::/user.slice/a.scope", "user.slice/cpu.max"),  # the slice around it
                ("0::/a/host/s/path", "cpu.max"),  # inside a container
            ]
        )
    ]
    assert found == [threads] * 4
    other = machine(tmp_path / "other", groups="0::/user.slice", files={"system.slice/cpu.max": quota})
    assert usable_cores(other, range(8)) == 8


def test_the_narrowest_quota_counts(tmp_path: Path) -> None:
    files = {"a/cpu.max": "400000 100000", "a/b/cpu.max": "300000 100000", "a/b/c/cpu.max": "max 100000"}
    assert usable_cores(machine(tmp_path, groups="0::/a/b/c", files=files), range(8)) == 3


@pytest.mark.parametrize(("quota", "threads"), [("-1", 8), ("300000", 3), ("250000", 3), ("0", 8), ("", 8)])
def test_a_quota_of_version_1_cuts_it(tmp_path: Path, quota: str, threads: int) -> None:
    groups = "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/"
    for folder in ("cpu", "cpu/docker/x"):
        files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
        assert usable_cores(machine(tmp_path / folder, groups=groups, files=files), range(8)) == threads
    files = {"cpu/docker/y/cpu.cfs_quota_us": "1000", "cpu/docker/y/cpu.cfs_period_us": "100000"}
    assert usable_cores(machine(tmp_path / "other", groups=groups, files=files), range(8)) == 8


def test_damaged_files_count_as_missing(tmp_path: Path) -> None:
    for i, text in enumerate(("-", "0-", "a", "0-99999999999", "\0", "1-0", "")):
        root = machine(tmp_path / str(i), performance=text)
        folder = root / "sys/devices/system/cpu/cpu0"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology/thread_siblings_list").write_text(text)
        (folder / "cpu_capacity").write_bytes(b"\xff")
        assert usable_cores(root, range(4)) == 4


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_the_affinity_of_the_process_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= usable_cores() <= len(before)


# --------------------------------------------------------------------------------------------------------- asked for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("threads", "message"),
    [
        ("0", "outpace: threads must be a whole number in 1 .. 256, got 0\n"),
        ("-1", "outpace: threads must be a whole number in 1 .. 256, got -1\n"),
        ("1000", "outpace: threads must be a whole number in 1 .. 256, got 1000\n"),
        ("abc", "--threads"),
        ("1.5", "--threads"),
        ("", "--threads"),
    ],
)
def test_threads_out_of_range_are_one_line(folder: Path, threads: str, message: str) -> None:
    args = ["generate", "--model", str(folder), "--no-cache", f"--threads={threads}", "hi"]
    result = CliRunner().invoke(build(), args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_any_number_of_threads_gives_the_same_answer(folder: Path) -> None:
    answers = set()
    for threads in ("1", "2", "256", None):
        args = f"generate --model {folder} --no-cache --quiet --max-tokens 8 --ignore-eos --temperature 0 hi".split()
        result = CliRunner().invoke(build(), [*args, *(["--threads", threads] if threads else [])])
        assert (result.exit_code, result.stderr) == (0, "")
        answers.add(result.stdout)
    assert len(answers) == 1


# ------------------------------------------------------------------------------------------------- idle, and in company


def backend(threads: int) -> NativeBackend:
    config, arrays = tiny.random_model()
    return NativeBackend(config, WeightMap.from_tensors(arrays), threads=threads)


def decode(model: NativeBackend, steps: int) -> list[int]:
    """Greedy tokens, one pass each."""
    slot, tokens = model.new_slot(), [1]
    for _ in range(steps):
        logits = model.forward([Rows(slot, tokens[-1:])]).logits
        model.commit(slot, [0])
        tokens.append(int(np.argmax(logits[-1])))
    model.free_slot(slot)
    return tokens


def test_an_idle_model_uses_no_processor() -> None:
    model = backend(threads=4)
    decode(model, 3)
    time.sleep(0.1)  # a worker spins a little before it parks
    wall, used = time.perf_counter(), time.process_time()
    time.sleep(1.0)
    wall, used = time.perf_counter() - wall, time.process_time() - used
    # One spinning worker would use a whole core's time, or what other processes leave of it.
    assert used < 0.02 * wall
    decode(model, 3)


@pytest.fixture
def busy() -> Iterator[None]:
    """Another process for each core, never waiting for anything."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.timeout(120)
def test_company_changes_nothing(busy: None) -> None:
    alone = decode(backend(threads=1), 40)
    for threads in (2, 3, 8):
        assert decode(backend(threads), 40) == alone
