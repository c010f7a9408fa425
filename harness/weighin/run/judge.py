"""Derive a cell's outcome from how it ended, from what it reported, and from what the kernel tells."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV
from typing import Final

from weighin.cell import FORWARD, Cell, is_of_use
from weighin.child_process import printed_lines
from weighin.isolation.base import Exit
from weighin.probes import kernel_log
from weighin.records import verdict
from weighin.result import BROKEN, UNNAMED, Kill, Memory, Outcome, Peaks, Stopped
from weighin.run.listener import Reported
from weighin.text import few, one_line
from weighin.units import MIB, format_bytes, format_exact, format_seconds

_LACK_OF_MEMORY = r"MemoryError|(?i:can't allocate|cannot allocate)"  # of Python, torch, the kernel
_CRASHES = (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL)  # signals that code sends to itself
_FULL: Final = 0.9  # of the cell's limit; a kill at a smaller charge was for another limit
_BY_KERNEL: Final = "killed by the kernel for lack of memory"
_BY_MACHINE: Final = "killed by the kernel when the whole machine ran out of memory"
_BY_OTHER: Final = "killed by SIGKILL, not for lack of memory: the kernel counts no kill, so another process sent SIGKILL"
_LOST: Final = f"the measured process lost a child, {_BY_KERNEL}"
_RUNNING: Final = Exit(None, still_runs=True)
_Judged = tuple[Outcome, str]


@dataclass(slots=True)
class Evidence:
    """What weighin knows about a cell; None: not measured."""

    cell: Cell
    ended: Exit = _RUNNING
    ranks: Sequence[Reported] = ()  # of a command, the main process
    exits: dict[int, Exit] = field(default_factory=dict)  # of ranks, in order of time
    stopped: Stopped | None = None  # why weighin killed the cell
    oom_kills: int | None = None
    machine_oom_kills: int | None = None
    kills: Sequence[Kill] | None = None  # None: this user may not read the kernel's log
    peak_bytes: int | None = None  # of the cgroup
    limits: Sequence[tuple[int, Path]] = ()  # of the cgroups around it, the smallest first
    ready: bool | None = None  # whether a server was ready before it was stopped
    escape: str = ""  # how a process got out of the limit
    printed: bytes = b""  # the last that a worker printed
    changed: _Judged | None = None  # the outcome and the reason if the checkpoint's files changed

    @property
    def failed_ranks(self) -> dict[int, Exit]:
        return {rank: each for rank, each in [*self.exits.items()] if not self.ranks[rank].is_done}

    @property
    def culprit(self) -> int:
        """The rank that decides: the first killed for lack of memory, else the first that failed, else the slowest."""
        failed, ranks = self.failed_ranks, self.ranks
        killed = [rank for rank, each in failed.items() if each.signal == SIGKILL]
        if failed:
            return killed[0] if killed and self.oom_kills != 0 else next(iter(failed))
        places = [each.where for each in ranks]
        ended = [sum(phase.name != UNNAMED for phase in each.phases) for each in ranks]
        progress = [
            (each.is_done, number, places.count(each.where))
            for each, number in zip(ranks, ended, strict=True)
        ]
        return progress.index(min(progress))

    @property
    def where(self) -> str:
        """The position of the culprit in words: "in phase 'read'", or of ranks, "rank 1 in phase 'read'"."""
        number = self.culprit
        of_rank = f"rank {number} " if len(self.ranks) > 1 else ""
        return of_rank + self.ranks[number].where


def judge(end: Evidence) -> _Judged:
    """Return a cell's outcome, and the reason in one line. A high peak is no proof of a kill: only the kernel tells it."""
    is_load = end.cell.operation != "command"
    outcome, why = _of_load(end) if is_load else _of_command(end)
    if end.escape:
        now, what = Outcome.STRATEGY_FAILED, "its figures and its limit are not valid"
        if not is_load:
            now = Outcome.MEASUREMENT_FAILED
            what = "the figures are of a part of it and its limit is not valid (--isolation process measures all processes)"
        outcome, why = void(outcome, why, now, f"{end.escape}, so {what}")
    return void(outcome, why, *end.changed) if end.changed else (outcome, why)


def void(outcome: Outcome, why: str, now: Outcome, because: str) -> _Judged:
    return now, f"{because}; it ended with {outcome}" + f": {why}" * bool(why)


def _of_load(end: Evidence) -> _Judged:
    """Judge a load or a save: a time-out counts before a kill, as a strategy that waits for a lost child is at fault itself."""
    ranks, stopped = end.ranks, end.stopped
    if stopped and stopped.timeout_s is None:
        return Outcome.THRASHING, f"{verdict.why_killed(stopped)}; {end.where}"
    if stopped:
        return Outcome.TIMEOUT, f"still running after {stopped.timeout_s:g} s, {end.where}"
    if all(each.is_done for each in ranks):
        outcome, message = Outcome.OK, ""
        if end.oom_kills:
            outcome, message = Outcome.CHILD_KILLED, lost(end.oom_kills)
    else:
        number = end.culprit
        outcome, message = _of_failed(end, ranks[number], end.failed_ranks.get(number, end.ended))
        if len(ranks) > 1:
            who = f"rank {number}" if end.failed_ranks else "the process that starts the ranks"
            message = f"{who}: {message}"
    if outcome is Outcome.USE_FAILED:
        message += "; every weight is right"
    elif outcome in BROKEN and _only_forward_failed(end):  # so the load is right
        return Outcome.OK, (
            f"the forward pass of {end.cell.model.title} fails: {message}. Every weight is"
            " right. To measure the load alone: --use none"
        )
    if len(ranks) == 1 and (outcome is Outcome.CHILD_KILLED or _LOST in message):
        for kill in (each for each in (end.kills or ())[:3] if not each.is_main):
            message += (
                f"; the kernel killed {kill.command} (process {kill.pid}) with"
                f" {format_bytes(kill.anon_bytes or 0)} of anonymous memory"
            )
        if end.peak_bytes:
            message += f"; the peak of the cgroup was {format_bytes(end.peak_bytes)}"
    return outcome, message


def _of_failed(end: Evidence, reported: Reported, ended: Exit) -> _Judged:
    """Judge the process of a load that has failed: of ranks, the culprit."""
    told, oom_kills, is_killed = reported.told, end.oom_kills, ended.signal == SIGKILL
    limit = f": {other}" if oom_kills and (other := _other_limit(end)) else ""
    outcome, message, then = told.outcome, told.message, f"failed: {told.message}"
    has_lost = outcome in (Outcome.STRATEGY_FAILED, Outcome.USE_FAILED)
    if not outcome and is_killed and oom_kills:
        return Outcome.OOM_KILLED, f"{_BY_KERNEL} {reported.where}{limit}"
    if not outcome and is_killed and oom_kills is None and end.machine_oom_kills:
        return Outcome.OOM_KILLED, f"{_BY_MACHINE}, {reported.where}"
    if not outcome:
        then, has_lost = f"ended with exit code {ended.code}", ended.signal is None
        if ended.still_runs:
            then, has_lost = "does not end, not even after SIGKILL,", False
        elif ended.signal:
            then = f"was ended by {ended.signal_name}"
        lines = printed_lines(reported.stderr_tail.encode() if end.failed_ranks else end.printed)
        then += f" {reported.where}" + (f": {one_line(lines[-1], 200)}" if lines else "")
        outcome, message = Outcome.MEASUREMENT_FAILED, f"the measured process {then}"
        if told.baseline is not None and not ended.still_runs:
            is_use = reported.current != FORWARD and is_of_use(reported.current or "")
            outcome = Outcome.USE_FAILED if is_use else Outcome.STRATEGY_FAILED
    if oom_kills and has_lost:
        return Outcome.OOM_KILLED, f"{_LOST}{limit}; then it {then}"
    return outcome, message


def _only_forward_failed(end: Evidence) -> bool:
    """Tell whether the model's own forward pass alone failed, by an error or a crash of its own."""
    number, ranks = end.culprit, end.ranks
    last = end.failed_ranks.get(number, end.ended if len(ranks) == 1 else None)
    is_own = bool(last and last.signal in _CRASHES)
    if ranks[number].told.outcome:
        is_own = not re.search(_LACK_OF_MEMORY, ranks[number].told.message)
    return (
        is_own
        and all(each.told.ready_at_ns is not None for each in ranks)
        and all(each.is_done or each.current == FORWARD for each in ranks)
    )


def lost(oom_kills: int) -> str:
    killed = f"{oom_kills} process{'es' * (oom_kills > 1)}"
    return f"the kernel killed {killed} of this measurement for lack of memory"


def _of_command(end: Evidence) -> _Judged:
    """Judge a command: any kill counts, because a pipeline that lost a process may print a wrong result."""
    ended, stopped, failed = end.ended, end.stopped, Outcome.COMMAND_FAILED
    if stopped and not (end.ready or end.oom_kills or end.kills):
        if stopped.timeout_s is None:
            return Outcome.THRASHING, verdict.why_killed(stopped)
        how = "still running" if end.ready is None else "not ready"
        return Outcome.TIMEOUT, f"{how} after {stopped.timeout_s:g} s"
    is_killed, code = ended.signal == SIGKILL, f"exit code {ended.code}"
    by_machine = is_killed and end.oom_kills is None and end.machine_oom_kills
    for test, outcome, words in (
        (end.ready and not end.oom_kills, Outcome.OK, ""),  # weighin stopped a server
        (end.oom_kills or end.kills, Outcome.OOM_KILLED, _killed(end)),
        (by_machine, Outcome.OOM_KILLED, _BY_MACHINE),
        (is_killed, failed, _BY_OTHER),
        (ended.signal, failed, f"ended by {ended.signal_name}"),
        (end.ready is False, failed, f"{code} before the server was ready"),
        (ended.code, failed, code),
    ):
        if test:
            return outcome, words
    return Outcome.OK, ""


def _killed(end: Evidence) -> str:
    named, number = [f"{kill.command} (pid {kill.pid})" for kill in end.kills or ()], end.oom_kills
    who = few(named) or f"{number} process{'es' * (number != 1)}"
    lived = "" if end.ended.signal == SIGKILL else "; the command's first process lived on"
    limit = format_exact(end.cell.ram_limit_bytes or 0, " ")
    which = _other_limit(end) or f"the command reached its RAM limit of {limit}"
    return f"the kernel killed {who} for lack of memory: {which}{lived}"


def _other_limit(end: Evidence) -> str:
    """Say which limit was reached, from the kernel's log, or else from the peak; empty for the own."""
    own, what = end.cell.ram_limit_bytes, f"the {end.cell.operation} reached the limit"
    kills = [kill for kill in end.kills or () if kill.limit_of != kernel_log.UNKNOWN]
    others = [kill for kill in kills if kill.limit_of]
    smaller = [each for each in end.limits if own is None or each[0] < own]
    is_full = own and (end.peak_bytes or (0 if smaller else own)) >= _FULL * own
    if own and not others and (kills or is_full):
        return ""
    if any(kill.limit_of == kernel_log.MACHINE for kill in others):
        return "the machine had no memory left"
    if others:
        kill = others[0]
        size = f" of {format_bytes(kill.limit_bytes)}" if kill.limit_bytes else ""
        outer = "outer " if kill.limit_is == "around" else ""
        where = {"below": " below its own", "elsewhere": " outside its own"}.get(kill.limit_is, "")
        return f"{what}{size} of the {outer}cgroup {kill.limit_of}{where}"
    if smaller:
        limit, around = smaller[0]
        return f"{what} of {format_bytes(limit)} of the outer cgroup {around}"
    return f"{what} of an outer cgroup, or the end of the machine's memory"


def is_beyond(bytes_: int | None, bound_bytes: int | None) -> bool:
    if bytes_ is None or bound_bytes is None:
        return False
    # The kernel counts pages for each processor, and adds them up later.
    return bytes_ > bound_bytes + max(4 * MIB, 0.01 * bound_bytes)


def contradiction(
    cell: Cell, peaks: Peaks, baseline: Memory | None, spent_ns: int, wall_ns: int
) -> str:
    """Say which figures contradict each other: the measured program has got around the measurement."""
    outside, reset = "it had memory outside of its cgroup", "the peak was reset"
    # The sum over several ranks is not of one instant, and has the pages that they share twice.
    anon = peaks.anon_sampled_bytes if cell.ranks <= 1 else None
    base, limit = baseline.rss_bytes if baseline else None, cell.ram_limit_bytes
    for size, what, bound, than, cause in (
        (anon, "sampled anonymous memory", peaks.cgroup_bytes, "peak of the cgroup", outside),
        (peaks.cgroup_bytes, "peak of the cgroup", limit, "limit", "the limit was changed"),
        (anon, "sampled anonymous memory", peaks.rss_bytes, "exact peak of the process", reset),
        (base, "memory before the load", peaks.rss_bytes, "exact peak of the load", reset),
    ):
        if is_beyond(size, bound):
            sizes = [format_bytes(each or 0) for each in (size, bound)]
            return f"the {what}, {sizes[0]}, is more than the {than}, {sizes[1]}: {cause}"
    if spent_ns > wall_ns:
        times = [format_seconds(each) for each in (spent_ns, wall_ns)]
        return f"a time, {times[0]}, is longer than the whole measurement, {times[1]}"
    return ""
