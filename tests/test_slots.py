"""Slots that outlive their text: what is found again, what is copied, what is given up."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from fakes import TableBackend
from outpace import slots
from outpace.backends.base import Rows
from outpace.slots import SlotPool, common_prefix
from outpace.types import CapacityError, RewindError


def read(backend: TableBackend, pool: SlotPool, tokens: list[int], owner: str = "me") -> tuple[int, int]:
    """Opens a slot for the tokens and reads what it does not hold."""
    slot, held = pool.open(owner, tokens)
    assert backend.length(slot) == held
    if tokens[held:]:
        backend.forward([Rows(slot, tokens[held:])])
        backend.commit(slot, range(len(tokens) - held))
    return slot, held


def test_a_text_that_goes_on_takes_its_slot_over() -> None:
    backend = TableBackend()
    pool = SlotPool(backend)
    slot, _ = read(backend, pool, [1, 2, 3])
    pool.close("me", [1, 2, 3, 4])
    assert read(backend, pool, [1, 2, 3, 4, 0]) == (slot, 3)


def test_two_texts_with_one_beginning_both_stay() -> None:
    backend = TableBackend()
    pool = SlotPool(backend)
    for text in ([1, 2, 3, 4], [1, 2, 0, 0, 0]):
        read(backend, pool, text)
        pool.close("me", text)
    assert len(backend._held) == 2
    for text in ([1, 2, 3, 4, 1], [1, 2, 0, 0, 0, 1]):
        _, held = read(backend, pool, text)
        assert held == len(text) - 1
        pool.close("me", text)


def test_the_oldest_text_makes_room() -> None:
    backend = TableBackend(slots=2)
    pool = SlotPool(backend)
    for text in ([1, 1], [2, 2], [3, 3]):
        _, held = read(backend, pool, text)
        assert held == 0
        pool.close("me", text)
    assert read(backend, pool, [2, 2, 0], "you")[1] == 2
    assert read(backend, pool, [1, 1, 0], "him")[1] == 0
    with pytest.raises(CapacityError):
        pool.open("her", [4])


@pytest.mark.parametrize("slots", [1, 2])
def test_a_full_backend_still_reuses_a_beginning(slots: int) -> None:
    backend = TableBackend(slots=slots)
    pool = SlotPool(backend)
    for text in ([1, 2, 3], [4, 4])[:slots]:
        read(backend, pool, text)
        pool.close("me", text)
    assert read(backend, pool, [1, 2, 0, 0])[1] == 2


def test_idle_texts_together_hold_one_context() -> None:
    backend = TableBackend(positions=20)
    pool = SlotPool(backend)
    for first in range(5):
        text = [first] * 8
        read(backend, pool, text)
        pool.close("me", text)
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
    read(backend, pool, [1, 2, 3])
    pool.close("me", [1, 2, 3])
    assert read(backend, pool, [1, 2, 4])[1] == 0
    assert read(backend, pool, [1, 2, 3, 4])[1] == 3


def test_owners_without_a_slot_and_with_an_old_one() -> None:
    backend = TableBackend(slots=2)
    pool = SlotPool(backend)
    pool.close("nobody", [1])
    pool.drop("nobody")
    assert not backend._held
    read(backend, pool, [1, 2])
    read(backend, pool, [3])  # the same owner again
    assert list(backend._held.values()) == [[3]]
    pool.drop("me")
    pool.drop("me")
    assert not backend._held


def test_an_interruption_between_any_two_lines_loses_no_slot() -> None:
    """Texts are opened, continued, copied, dropped and pushed out, with KeyboardInterrupt at every line in turn."""

    def scenario(pool: SlotPool, backend: TableBackend) -> None:
        for text in ([1, 2, 3], [4, 4], [1, 2, 0, 0], [1, 2, 3, 3], [0] * 12, [4, 4, 4]):
            try:
                read(backend, pool, text)
                if text[0] == 0:
                    pool.drop("me")
                pool.close("me", text)
            finally:
                pool.drop("me")  # as the engine does: a text whose slot was not handed over is given up

    def run(at: int) -> int:
        """The scenario with an interruption at the given line (0: none); how many lines it has."""
        backend, seen = TableBackend(slots=2, positions=12), 0
        pool = SlotPool(backend)

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal seen
            if frame.f_code.co_filename != slots.__file__:
                return None
            seen += event == "line"
            if event == "line" and seen == at:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            scenario(pool, backend)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
            pool.drop("me")
        for text in ([1, 2, 3], [1, 2, 0]):  # what is found again is what was read
            slot, _ = read(backend, pool, text)
            assert backend._held[slot] == text
            pool.close("me", text)
        pool.clear()
        assert not backend._held, at
        return seen

    lines = run(0)
    assert lines > 100
    for at in range(1, lines + 1):
        run(at)


def test_common_prefix() -> None:
    assert [common_prefix(a, b) for a, b in (([], [1]), ([1, 2], (1, 2, 3)), ((1, 2), [1, 3]), ([4], [5]))] == [
        0,
        2,
        1,
        0,
    ]
    assert common_prefix([9, 2, 3, 4], [1, 2, 3, 5], 1) == 3
    assert common_prefix([1, 2], [1, 2, 3], 2) == 2
