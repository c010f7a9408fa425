"""When the stacks of a command are read: near its limit, and as its memory grows."""

import os

import pytest

from weighin.probes.stacks import StackTaker
from weighin.units import MIB


@pytest.mark.parametrize(
    ("last", "now", "in_pause", "reads"),
    [
        (150, 166, False, True),  # by 16 MiB
        (150, 165, False, False),
        (400, 419, False, False),  # by less than 5 %
        (150, 166, True, False),
        (150, 214, True, True),  # by 64 MiB, more than a third
        (150, 213, True, False),
        (300, 400, True, True),
        (300, 399, True, False),
    ],
)
def test_a_usage_that_is_higher_by_a_third_does_not_wait_for_the_pause(
    last: int, now: int, in_pause: bool, reads: bool
) -> None:
    taker = StackTaker(list)
    taker._taken_bytes = last * MIB
    taker._due_s = float("inf") if in_pause else 0.0
    assert taker._is_worth(now * MIB) == reads


@pytest.mark.parametrize(("then", "kept"), [(180, 180), (90, 100)])
def test_a_stack_has_the_usage_of_the_sample_after_its_reading(
    then: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = {"name": "work", "filename": "a.py", "line": 3}
    thread = {"frames": [frame], "os_thread_id": 1, "owns_gil": True, "thread_name": "MainThread"}
    taker = StackTaker(lambda: [os.getpid()])
    monkeypatch.setattr(taker, "_program", "py-spy")
    monkeypatch.setattr(taker, "_dump", lambda _, pids: {pid: [thread] for pid in pids})
    for t_ns, mib in ((1, 100), (2, then), (3, 185)):
        taker.look(t_ns, mib * MIB)
        (stack, *others) = taker.stacks
    assert stack.usage_bytes == kept * MIB
    assert [other.usage_bytes for other in others] == ([] if then > 100 else [185 * MIB])
