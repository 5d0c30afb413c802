"""What a guess costs: losses between the head's probabilities and the target's, over the draft vocabulary.

Neighbours: loop.py sums them, eagle3.py has the head. Logits are made for a few rows at a time and never stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .torch_or_say import torch

Tensor = torch.Tensor
CHUNK = 128  # rows whose logits are held at once: few enough for the processor's cache


def _softmax_means(states: Tensor, head: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Of p = softmax(W h) for rows h of float32 [M, H], a few at a time: which rows, their most probable entries, the
    logarithm of the sum of exp(W h), and p W."""
    rows = states.to(head.dtype)
    for start in range(0, len(states), CHUNK):
        part = slice(start, start + CHUNK)
        logits = (rows[part] @ head.T).float()
        most, best = logits.max(-1)
        chances = logits.sub_(most[:, None]).exp_()
        sums = chances.sum(-1)
        yield part, best, most + sums.log(), (chances.to(head.dtype) @ head).float().div_(sums[:, None])


class _SoftCrossEntropy(torch.autograd.Function):
    """As soft_cross_entropy: the gradient is made in the forward pass, while the logits are there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        total = (hidden * means).sum().neg_()
        gradient = torch.empty_like(hidden)
        best = torch.empty(len(hidden), dtype=torch.int64)
        for part, best[part], log_sum, mean in _softmax_means(hidden, head):
            total += log_sum.sum()
            gradient[part] = mean
        ctx.save_for_backward(gradient.sub_(means))
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Of the sum alone."""
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None


def soft_cross_entropy(hidden: Tensor, head: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the head's guesses q to the target's probabilities p, and its gradient in the same pass.

    hidden: float32 [M, H]; head: W [Vd, H]; means: float32 [M, H], the rows' p W. Returns the sum of the losses and
    int64 [M], the most probable entries; there is a gradient for hidden alone. With logits W h the loss is
    log sum exp(W h) - h (p W), and its gradient q W - p W: of the target only p W is needed, a vector as short as h,
    which every step of the training-time test uses again (`Labels`). The logits of a few rows are made at a time, so
    that they never lie in memory.
    """
    total, best = _SoftCrossEntropy.apply(hidden, head, means)  # type: ignore[no-untyped-call]
    return total, best


@dataclass(frozen=True, slots=True)
class Labels:
    """What the target says at L positions, seen through the draft vocabulary's rows W of its head: p = softmax(W h).

    means: float32 [L, H], p W. entropies: float32 [L] of p. best: int64 [L], its most probable entry.
    """

    means: Tensor
    entropies: Tensor
    best: Tensor

    @classmethod
    def of(cls, states: Tensor, head: Tensor) -> Labels:
        """states: float32 [L, H], the target's final hidden states; head [Vd, H]."""
        means, entropies = torch.empty_like(states), torch.empty(len(states))
        best = torch.empty(len(states), dtype=torch.int64)
        for part, best[part], log_sum, mean in _softmax_means(states, head):
            means[part] = mean
            entropies[part] = log_sum - (states[part] * mean).sum(-1)
        return cls(means, entropies, best)
