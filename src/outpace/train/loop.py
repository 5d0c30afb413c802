"""The training loop: batches, loss, optimiser, checkpoints; by the clock, so that it ends when it was asked to.

Neighbours: data.py and batches.py give the data, eagle3.py the head, losses.py what a guess costs, export.py the files.
Cheap steps first: a head that cannot guess the first token learns nothing from guessing the fifth. What a run needs to
go on lies in checkpoint.pt; the head of that moment lies beside it, ready for use, also after a kill.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..heads.config import HeadConfig
from ..heads.export import export_head
from ..types import I64, ModelError, NumericalError, UsageError
from ..weights.files import replacing
from .batches import Batch, batches
from .data import Shards
from .eagle3 import EagleHead, rms
from .evaluate import score
from .losses import Labels, soft_cross_entropy
from .target import Target, draft_vocabulary, eagle_config, first_weights
from .torch_or_say import torch

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. The defaults are those that did best in docs/LOG.md.

    vocabulary: tokens that the head can guess. positions: anchors of a batch. stages: (part of the time from which on,
    steps of the training-time test). step_weight: how much less each further step counts. rate: the highest learning
    rate, after `warmup` of the time; it ends at `last` of it. checked: every
    how many sequences one is held back to watch the progress. save: seconds between checkpoints.
    """

    vocabulary: int = 8192
    positions: int = 1024
    stages: tuple[tuple[float, int], ...] = ((0.0, 1), (0.4, 3), (0.8, 5))
    step_weight: float = 0.8
    rate: float = 5e-4
    warmup: float = 0.02
    last: float = 0.05
    checked: int = 50
    save: float = 60.0

    def steps(self, part: float) -> int:
        """Steps of the training-time test when this part of the time is over."""
        return [count for begin, count in self.stages if begin <= part][-1]

    def factor(self, part: float) -> float:
        """What the learning rate is multiplied with."""
        if part < self.warmup:
            return max(part / self.warmup, 0.01)
        rest = (part - self.warmup) / (1 - self.warmup)
        return self.last + (1 - self.last) * 0.5 * (1 + math.cos(math.pi * min(rest, 1.0)))


@dataclass(slots=True)
class Status:
    """Where a run stands; kept in its checkpoint. loss, agree: of the newest batch, agree[j] for step j."""

    step: int = 0
    epoch: int = 0
    positions: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    agree: list[float] = field(default_factory=list)


Progress = Callable[[Status], None]


class Trainer:
    """One run. target: what is drafted for; name: what it is called. out: the folder of head and checkpoint.

    resume: go on from the checkpoint there. Raises UsageError for a folder that is taken, or a checkpoint that is
    missing or of other data.
    """

    def __init__(
        self, target: Target, data: Shards, out: Path, *, name: str, seed: int = 0, recipe: Recipe, resume: bool = False
    ) -> None:
        self.target, self.out, self.name, self.recipe, self.seed = target, out, name, recipe, seed
        usable = [sequence for sequence in data.sequences if sequence.answer > 0]
        self.checked = usable[:: recipe.checked][:64]
        self.sequences = [sequence for i, sequence in enumerate(usable) if i % recipe.checked]
        if not self.sequences:
            raise UsageError("there is too little training data: make more")
        config = target.config
        if data.taps[-1] != config.num_hidden_layers - 1:
            raise UsageError("the data's last tap must be the last layer's output, which gives the labels")
        counts = data.counts(config.vocab_size)
        self.d2t: I64 = draft_vocabulary(counts, min(recipe.vocabulary, config.vocab_size), config.eos_token_ids)
        self.config: HeadConfig = eagle_config(config, data.taps, len(self.d2t))
        self.status = Status()
        saved = self._saved(resume)
        if saved is not None:
            self.d2t = saved["d2t"].numpy()
            self.status = Status(**saved["status"])
        self.dtype = fastest()
        self.head = EagleHead(self.config, first_weights(self.config, target, seed), target.embedding)
        rows = target.lm_head[self.d2t]
        # Without their mean, which moves all logits alike: what is left survives 16 bits better.
        self.lm_head = torch.tensor(rows - rows.mean(0)).to(self.dtype)
        self.norm = torch.tensor(target.norm)
        self.optimiser = torch.optim.AdamW(
            self.head.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )
        if saved is not None:
            self.head.load_state_dict(saved["head"])
            self.optimiser.load_state_dict(saved["optimiser"])

    @property
    def coverage(self) -> float:
        """The part of the held-back answers' tokens that the draft vocabulary has."""
        tokens = np.concatenate([sequence.tokens[sequence.answer :] for sequence in self.checked])
        return float(np.isin(tokens, self.d2t).mean())

    def run(self, seconds: float, progress: Progress | None = None) -> Status:
        """Trains until `seconds` have passed, those of earlier runs that this one goes on from included.

        Leaves head and checkpoint in the folder, also after Ctrl-C. Raises NumericalError when the loss is not finite:
        the last good checkpoint stays.
        """
        status, begin = self.status, time.monotonic() - self.status.seconds
        saved = status.seconds
        try:
            for batch in self._batches():
                status.seconds = time.monotonic() - begin
                if status.seconds >= seconds:
                    break
                self._step(batch, status.seconds / seconds)
                status.seconds = time.monotonic() - begin
                if progress is not None:
                    progress(status)
                if status.seconds - saved >= self.recipe.save:
                    self.save()
                    saved = status.seconds
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()
        return status

    def validate(self, drafts: int = 7) -> float:
        """Tokens per round on held-back sequences of the data, which flatter: they are of the same kind."""
        return score(self.head, self.lm_head.float(), self.d2t, self.checked, drafts).tokens_per_round

    def save(self) -> None:
        """Writes checkpoint and head: each all of it or nothing."""
        self.out.mkdir(parents=True, exist_ok=True)
        state = {
            "head": self.head.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "d2t": torch.from_numpy(self.d2t),
            "taps": list(self.config.taps),
            "status": {name: getattr(self.status, name) for name in Status.__slots__},
        }
        written = io.BytesIO()
        torch.save(state, written)
        with replacing(self.out / CHECKPOINT) as file:
            file.write(written.getbuffer())
        export_head(self.out, self.config, self.head.arrays(), self.d2t, self.name, force=True)

    def _saved(self, resume: bool) -> dict[str, Any] | None:
        file = self.out / CHECKPOINT
        if not resume:
            if file.exists():
                raise UsageError(f"{self.out}: holds a training run: go on with --resume, or name another folder")
            return None
        if not file.exists():
            raise UsageError(f"{self.out}: no checkpoint to go on from")
        try:
            saved: dict[str, Any] = torch.load(file, weights_only=True)
        except Exception as error:  # whatever torch makes of a damaged file
            raise ModelError(f"{file}: cannot be read: {str(error)[:100]}") from None
        if saved["taps"] != list(self.config.taps):
            raise UsageError(f"{self.out}: the checkpoint was trained with taps {saved['taps']}, the data have others")
        return saved

    def _batches(self) -> Iterator[Batch]:
        while True:
            yield from batches(self.sequences, self.recipe.positions, self.seed * 1000 + self.status.epoch)
            self.status.epoch += 1

    def _step(self, batch: Batch, part: float) -> None:
        count = min(self.recipe.steps(part), int(batch.counts.max()))
        places, labels = self.labels(batch)
        total = torch.zeros(())
        weights, agree = 0.0, []
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            for j, final in enumerate(self.head.steps(batch, count)):
                # Anchor a of step j guesses what label a + j says.
                wanted = places[:, j:]
                inside = wanted >= 0
                at = wanted[inside]
                rows = final[:, : final.shape[1] - j][inside]
                summed, best = soft_cross_entropy(rows, self.lm_head, labels.means[at])
                weight = self.recipe.step_weight**j
                total = total + weight * (summed - labels.entropies[at].sum()) / len(rows)
                weights += weight
                agree.append(float((best == labels.best[at]).float().mean()))
        loss = total / weights
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NumericalError(
                f"the loss is not finite at step {self.status.step}: stopped; {self.out} has the last good checkpoint"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate * self.recipe.factor(part)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.status.step += 1
        self.status.positions += int(batch.counts.sum())
        self.status.loss, self.status.agree = value, agree

    def labels(self, batch: Batch) -> tuple[torch.Tensor, Labels]:
        """What the target says after each answer position, from its last layer's output; int64 [B, A]: where anchor
        a's label is among them, or -1."""
        inside = torch.arange(batch.anchors) < torch.from_numpy(batch.counts)[:, None]
        places = torch.where(inside, inside.flatten().cumsum(0).view(inside.shape) - 1, -1)
        positions = torch.from_numpy(batch.answers)[:, None] + torch.arange(batch.anchors)
        owner = torch.arange(len(inside))[:, None].expand(inside.shape)
        states = torch.from_numpy(batch.states[:, :, -1])[owner[inside], positions[inside]].float()
        states = rms(states, self.target.config.rms_norm_eps) * self.norm
        return places, Labels.of(states, self.lm_head)


def fastest() -> torch.dtype:
    """float32, or bfloat16 where this processor multiplies it clearly faster."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
        spans = []
        for _ in range(4):
            begin = time.perf_counter()
            a @ b
            spans.append(time.perf_counter() - begin)
        times[dtype] = min(spans)
    return torch.bfloat16 if times[torch.bfloat16] < 0.7 * times[torch.float32] else torch.float32
