"""What the parent makes of the events of several ranks."""

from __future__ import annotations

import signal
from typing import Any

from weighin.isolation.base import Exit
from weighin.result import Outcome
from weighin.run import events, rank_logs
from weighin.run.event_log import EventLog

KILLED = Exit(None, signal=signal.SIGKILL)
FAILED = Exit(1)


def log(phase: str = "read", *, done: bool = False, **facts: Any) -> EventLog:
    made = EventLog(done=done)
    made.facts |= facts
    made.take(events.Begin(phase, 0))
    return made


def judged(logs: list[EventLog], ends: dict[int, Exit], oom_kills: int | None) -> tuple[str, str]:
    outcome, message = rank_logs.judge(logs, ends, Exit(1), oom_kills, b"", None)
    return outcome.value, message


def test_the_rank_that_was_killed_decides_even_if_another_failed_first() -> None:
    failed = log()
    failed.failure = (Outcome.STRATEGY_FAILED, "RuntimeError: connection closed by peer")
    logs = [failed, log(), log("copy")]
    assert judged(logs, {0: FAILED, 2: KILLED}, 1) == (
        "oom_killed",
        "rank 2: killed by the kernel for lack of memory in phase 'copy'",
    )


def test_all_ranks_that_were_killed_are_named() -> None:
    logs = [log(), log(), log(), log()]
    assert judged(logs, {3: KILLED, 1: KILLED, 0: KILLED}, 3)[1].startswith("ranks 3, 1 and 0: ")


def test_a_kill_that_the_kernel_did_not_count_is_no_lack_of_memory() -> None:
    outcome, message = judged([log(), log()], {1: KILLED}, 0)
    assert outcome == "measurement_failed"
    assert message == "rank 1: the measured process was ended by SIGKILL in phase 'read'"


def test_a_cell_is_ok_only_if_all_ranks_are_done() -> None:
    assert judged([log(done=True), log(done=True)], {}, 0) == ("ok", "")
    assert judged([log(done=True), log()], {}, 0)[0] != "ok"


def test_the_times_are_those_of_the_slowest_rank() -> None:
    logs = [log(load_ns=5, touch_ns=9), log(load_ns=7, touch_ns=1)]
    assert rank_logs.longest_load_ns(logs) == 7
    assert rank_logs.longest_ready_ns(logs) == 14
    assert rank_logs.slowest(logs) is logs[0]
    assert rank_logs.longest_ready_ns([*logs, log(load_ns=1)]) is None


def test_the_pss_is_known_only_if_every_rank_reported_its_own() -> None:
    assert rank_logs.pss_bytes([log(pss_bytes=3), log(pss_bytes=4)]) == 7
    assert rank_logs.pss_bytes([log(pss_bytes=3), log()]) is None


def test_the_places_of_the_ranks_begin_with_the_one_furthest_behind() -> None:
    logs = [log("meet"), log("meet"), log("bad"), log(done=True)]
    assert rank_logs.where(logs) == (
        "rank 2 in phase 'bad', ranks 0 and 1 in phase 'meet', rank 3 ended"
    )
    assert rank_logs.culprit(logs, {}, None) == 2
