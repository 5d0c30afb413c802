"""Several processes that train one head, each on its part of the data: torchrun starts, torch.distributed joins them.

Neighbours: loop.py asks for sums, run.py lets process 0 do what only one may do. Alone, everything here is for nothing
and costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from .torch_or_say import torch

# Others wait while process 0 makes data. When a process dies, torchrun ends the others.
PATIENCE = timedelta(days=31)


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes of a run. rank: which one this is, 0 .. size - 1; 0 writes the files and keeps the time. here: how
    many run on this machine."""

    rank: int = 0
    size: int = 1
    here: int = 1

    @classmethod
    def join(cls) -> Workers:
        """Those that torchrun started, or this one alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", timeout=PATIENCE)
        return cls(torch.distributed.get_rank(), size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    @property
    def first(self) -> bool:
        """Whether this one writes."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(numbers)
        found: list[float] = numbers.tolist()
        return found

    def told(self, value: float) -> float:
        """What process 0 says."""
        return self.total([value if self.first else 0.0])[0]

    def most(self, value: int) -> int:
        """The largest of all processes' values."""
        if self.size == 1:
            return value
        number = torch.tensor(value)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        return int(number)

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Every gradient becomes the sum over all processes: in one message."""
        if self.size == 1:
            return
        parameters = list(parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        joined = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(joined)
        at = 0
        for parameter in parameters:
            parameter.grad = joined[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def wait(self) -> None:
        """Until all are here."""
        self.total([0.0])

    def leave(self) -> None:
        """Ends the group."""
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
