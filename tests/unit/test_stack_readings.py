"""When the stacks of a command are read: near its limit, and as its memory grows."""

import os
import threading

import pytest

from weighin.probes.stacks import StackTaker
from weighin.result import Stack
from weighin.units import MIB


@pytest.mark.parametrize(
    ("last", "now", "in_pause", "reads"),
    [
        (150, 166, False, True),  # by 16 MiB
        (150, 165, False, False),
        (400, 419, False, False),  # by less than 5 %
        (150, 166, True, False),
        (100, 132, True, True),  # by 32 MiB, more than a quarter
        (100, 131, True, False),
        (300, 375, True, True),
        (300, 374, True, False),
    ],
)
def test_a_usage_that_is_higher_by_a_quarter_does_not_wait_for_the_pause(
    last: int, now: int, in_pause: bool, reads: bool
) -> None:
    taker = StackTaker(list)
    taker._taken_bytes = last * MIB
    taker._due_s = float("inf") if in_pause else 0.0
    assert taker._is_worth(now * MIB) == reads


@pytest.mark.parametrize(
    ("limit", "before", "now", "is_near"),
    [
        (400, 359, 360, True),  # within 10 %
        (400, 358, 359, False),
        (400, 290, 301, False),  # 11 MiB in 20 ms
        (400, 260, 301, True),  # at this rate, 400 in 48 ms
        (400, 200, 300, False),  # at three quarters, a stack tells nothing of the peak
        (None, 200, 300, False),
    ],
)
def test_a_usage_is_near_the_limit_that_it_soon_reaches(
    limit: int | None, before: int, now: int, is_near: bool
) -> None:
    taker = StackTaker(list)
    taker._limit = limit and limit * MIB
    taker._margin_bytes = 40 * MIB
    taker._is_near(0, before * MIB)
    assert taker._is_near(20_000_000, now * MIB) == is_near


def test_a_stack_has_the_most_usage_until_its_reading_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()

    def dump(_: str, _deadline_s: float, pid: int) -> list[Stack]:
        goes_on.wait(60)
        return [Stack(0, pid, "MainThread", 0, ("work (a.py:3)",))]

    taker = StackTaker(lambda: [os.getpid()])
    monkeypatch.setattr(taker, "_program", "py-spy")
    monkeypatch.setattr(taker, "_dump", dump)
    for t_ns, mib in ((1, 100), (2, 300), (3, 250)):
        taker.look(t_ns, mib * MIB)
    goes_on.set()
    (stack,) = taker.stacks
    assert (stack.t_ns, stack.usage_bytes) == (2, 300 * MIB)
