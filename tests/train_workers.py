"""Run by torchrun from test_train_parallel.py: trains a few steps on a tiny target as one of several processes.

torchrun ... train_workers.py DATA OUT STEPS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from outpace.train import loop
from outpace.train.data import Shards
from outpace.train.parallel import Workers
from test_train_loop import RECIPE, TARGET, Clock


def main() -> None:
    folder, out, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    clock = Clock()  # each process has one of its own, but what the first one says holds
    loop.time, loop.fastest = clock, lambda: torch.float32  # type: ignore[assignment]
    workers = Workers.join()
    if not workers.first:
        clock.now = 1e6
    trainer = loop.Trainer(TARGET, Shards(folder, "me"), out, name="tiny", recipe=RECIPE, workers=workers)
    trainer.run(2 * steps + 2)
    torch.save({"head": trainer.head.state_dict(), "step": trainer.status.step}, out / f"rank{workers.rank}.pt")
    workers.leave()


if __name__ == "__main__":
    main()
