"""Slots that outlive their text: what is found again, what is copied, what is given up."""

from __future__ import annotations

import pytest

from fakes import TableBackend
from outpace.backends.base import Rows
from outpace.slots import SlotPool, common_prefix
from outpace.types import CapacityError, RewindError


def read(backend: TableBackend, pool: SlotPool, tokens: list[int]) -> tuple[int, int]:
    """Opens a slot for the tokens and reads what it does not hold."""
    slot, held = pool.open(tokens)
    assert backend.length(slot) == held
    if tokens[held:]:
        backend.forward([Rows(slot, tokens[held:])])
        backend.commit(slot, range(len(tokens) - held))
    return slot, held


def test_a_text_that_goes_on_takes_its_slot_over() -> None:
    backend = TableBackend()
    pool = SlotPool(backend)
    slot, _ = read(backend, pool, [1, 2, 3])
    pool.close(slot, [1, 2, 3, 4])
    assert read(backend, pool, [1, 2, 3, 4, 0]) == (slot, 3)


def test_two_texts_with_one_beginning_both_stay() -> None:
    backend = TableBackend()
    pool = SlotPool(backend)
    for text in ([1, 2, 3, 4], [1, 2, 0, 0, 0]):
        slot, _ = read(backend, pool, text)
        pool.close(slot, text)
    assert len(backend._held) == 2
    for text in ([1, 2, 3, 4, 1], [1, 2, 0, 0, 0, 1]):
        slot, held = read(backend, pool, text)
        assert held == len(text) - 1
        pool.close(slot, text)


def test_the_oldest_text_makes_room() -> None:
    backend = TableBackend(slots=2)
    pool = SlotPool(backend)
    for text in ([1, 1], [2, 2], [3, 3]):
        slot, held = read(backend, pool, text)
        assert held == 0
        pool.close(slot, text)
    assert read(backend, pool, [2, 2, 0])[1] == 2
    assert read(backend, pool, [1, 1, 0])[1] == 0
    with pytest.raises(CapacityError):
        pool.open([4])


@pytest.mark.parametrize("slots", [1, 2])
def test_a_full_backend_still_reuses_a_beginning(slots: int) -> None:
    backend = TableBackend(slots=slots)
    pool = SlotPool(backend)
    for text in ([1, 2, 3], [4, 4])[:slots]:
        slot, _ = read(backend, pool, text)
        pool.close(slot, text)
    assert read(backend, pool, [1, 2, 0, 0])[1] == 2


def test_idle_texts_together_hold_one_context() -> None:
    backend = TableBackend(positions=20)
    pool = SlotPool(backend)
    for first in range(5):
        text = [first] * 8
        slot, _ = read(backend, pool, text)
        pool.close(slot, text)
    assert sum(map(len, backend._held.values())) <= 20
    assert read(backend, pool, [4] * 9)[1] == 8
    assert pool.clear()
    assert not pool.clear()


def test_a_state_that_cannot_go_back_is_read_anew() -> None:
    class OneWay(TableBackend):
        def truncate(self, slot: int, length: int) -> None:
            if length < self.length(slot):
                raise RewindError("no way back")

    backend = OneWay()
    pool = SlotPool(backend)
    slot, _ = read(backend, pool, [1, 2, 3])
    pool.close(slot, [1, 2, 3])
    assert read(backend, pool, [1, 2, 4])[1] == 0
    assert read(backend, pool, [1, 2, 3, 4])[1] == 3


def test_common_prefix() -> None:
    assert [common_prefix(a, b) for a, b in (([], [1]), ([1, 2], (1, 2, 3)), ((1, 2), [1, 3]), ([4], [5]))] == [
        0,
        2,
        1,
        0,
    ]
