"""Training in other processes: two that train together do what one does with both their batches; one that is
interrupted or killed leaves what the next one goes on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.heads.loading import load_head
from outpace.train import history, loop
from outpace.train.batches import Batch, batch_of, batches
from outpace.train.data import Example, Shards
from outpace.train.parallel import Workers
from outpace.train.plot import PLOT
from test_train_loop import CONFIG, RECIPE, TARGET, Clock, learnable

HERE = Path(__file__).parent
STEPS = 6
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}


def both(sequences: list[Example], positions: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Batches of two processes as one."""
    found = batches(sequences, positions, seed, start)
    for one, two in zip(found, found, strict=False):
        parts = [
            Example(b.tokens[i, : b.answers[i] + b.counts[i]], b.states[i, : b.answers[i] + b.counts[i]], b.answers[i])
            for b in (one, two)
            for i in range(len(b.counts))
        ]
        yield batch_of(parts)


def test_sums_are_over_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process is one that has the same numbers, without the start of two."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda numbers: numbers.mul_(2))
    first, second = Workers(0, 2, 2), Workers(1, 2, 2)
    assert (first.total([1.5, 2.0]), first.told(3.0), second.told(3.0)) == ([3.0, 4.0], 6.0, 0.0)
    one, two = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4,)))
    one.grad = torch.arange(6.0).view(2, 3)  # the other one had nothing to learn from
    first.add_gradients(iter([one, two]))
    assert one.grad.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert two.grad is not None
    assert two.grad.tolist() == [0.0] * 4


@pytest.mark.slow  # three processes that import torch
def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    learnable(tmp_path / "data")
    out = tmp_path / "two"
    out.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(HERE / "train_workers.py"), str(tmp_path / "data"), str(out), str(STEPS)]
    done = subprocess.run([*torchrun, *script], env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert ranks[0]["step"] == ranks[1]["step"] >= STEPS

    torch.set_num_threads(1)
    monkeypatch.setattr(loop, "time", Clock())
    monkeypatch.setattr(loop, "fastest", lambda: torch.float32)
    monkeypatch.setattr(loop, "batches", both)
    alone = loop.Trainer(TARGET, Shards(tmp_path / "data", "me"), tmp_path / "one", name="tiny", recipe=RECIPE)
    begin = {name: tensor.clone() for name, tensor in alone.head.state_dict().items()}
    alone.run(2 * STEPS + 2)
    assert alone.status.step == ranks[0]["step"]
    for name, tensor in alone.head.state_dict().items():
        assert torch.equal(ranks[0]["head"][name], ranks[1]["head"][name])
        torch.testing.assert_close(ranks[0]["head"][name], tensor, rtol=1e-3, atol=1e-5)
        assert not torch.allclose(begin[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow  # in one process test_train_loop.py has the same
def test_an_interrupt_and_a_kill_leave_a_head_and_a_run_to_go_on_with(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    shards = learnable(data)
    before = 0
    for end, more in ((signal.SIGINT, []), (signal.SIGKILL, ["--resume"])):
        command = [sys.executable, str(HERE / "train_workers.py"), str(data), str(out), "forever", *more]
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while len(steps_of(out)) < before + 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(end)
        _, said = process.communicate(timeout=60)
        assert process.returncode != 0
        assert ("KeyboardInterrupt" in said) == (end == signal.SIGINT), said
        load_head(out, CONFIG)
        again = loop.Trainer(TARGET, shards, out, name="tiny", recipe=RECIPE, resume=True)
        assert again.status.step >= before + 3
        steps = [line["step"] for line in again.history]
        assert steps == sorted(set(steps))
        assert again.status.step - 1 <= steps[-1] <= again.status.step  # killed between checkpoint and history
        before = again.status.step
    assert (out / PLOT).read_text().startswith("<svg")


def steps_of(out: Path) -> list[int]:
    return [line["step"] for line in history.read(out)]


def test_alone_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone: Any = Workers.join()
    assert alone == Workers(0, 1, 1)
    assert (alone.total([1.5]), alone.told(2.5), alone.most(3), alone.first) == ([1.5], 2.5, 3, True)
