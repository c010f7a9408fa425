"""Combine the event logs of the ranks: the processes that load one model together. A
cell (measurement) without ranks has one event log.
"""

import signal
from collections.abc import Mapping, Sequence

from weighin.isolation.base import Exit
from weighin.result import Faults, Outcome, Rank
from weighin.run.event_log import EventLog


def slowest(logs: Sequence[EventLog]) -> EventLog:
    """Return the log of a rank that has not read every byte of the model; if all ranks have, return
    the log of the slowest rank.
    """
    return max(logs, key=lambda log: float("inf") if (ns := log.ready_ns()) is None else ns)


def longest_load_ns(logs: Sequence[EventLog]) -> int | None:
    """Return the longest load time of a rank, in nanoseconds; None if a rank did not load."""
    times = [log.load_ns() for log in logs]
    return None if None in times else max(ns for ns in times if ns is not None)


def longest_ready_ns(logs: Sequence[EventLog]) -> int | None:
    """Return the time until the last rank had read every byte (was ready), in nanoseconds; None if
    a rank did not become ready.
    """
    return slowest(logs).ready_ns()


def faults(logs: Sequence[EventLog], refaults: int | None) -> Faults | None:
    """Return the sum of the ranks' page faults; ``refaults`` is the cgroup's count for all ranks."""
    counts = [each for log in logs if (each := log.faults(None))]
    if not counts:
        return None
    return Faults(sum(each.minor for each in counts), sum(each.major for each in counts), refaults)


def pss_bytes(logs: Sequence[EventLog]) -> int | None:
    """Return the sum of the ranks' proportional set sizes; None if a rank did not report one."""
    sizes = [log.facts.get("pss_bytes") for log in logs]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def ranks(logs: Sequence[EventLog], ends: Mapping[int, Exit]) -> tuple[Rank, ...]:
    """Return the record of each rank; empty for a cell without ranks.

    ``ends`` has the exits of the ranks that failed, by their numbers.
    """
    if len(logs) == 1:
        return ()
    return tuple(
        Rank(
            phase=log.current,
            load_ns=log.load_ns(),
            ready_ns=log.ready_ns(),
            peak_rss_bytes=max((each.peak_rss_bytes for each in log.load_phases()), default=None),
            pss_bytes=log.facts.get("pss_bytes"),
            exit_code=0 if log.done else ends[number].shell_code if number in ends else None,
        )
        for number, log in enumerate(logs)
    )


def where(logs: Sequence[EventLog]) -> str:
    """Return each rank's position in words: "rank 2 in phase 'read', ranks 0 and 1 after 'touch'"."""
    if len(logs) == 1:
        return logs[0].where()
    return ", ".join(f"{_named(numbers)} {place}" for place, numbers in _places(logs))


def culprit(logs: Sequence[EventLog], ends: Mapping[int, Exit], oom_kills: int | None) -> int:
    """Return the number of the rank that decides the outcome of a cell that failed.

    The choice is the first rank that the kernel killed for lack of memory, else the first rank that
    failed, else the rank with the fewest ended phases.
    """
    killed = [rank for rank, end in ends.items() if end.signal == signal.SIGKILL]
    if killed and oom_kills != 0:
        return killed[0]
    return next(iter(ends), _places(logs)[0][1][0])


def judge(
    logs: Sequence[EventLog],
    ends: Mapping[int, Exit],
    ended: Exit,
    oom_kills: int | None,
    stderr_tail: bytes,
    machine_oom_kills: int | None,
) -> tuple[Outcome, str]:
    """Return the outcome of a cell that ended before its time-out, and the reason in one line.

    ``ends`` has the exits of the ranks that failed, in their order in time. ``ended`` is the exit
    of the process that starts the ranks.
    """
    if all(log.done for log in logs):
        return (Outcome.CHILD_KILLED, lost(oom_kills)) if oom_kills else (Outcome.OK, "")
    number = culprit(logs, ends, oom_kills)
    log, last = logs[number], ends.get(number, ended)
    if ends:
        stderr_tail = log.stderr_tail.encode()
    outcome, message = log.judge(last, oom_kills, stderr_tail, machine_oom_kills)
    if len(logs) == 1:
        return outcome, message
    if not ends:
        return outcome, f"the process that starts the ranks: {message}"
    if outcome is not Outcome.OOM_KILLED:
        return outcome, f"rank {number}: {message}"
    killed = [rank for rank, end in ends.items() if end.signal == signal.SIGKILL]
    return outcome, f"{_named(killed or [number])}: {message}"


def lost(oom_kills: int) -> str:
    killed = f"{oom_kills} process{'es' * (oom_kills > 1)}"
    return f"the kernel killed {killed} of this measurement for lack of memory"


def _places(logs: Sequence[EventLog]) -> list[tuple[str, list[int]]]:
    """Return the ranks by their position in words, those with the fewest ended phases first."""
    numbers: dict[str, list[int]] = {}
    for number, log in enumerate(logs):
        numbers.setdefault("ended" if log.done else log.where(), []).append(number)
    return sorted(
        numbers.items(),
        key=lambda item: (logs[item[1][0]].done, len(logs[item[1][0]].phases), len(item[1])),
    )


def _named(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
