"""What a guess costs: losses between the head's probabilities q and the target's p, over the draft vocabulary.

Neighbours: loop.py sums them, eagle3.py has the head. Logits are made for a few rows at a time and never stored; the
gradient is made in the same pass, while they are there.

`kl` is the Kullback-Leibler divergence of q from p: it wants all of p to be covered. `tv` is the total variation,
1 - sum min(p, q): the chance that speculative sampling rejects the guess, which is what costs time; its gradient is
small where q is far from p. `hybrid` begins as kl and turns into tv as the two agree. Maximising acceptance itself,
and beginning with kl, is known from work on direct optimisation of acceptance; the formulas here are our own.

Both p and q are probabilities given that the token is one of the draft vocabulary, here of D. Over the whole vocabulary
p would be m p, with m the chance of D. Its sum over all tokens costs several times the rest of the loss (six times the
matrix for SmolLM2-135M), and what m is for is to count rows by it. loop.py does that without bias and at no cost: it
leaves out the rows whose next token, drawn by the target itself, is not of D. A draft ends there, whatever it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .torch_or_say import torch

Tensor = torch.Tensor
CHUNK = 128  # rows whose logits are held at once: few enough for the processor's cache
LOSSES = ("kl", "tv", "hybrid")


def tv_share(loss: str, agreement: float) -> float:
    """How much of the loss is tv, the rest being kl. agreement: how often the newest guesses were right, 0 to 1."""
    return {"kl": 0.0, "tv": 1.0, "hybrid": agreement}[loss]


def _logits(rows: Tensor, head: Tensor) -> Tensor:
    """[M, Vd], in float32 or better."""
    logits = rows @ head.T
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def _softmax_means(states: Tensor, head: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Of p = softmax(W h) for rows h of float32 [M, H], a few at a time: which rows, their most probable entries, the
    logarithm of the sum of exp(W h), and p W."""
    rows = states.to(head.dtype)
    for start in range(0, len(states), CHUNK):
        part = slice(start, start + CHUNK)
        logits = _logits(rows[part], head)
        most, best = logits.max(-1)
        chances = logits.sub_(most[:, None]).exp_()
        sums = chances.sum(-1)
        mean = (chances.to(head.dtype) @ head).to(states.dtype)
        yield part, best, most + sums.log(), mean.div_(sums[:, None])


@dataclass(frozen=True, slots=True)
class Labels:
    """What the target says at L positions, seen through the draft vocabulary's rows W of its head: p = softmax(W h).

    states: float32 [L, H], h. head: W [Vd, H]. means: float32 [L, H], p W. entropies: float32 [L] of p. best: int64
    [L], its most probable entry.
    """

    states: Tensor
    head: Tensor
    means: Tensor
    entropies: Tensor
    best: Tensor

    @classmethod
    def of(cls, states: Tensor, head: Tensor) -> Labels:
        """states: float32 [L, H], the target's final hidden states; head [Vd, H]."""
        means, entropies = torch.empty_like(states), states.new_empty(len(states))
        best = torch.empty(len(states), dtype=torch.int64, device=states.device)
        for part, best[part], log_sum, mean in _softmax_means(states, head):
            means[part] = mean
            entropies[part] = log_sum - (states[part] * mean).sum(-1)
        return cls(states, head, means, entropies, best)


def guess_loss(hidden: Tensor, head: Tensor | None, labels: Labels, at: Tensor, tv: float) -> tuple[Tensor, Tensor]:
    """The sum over rows of (1 - tv) kl + tv (total variation), and int64 [M], the most probable guesses.

    hidden: float32 [M, H], the head's final states; at: int64 [M], each row's label. head: a W of the head's own
    [Vd, H], which gets a gradient as well, or None: the labels', which gets none. tv: between 0 and 1.
    """
    if head is None and tv == 0:
        summed, best = soft_cross_entropy(hidden, labels.head, labels.means[at])
        return summed - labels.entropies[at].sum(), best
    own = labels.head if head is None else head
    found: tuple[Tensor, Tensor] = _Blend.apply(hidden, own, labels, at, tv)  # type: ignore[no-untyped-call]
    return found


class _Blend(torch.autograd.Function):
    """As guess_loss, from p and q themselves: p is made again for each few rows from the target's state."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Labels, at: Tensor, tv: float) -> tuple[Tensor, Tensor]:
        dtype = labels.head.dtype
        ctx.own = head.requires_grad
        weights = head.to(dtype)
        rows, target_rows = hidden.to(dtype), labels.states[at].to(dtype)
        total = hidden.new_zeros(())
        gradient = torch.empty_like(hidden)
        head_gradient = torch.zeros_like(head) if ctx.own else None
        best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            p = _softmax(_logits(target_rows[part], labels.head))
            logits = _logits(rows[part], weights)
            best[part] = logits.argmax(-1)
            log_sum = logits.logsumexp(-1)
            total += (1 - tv) * (log_sum - (p * logits).sum(-1) - labels.entropies[at[part]]).sum()
            q = logits.sub_(log_sum[:, None]).exp_()
            # By logits: kl's gradient is q - p. min(p, q) grows with q where q < p, which are the tokens `low`.
            slope = torch.where(q < p, q, 0.0)
            risen = slope.sum(-1, keepdim=True)
            total += tv * (1 - torch.minimum(p, q).sum(-1)).sum()
            slope = q.mul((1 - tv) + tv * risen).sub_(slope.mul_(tv)).sub_(p.mul_(1 - tv)).to(dtype)
            gradient[part] = slope @ weights
            if head_gradient is not None:
                head_gradient += slope.T @ rows[part]
        ctx.save_for_backward(gradient, head_gradient)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of the sum alone."""
        gradient, head_gradient = ctx.saved_tensors
        own = head_gradient * gradients[0] if ctx.own else None
        return gradient * gradients[0], own, None, None, None


def _softmax(logits: Tensor) -> Tensor:
    """In place."""
    logits.sub_(logits.max(-1, keepdim=True).values).exp_()
    return logits.div_(logits.sum(-1, keepdim=True))


class _SoftCrossEntropy(torch.autograd.Function):
    """As soft_cross_entropy: the gradient is made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        total = (hidden * means).sum().neg_()
        gradient = torch.empty_like(hidden)
        best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
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
    """Cross-entropy of the guesses q to the target's probabilities p: kl plus the entropy of p, at half the cost.

    hidden: float32 [M, H]; head: W [Vd, H]; means: float32 [M, H], the rows' p W. Returns the sum of the losses and
    int64 [M], the most probable entries; there is a gradient for hidden alone. With logits W h the loss is
    log sum exp(W h) - h (p W), and its gradient q W - p W: of the target only p W is needed, a vector as short as h,
    which every step of the training-time test uses again (`Labels`).
    """
    total, best = _SoftCrossEntropy.apply(hidden, head, means)  # type: ignore[no-untyped-call]
    return total, best
