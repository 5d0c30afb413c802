"""The training loop: batches, loss, optimiser, checkpoints; by the clock, so that it ends when it was asked to.

Neighbours: data.py and batches.py give the data, kinds.py the head, losses.py what a guess costs, export.py the files.
Cheap steps first: a head that cannot guess the first token learns nothing from guessing the fifth. What a run needs to
go on lies in checkpoint.pt; the head of that moment lies beside it, ready for use, also after a kill.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..heads.config import HeadConfig
from ..heads.export import export_head
from ..models.names import HEAD
from ..types import I64, ModelError, NumericalError, UsageError
from ..weights.files import replacing
from . import history, plot
from .batches import Batch, batches
from .data import Shards
from .evaluate import score
from .heap import give_back
from .kinds import kind_of
from .losses import LOSSES, Labels, guess_loss, tv_share
from .module import rms
from .parallel import Workers
from .target import Target, draft_vocabulary
from .torch_or_say import torch

CHECKPOINT = "checkpoint.pt"
TRIMMED = 8  # steps after which memory is given back: seldom enough to cost nothing that can be measured


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. The defaults are those that did best in docs/LOG.md.

    vocabulary: tokens that the head can guess. loss: of losses.LOSSES. own_head: whether the head learns output rows of
    its own, which begin as the target's. positions: anchors of a batch. stages: (part of the time from which on, steps
    of the training-time test). step_weight: how much less each further step counts. rate: the highest learning rate,
    after `warmup` of the time; it ends at `last` of it. checked: every how many sequences one is held back to watch the
    progress, `watched` of them at most, each `watch` seconds. save: seconds between checkpoints.
    """

    vocabulary: int = 8192
    loss: str = "kl"
    own_head: bool = False
    positions: int = 1024
    stages: tuple[tuple[float, int], ...] = ((0.0, 1), (0.4, 3), (0.8, 5))
    step_weight: float = 0.8
    rate: float = 5e-4
    warmup: float = 0.02
    last: float = 0.05
    checked: int = 50
    watched: int = 32
    watch: float = 300.0
    save: float = 60.0

    def steps(self, part: float) -> int:
        """Steps of the training-time test when this part of the time is over."""
        return [count for begin, count in self.stages if begin <= part][-1]

    def factor(self, part: float, since: float = 0.0, before: float = 0.0) -> float:
        """What the learning rate is multiplied with, when this part of the time is over.

        since, before: where this run began, and the factor at which the one before it ended: from there it rises in
        `warmup` of the time to what the whole time, earlier runs included, asks for.
        """
        rest = (part - self.warmup) / (1 - self.warmup)
        asked = self.last + (1 - self.last) * 0.5 * (1 + math.cos(math.pi * min(max(rest, 0.0), 1.0)))
        risen = min((part - since) / self.warmup, 1.0) if self.warmup else 1.0
        return max(min(asked, before + (asked - before) * risen), 0.01)


@dataclass(slots=True)
class Status:
    """Where a run stands; kept in its checkpoint. loss, agree: of the newest batch, agree[j] for step j.

    batch: batches of the epoch that are done. sequences: how many there were. factor: the learning rate's newest.
    checked: tokens per round on held-back sequences, when they were looked at last.
    """

    step: int = 0
    epoch: int = 0
    positions: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    agree: list[float] = field(default_factory=list)
    batch: int = 0
    sequences: int = 0
    factor: float = 0.0
    checked: float = math.nan


Progress = Callable[[Status], None]


class Trainer:
    """One run. target: what is drafted for; name: what it is called. kind: one of kinds.KINDS. out: the folder
    of head and checkpoint.

    resume: go on from the checkpoint there. Raises UsageError for a folder that is taken, or a checkpoint that is
    missing or of other data.
    """

    def __init__(
        self,
        target: Target,
        data: Shards,
        out: Path,
        *,
        name: str,
        kind: str = "eagle3",
        seed: int = 0,
        recipe: Recipe,
        resume: bool = False,
        workers: Workers | None = None,
    ) -> None:
        if recipe.loss not in LOSSES:
            raise UsageError(f"loss must be one of {', '.join(LOSSES)}, got {recipe.loss!r:.40}")
        self.target, self.out, self.name, self.recipe, self.seed = target, out, name, recipe, seed
        self.workers = workers or Workers()
        self._mapped, self.made_by = data.mapped, data.made_by
        usable = [sequence for sequence in data.sequences if sequence.answer > 0]
        # Every so many, counted from the first: data that are added leave those that are held back where they are.
        self.checked = usable[:: recipe.checked][: recipe.watched]
        self.sequences = [sequence for i, sequence in enumerate(usable) if i % recipe.checked]
        if not self.sequences:
            raise UsageError("there is too little training data: make more")
        config = target.config
        if data.taps[-1] != config.num_hidden_layers - 1:
            raise UsageError("the data's last tap must be the last layer's output, which gives the labels")
        self.kind, parts = kind, kind_of(kind)
        self.status = Status()
        saved = self._saved(resume)
        self.own_head = recipe.own_head if saved is None else saved.get("own_head", False)
        if saved is None:
            counts = data.counts(config.vocab_size)
            self.d2t: I64 = draft_vocabulary(counts, min(recipe.vocabulary, config.vocab_size), config.eos_token_ids)
        else:
            self.d2t = saved["d2t"].numpy()  # the head's rows, whatever is frequent in data that were added
            self.status = Status(**saved["status"])
        self.config: HeadConfig = replace(parts.config(config, data.taps, len(self.d2t)), own_lm_head=self.own_head)
        if saved is not None:
            self._check(saved)
        self.dtype = fastest()
        rows = target.lm_head[self.d2t]
        # Without their mean, which moves all logits alike: what is left survives 16 bits better.
        rows = rows - rows.mean(0)
        first = parts.first(self.config, target, seed)
        if self.own_head:
            first[HEAD] = rows
        self.head = parts.module(self.config, first, target.embedding, data.taps)
        self.lm_head = torch.tensor(rows).to(self.dtype)
        self.norm = torch.tensor(target.norm)
        self.known = torch.zeros(config.vocab_size, dtype=torch.bool)  # tokens that the head can guess
        self.known[torch.from_numpy(self.d2t)] = True
        self.optimiser = torch.optim.AdamW(
            self.head.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )
        self.history: list[history.Line] = []
        if saved is not None:
            self.head.load_state_dict(saved["head"])
            self.optimiser.load_state_dict(saved["optimiser"])
            # What a kill lost after the checkpoint did not happen.
            self.history = [line for line in history.read(out) if line["step"] <= self.status.step]
            if self.status.sequences != len(self.sequences):  # more data: an order of its own, from its beginning
                self.status.epoch, self.status.batch = self.status.epoch + 1, 0
        self.status.sequences = len(self.sequences)
        self._began, self._before = 0.0, self.status.factor
        self._sums: list[tuple[float, list[float]]] = []  # losses and agreements since the last line of the history

    @property
    def own_rows(self) -> torch.Tensor | None:
        """The head's own output rows [Vd, H], or None where it uses the target's."""
        rows: torch.Tensor | None = self.head.rows if self.own_head else None
        return rows

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
        self._began, self._before = status.seconds / seconds, status.factor
        saved = status.seconds
        watched = max((line["seconds"] for line in self.history if "tokens_per_round" in line), default=0.0)
        try:
            for batch in self._batches():
                status.seconds = self.workers.told(time.monotonic() - begin)
                if status.seconds >= seconds:
                    break
                self._step(batch, status.seconds / seconds)
                if status.step % TRIMMED == 0:
                    give_back(self._mapped)
                status.seconds = time.monotonic() - begin
                if progress is not None:
                    progress(status)
                if status.seconds - saved >= self.recipe.save and self.workers.first:
                    watch = status.seconds - watched >= self.recipe.watch
                    self.save(watch=watch)
                    saved = status.seconds
                    watched = saved if watch else watched
        except KeyboardInterrupt:
            if self.workers.first:
                self.save()
            raise
        if self.workers.first:
            self.save(watch=True)
        return status

    def validate(self, drafts: int = 7) -> float:
        """Tokens per round on held-back sequences of the data, which flatter: they are of the same kind."""
        rows = self.lm_head if self.own_rows is None else self.own_rows.detach()
        return score(self.head, rows.float(), self.d2t, self.checked, drafts).tokens_per_round

    def save(self, *, watch: bool = False) -> None:
        """Writes checkpoint, head, history and plot: each all of it or nothing. watch: looks at held-back sequences
        before.

        Weights that are not finite are not written: raises NumericalError, and the files stay as they are."""
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.head.parameters()):
            raise self._not_finite("weights are")
        if watch:
            self.status.checked = self.validate()
        self.out.mkdir(parents=True, exist_ok=True)
        state = {
            "head": self.head.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "d2t": torch.from_numpy(self.d2t),
            "target": self.made_by,
            "kind": self.kind,
            "own_head": self.own_head,
            "taps": list(self.config.taps),
            "status": {name: getattr(self.status, name) for name in Status.__slots__},
        }
        written = io.BytesIO()
        torch.save(state, written)
        with replacing(self.out / CHECKPOINT) as file:
            file.write(written.getbuffer())
        ids = None if len(self.d2t) == self.config.layers.vocab_size else self.d2t
        export_head(self.out, self.config, self.head.arrays(), ids, self.name, force=True)
        if self._sums:
            self.history.append(self._line())
            self._sums.clear()
        if watch and self.history:
            self.history[-1]["tokens_per_round"] = round(self.status.checked, 4)
        history.write(self.out, self.history)
        plot.draw(self.out, self.history)

    def _line(self) -> history.Line:
        """What happened since the line before."""
        status = self.status
        agrees = [agree for _, agree in self._sums]
        return {
            "seconds": round(status.seconds, 3),
            "step": status.step,
            "positions": status.positions,
            "rate": self.recipe.rate * status.factor,
            "loss": round(sum(loss for loss, _ in self._sums) / len(self._sums), 5),
            "agree": [
                round(float(np.mean([agree[j] for agree in agrees if j < len(agree)])), 4)
                for j in range(max(map(len, agrees)))
            ],
        }

    def _not_finite(self, what: str) -> NumericalError:
        left = "has the last good checkpoint" if (self.out / CHECKPOINT).exists() else "has no checkpoint yet"
        return NumericalError(f"the {what} not finite at step {self.status.step}: stopped; {self.out} {left}")

    def _saved(self, resume: bool) -> dict[str, Any] | None:
        file = self.out / CHECKPOINT
        if not resume:
            if file.exists():
                raise UsageError(f"{self.out}: holds a training run: go on with --resume, or name another folder")
            return None
        if not file.exists():
            raise UsageError(f"{self.out}: no checkpoint to go on from")
        return read_run(self.out)

    def _check(self, saved: dict[str, Any]) -> None:
        check_run(self.out, saved, self.kind, self.recipe.own_head, self.made_by)
        if saved["taps"] != list(self.config.taps):
            raise UsageError(f"{self.out}: the checkpoint was trained with taps {saved['taps']}, the data have others")

    def _batches(self) -> Iterator[Batch]:
        """This process's batches, from where the run stands."""
        rank, size = self.workers.rank, self.workers.size
        while True:
            seed = self.seed * 1000 + self.status.epoch
            made = False
            found = batches(self.sequences, self.recipe.positions, seed, start=self.status.batch)
            while len(turn := list(islice(found, size))) == size:  # what is left over at the end is for another epoch
                made = True
                yield turn[rank]
            if not made and not self.status.batch:  # nor will there be in the next epoch
                raise UsageError(f"there is too little training data for {size} processes: make more, or start fewer")
            self.status.epoch, self.status.batch = self.status.epoch + 1, 0

    def _step(self, batch: Batch, part: float) -> None:
        count = min(self.recipe.steps(part), self.workers.most(batch.anchors))
        places, labels = self.labels(batch)
        # Anchor a of step j guesses what label a + j says.
        wanted = [places[:, j:] >= 0 for j in range(count)]
        rows = self.workers.total([float(inside.sum()) for inside in wanted])
        weights = [self.recipe.step_weight**j if rows[j] else 0.0 for j in range(count)]
        total, right = torch.zeros(()), [0.0] * count
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            for j, final in enumerate(self.head.steps(batch, min(count, batch.anchors))):
                at = places[:, j:][wanted[j]]
                known = self.status.agree[j] if j < len(self.status.agree) else 0.0
                summed, best = guess_loss(
                    final[:, : final.shape[1] - j][wanted[j]],
                    self.own_rows,
                    labels,
                    at,
                    tv_share(self.recipe.loss, known),
                )
                total = total + weights[j] / max(rows[j], 1.0) / sum(weights) * summed
                right[j] = float((best == labels.best[at]).sum())
        value, *right = self.workers.total([float(total.detach()), *right])
        if not math.isfinite(value):
            raise self._not_finite("loss is" if bool(np.isfinite(batch.states).all()) else "training data are")
        total.backward()  # type: ignore[no-untyped-call]
        self.workers.add_gradients(self.head.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        if not bool(torch.isfinite(norm)):
            raise self._not_finite("gradients are")
        self.status.factor = self.recipe.factor(part, self._began, self._before)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate * self.status.factor
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.status.step += 1
        self.status.batch += self.workers.size
        self.status.positions += int(self.workers.total([float(batch.counts.sum())])[0])
        self.status.loss, self.status.agree = value, [n / max(of, 1.0) for n, of in zip(right, rows, strict=True)]
        self._sums.append((value, self.status.agree))

    def labels(self, batch: Batch) -> tuple[torch.Tensor, Labels]:
        """What the target says after each answer position, from its last layer's output; int64 [B, A]: where anchor
        a's label is among them, or -1 where there is none, or the token that came is none that the head can guess."""
        inside = torch.arange(batch.anchors) < torch.from_numpy(batch.counts)[:, None]
        positions = torch.from_numpy(batch.answers)[:, None] + torch.arange(batch.anchors)
        owner = torch.arange(len(inside))[:, None].expand(inside.shape)
        tokens = torch.from_numpy(batch.tokens)
        after = (positions + 1).clamp(max=tokens.shape[1] - 1)
        last = torch.arange(batch.anchors) == torch.from_numpy(batch.counts)[:, None] - 1  # what came is not kept
        inside = inside & (last | self.known[tokens[owner, after]])
        places = torch.where(inside, inside.flatten().cumsum(0).view(inside.shape) - 1, -1)
        states = torch.from_numpy(batch.states[:, :, -1])[owner[inside], positions[inside]].float()
        states = rms(states, self.target.config.rms_norm_eps) * self.norm
        return places, Labels.of(states, self.lm_head)


def read_run(out: Path) -> dict[str, Any]:
    """The checkpoint of a run. Raises ModelError for a damaged one."""
    file = out / CHECKPOINT
    try:
        saved: dict[str, Any] = torch.load(file, weights_only=True)
        status = Status(**saved["status"])
        ids, parts = saved["d2t"], [saved[name] for name in ("head", "optimiser", "taps")]
        if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or not math.isfinite(status.seconds) or None in parts:
            raise ValueError("it is no training run")
    except Exception as error:  # whatever torch makes of a damaged file, and what else may be in one
        raise ModelError(f"{file}: cannot be read: {' '.join(str(error).split())[:100]}") from None
    return saved


def check_run(out: Path, saved: dict[str, Any], kind: str, own_head: bool, made_by: str) -> None:
    """Raises UsageError for a checkpoint of another target (made_by: its fingerprint) or kind of head, or without the
    output rows that are asked for."""
    if saved.get("target", made_by) != made_by:  # older ones do not say
        raise UsageError(f"{out}: the head there is for another target (or the target has changed): use a new folder")
    if (its := saved.get("kind", "eagle3")) != kind:
        raise UsageError(f"{out}: the head there is of kind {its}, not {kind}: name another folder")
    if own_head and not saved.get("own_head", False):
        raise UsageError(f"{out}: the head there has no output rows of its own: name another folder")


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
