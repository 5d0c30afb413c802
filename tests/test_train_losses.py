"""The losses and their gradients against the plain formulas and PyTorch's own derivatives."""

from __future__ import annotations

import pytest
import torch

from outpace.train.losses import CHUNK, Labels, guess_loss, tv_share

ROWS, LABELS, WIDTH, WORDS = CHUNK + 45, 90, 12, 37


def plain(hidden: torch.Tensor, head: torch.Tensor, labels: Labels, at: torch.Tensor, tv: float) -> torch.Tensor:
    p = (labels.states[at] @ labels.head.T).softmax(-1)
    q = (hidden @ head.T).softmax(-1)
    kl = (p * (p.log() - q.log())).sum()
    return (1 - tv) * kl + tv * (0.5 * (p - q).abs().sum())


@pytest.mark.parametrize("tv", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("own", [False, True])
def test_loss_and_gradients_are_those_of_the_plain_formula(tv: float, own: bool) -> None:
    torch.manual_seed(1)
    double = {"dtype": torch.float64}
    hidden = torch.randn(ROWS, WIDTH, **double, requires_grad=True)
    head = torch.randn(WORDS, WIDTH, **double, requires_grad=own)
    target = head.detach() + 0.3 * torch.randn(WORDS, WIDTH, **double) if own else head
    labels = Labels.of(torch.randn(LABELS, WIDTH, **double), target)
    at = torch.randint(0, LABELS, (ROWS,))
    total, best = guess_loss(hidden, head if own else None, labels, at, tv)
    (3 * total).backward()
    found = [hidden.grad, head.grad]
    hidden.grad = head.grad = None
    wanted = plain(hidden, head, labels, at, tv)
    (3 * wanted).backward()
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(found, [hidden.grad, head.grad])
    assert torch.equal(best, (hidden @ head.T).argmax(-1))


def test_far_apart_probabilities_stay_finite() -> None:
    """Chances that are zero in float32, on either side."""
    head = torch.eye(4) * 200
    labels = Labels.of(torch.eye(4)[:2], head)
    hidden = torch.eye(4)[[0, 3]].requires_grad_()
    for tv in (0.0, 0.5, 1.0):
        total, _ = guess_loss(hidden, None, labels, torch.tensor([0, 1]), tv)
        total.backward()
        assert hidden.grad is not None
        assert bool(torch.isfinite(hidden.grad).all())
        assert float(total.detach()) == pytest.approx((1 - tv) * 200 + tv, rel=1e-4)


def test_hybrid_turns_from_kl_into_tv_as_guesses_become_right() -> None:
    shares = [tv_share("hybrid", agreement) for agreement in (0.0, 0.3, 0.9, 1.0)]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert (tv_share("kl", 0.9), tv_share("tv", 0.1)) == (0.0, 1.0)
