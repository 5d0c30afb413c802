"""Texts that begin the same way, at the same time: the beginning is read once, and nobody's answer changes."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import TableBackend
from outpace.controller import Controller
from outpace.decode import Decoder, Request
from outpace.engine import Engine
from outpace.types import SampleOpts

V = 5
PROMPT = tuple(int(token) for token in np.random.default_rng(0).integers(0, V, 300))


def engine(rows: int = 32, slots: int = 8) -> Engine:
    return Engine(Decoder(TableBackend(V, positions=512, rows=rows, slots=slots), (), Controller(0)))


def answers(e: Engine, prompts: list[tuple[int, ...]]) -> list[Request]:
    requests = [
        e.submit(prompt, SampleOpts(max_tokens=8, temperature=1.0, seed=5, choice=i))
        for i, prompt in enumerate(prompts)
    ]
    e.run(requests)
    return requests


@pytest.mark.parametrize("shared", [300, 200, 40])
def test_a_common_beginning_is_read_once(shared: int) -> None:
    prompts = [(*PROMPT[:shared], *[i % V] * 5) for i in range(4)]
    alone = [answers(engine(), [(prompt)] * (i + 1))[i].output for i, prompt in enumerate(prompts)]
    together = answers(engine(), prompts)
    assert [request.output for request in together] == alone
    read = sum(len(request.prompt) - request.stats.cached_prompt_tokens for request in together)
    assert read <= shared + 4 * 6 + 3 * 32  # a pass reads 32 rows: the first may be a little ahead of the others


def test_choices_of_one_prompt_read_it_once() -> None:
    requests = answers(engine(), [PROMPT] * 5)
    assert all(len(PROMPT) - 32 < r.stats.cached_prompt_tokens < len(PROMPT) for r in requests[1:])
    assert len({tuple(r.output) for r in requests}) > 1


def test_others_do_not_wait_for_a_beginning_that_is_not_theirs() -> None:
    e = engine()
    first = e.submit(PROMPT, SampleOpts.greedy(max_tokens=3))
    e.step()
    same = e.submit(PROMPT, SampleOpts.greedy(max_tokens=3))
    other = e.submit((4, 4, 1), SampleOpts.greedy(max_tokens=3))
    e.step()
    assert other in e.running
    assert same in e.waiting
    e.run([first, same, other])
    assert same.output == first.output
    assert same.stats.cached_prompt_tokens > 250


def test_who_waits_goes_on_when_the_other_is_cancelled() -> None:
    e = engine()
    first = e.submit(PROMPT, SampleOpts.greedy(max_tokens=3))
    same = e.submit(PROMPT, SampleOpts.greedy(max_tokens=3))
    e.step()
    e.cancel(first)
    e.run([same])
    plain = engine()
    wanted = plain.submit(PROMPT, SampleOpts.greedy(max_tokens=3))
    plain.run([wanted])
    assert same.output == wanted.output


def test_a_slot_that_cannot_be_copied_is_no_reason_to_fail() -> None:
    e = engine(slots=2)
    requests = answers(e, [PROMPT] * 4)
    assert all(len(request.output) == 8 for request in requests)
