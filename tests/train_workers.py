"""Training on a tiny target in a process of its own: `DATA OUT STEPS` as one of several that torchrun started;
`DATA OUT forever [--resume]` until it is killed, saving at each step. Run by test_train_parallel.py.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outpace.train import loop
from outpace.train.data import Shards
from outpace.train.parallel import Workers
from test_train_loop import RECIPE, TARGET, Clock


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    if sys.argv[3] == "forever":
        options: dict[str, Any] = {"recipe": replace(RECIPE, save=0.0), "resume": "--resume" in sys.argv}
        loop.Trainer(TARGET, Shards(folder, "me"), out, name="tiny", **options).run(600)
        return
    steps = int(sys.argv[3])
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
