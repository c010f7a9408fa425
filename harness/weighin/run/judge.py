"""Derive a cell's outcome from how it ended, from what it reported, and from what the kernel tells."""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV
from typing import Final

from weighin.cell import FORWARD, Cell, is_of_use
from weighin.child_process import printed_lines
from weighin.isolation.base import Exit
from weighin.probes import kernel_log
from weighin.records import verdict
from weighin.result import BROKEN, UNNAMED, Kill, Memory, Outcome, Peaks, Stopped
from weighin.run.listener import Reported
from weighin.text import one_line
from weighin.units import MIB, format_bytes, format_limit, format_seconds

_LACK_OF_MEMORY = r"MemoryError|(?i:can't allocate|cannot allocate)"  # of Python, torch, the kernel
_CRASHES = (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL)  # signals that code sends to itself
_STDERR_LENGTH: Final = 200
_FULL: Final = 0.9  # of the cell's limit; a kill at a smaller charge was for another limit
_NAMED: Final = 3  # the most killed processes that a message names
_LOST: Final = "the measured process lost a child, killed by the kernel for lack of memory"
_SLACK_BYTES = 4 * MIB  # the kernel counts pages for each processor, and adds them up later
_SLACK_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Evidence:
    """What weighin knows about a cell that has ended; a figure that was not measured is None."""

    cell: Cell
    ended: Exit
    ranks: Sequence[Reported] = ()  # of a command, the main process
    ends: Mapping[int, Exit] = field(default_factory=dict)  # of failed ranks, in order of time
    stopped: Stopped | None = None  # why weighin killed the cell
    oom_kills: int | None = None
    machine_oom_kills: int | None = None
    kills: Sequence[Kill] | None = None  # None: this user may not read the kernel's log
    peak_bytes: int | None = None  # of the cgroup
    limits: Sequence[tuple[int, Path]] = ()  # of the cgroups around it, the smallest first
    ready: bool | None = None  # whether a server was ready before it was stopped
    escape: str = ""  # how a process got out of the limit
    stalled: str = ""  # what the slow disk of a load still waited for
    stderr_tail: bytes = b""


def judge(end: Evidence) -> tuple[Outcome, str]:
    """Return a cell's outcome, and the reason in one line; for "ok", a warning. It is ``oom_killed`` only if a
    counter of the kernel shows a kill, of a command also the kernel's log; a high peak is no proof. Without a
    cgroup, the whole machine's counter counts.
    """
    if end.cell.operation != "command":
        outcome, why = _of_load(end)
        what, now = "its figures and its limit are not valid", Outcome.STRATEGY_FAILED
    else:
        outcome, why = _of_command(end)
        what = "the figures are of a part of it and its limit is not valid"
        what += " (--isolation process measures all processes)"
        now = Outcome.MEASUREMENT_FAILED
    return void(outcome, why, now, f"{end.escape}, so {what}") if end.escape else (outcome, why)


def void(outcome: Outcome, why: str, now: Outcome, because: str) -> tuple[Outcome, str]:
    return now, f"{because}; it ended with {outcome}" + f": {why}" * bool(why)


def _of_load(end: Evidence) -> tuple[Outcome, str]:
    """Judge a load or a save. A time-out counts before a kill, unlike a command's: a strategy that has lost a
    child and waits for it forever is at fault itself.
    """
    ranks, stopped = end.ranks, end.stopped
    if stopped and stopped.timeout_s is not None:
        message = f"still running after {stopped.timeout_s:g} s, {where(ranks)}"
        return Outcome.TIMEOUT, message + (f"; {end.stalled}" if end.stalled else "")
    if stopped:
        return Outcome.THRASHING, f"{verdict.why_killed(stopped)}; {where(ranks)}"
    if all(each.is_done for each in ranks):
        if not end.oom_kills:
            return Outcome.OK, ""
        return Outcome.CHILD_KILLED, lost(end.oom_kills) + _killed_children(end)
    number, kills = culprit(end), end.kills or ()
    last = end.ends.get(number, end.ended)
    outcome, message = _of_process(end, ranks[number], last)
    if len(ranks) > 1 and not end.ends:
        message = f"the process that starts the ranks: {message}"
    elif len(ranks) > 1:
        killed = [rank for rank, each in end.ends.items() if each.signal == signal.SIGKILL]
        is_oom = outcome is Outcome.OOM_KILLED and killed
        message = f"{_named(killed if is_oom else [number])}: {message}"
    if outcome is Outcome.USE_FAILED:
        message += "; every weight is right"
    elif outcome in BROKEN and _only_forward_failed(end):  # so the load is right
        return Outcome.OK, (
            f"the forward pass of {end.cell.model.title} fails: {message}. Every weight is"
            " right. To measure the load alone: --use none"
        )
    if outcome is Outcome.OOM_KILLED:
        has_limit = end.cell.ram_limit_bytes or end.limits or any(kill.limit_of for kill in kills)
        if end.oom_kills and end.peak_bytes is not None and has_limit:
            before, what, after = message.partition(_LOST)
            message = f"{before}{what}: {other}{after}" if (other := _other_limit(end)) else message
        if _LOST in message:
            message += _killed_children(end)
    return outcome, message


def _of_process(end: Evidence, reported: Reported, ended: Exit) -> tuple[Outcome, str]:
    oom_kills = end.oom_kills
    if reported.told.outcome:
        outcome, message = reported.told.outcome, reported.told.message
        if oom_kills and outcome in (Outcome.STRATEGY_FAILED, Outcome.USE_FAILED):
            outcome, message = Outcome.OOM_KILLED, f"{_LOST}; then it failed: {message}"
        return outcome, message
    if ended.signal == signal.SIGKILL and oom_kills:
        return Outcome.OOM_KILLED, f"killed by the kernel for lack of memory {reported.where}"
    if ended.signal == signal.SIGKILL and oom_kills is None and end.machine_oom_kills:
        why = "killed by the kernel when the whole machine ran out of memory"
        return Outcome.OOM_KILLED, f"{why}, {reported.where}"
    how = f"ended with exit code {ended.code}"
    if ended.still_runs:
        how = "does not end, not even after SIGKILL,"
    elif ended.signal:
        how = f"was ended by {ended.signal_name}"
    lines = printed_lines(reported.stderr_tail.encode() if end.ends else end.stderr_tail)
    last = f": {one_line(lines[-1], _STDERR_LENGTH)}" if lines else ""
    if oom_kills and ended.signal is None and not ended.still_runs:
        return Outcome.OOM_KILLED, f"{_LOST}; then it {how} {reported.where}{last}"
    in_load = reported.told.baseline is not None and not ended.still_runs
    outcome = Outcome.STRATEGY_FAILED if in_load else Outcome.MEASUREMENT_FAILED
    if in_load and reported.current != FORWARD and is_of_use(reported.current or ""):
        outcome = Outcome.USE_FAILED
    return outcome, f"the measured process {how} {reported.where}{last}"


def _only_forward_failed(end: Evidence) -> bool:
    """Tell whether the model's own forward pass alone failed, by an error or a crash of its own."""
    number = culprit(end)
    reported, last = end.ranks[number], end.ends.get(number)
    last = last or (end.ended if len(end.ranks) == 1 else None)
    told = reported.told.outcome and not re.search(_LACK_OF_MEMORY, reported.told.message)
    return (
        all(each.told.ready_at_ns is not None for each in end.ranks)
        and reported.current == FORWARD
        and all(each.is_done or each.current == FORWARD for each in end.ranks)
        and bool(told if reported.told.outcome else last and last.signal in _CRASHES)
    )


def culprit(end: Evidence) -> int:
    """Return the rank that decides a failed cell's outcome: the first that the kernel killed for lack of memory,
    else the first that failed, else the one with the fewest ended phases.
    """
    killed = [rank for rank, each in end.ends.items() if each.signal == signal.SIGKILL]
    if killed and end.oom_kills != 0:
        return killed[0]
    return next(iter(end.ends), _places(end.ranks)[0][1][0])


def where(ranks: Sequence[Reported]) -> str:
    """Return each rank's position: "rank 2 in phase 'read', ranks 0 and 1 after 'touch'"."""
    if len(ranks) == 1:
        return ranks[0].where
    return ", ".join(f"{_named(numbers)} {place}" for place, numbers in _places(ranks))


def _places(ranks: Sequence[Reported]) -> list[tuple[str, list[int]]]:
    """Return the ranks by their position in words, those with the fewest ended phases first."""
    numbers: dict[str, list[int]] = {}
    for number, reported in enumerate(ranks):
        numbers.setdefault("ended" if reported.is_done else reported.where, []).append(number)

    def order(item: tuple[str, list[int]]) -> tuple[bool, int, int]:
        _, (first, *others) = item
        named = [phase for phase in ranks[first].phases if phase.name != UNNAMED]  # not a mere gap
        return ranks[first].is_done, len(named), len(others)

    return sorted(numbers.items(), key=order)


def _named(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def lost(oom_kills: int) -> str:
    killed = f"{oom_kills} process{'es' * (oom_kills > 1)}"
    return f"the kernel killed {killed} of this measurement for lack of memory"


def _killed_children(end: Evidence) -> str:
    """Describe the children that the kernel killed, and the peak of the cell's cgroup."""
    if len(end.ranks) > 1:
        return ""
    text = "".join(
        f"; the kernel killed {kill.command} (process {kill.pid}) with"
        f" {format_bytes(kill.anon_bytes or 0)} of anonymous memory"
        for kill in (end.kills or ())[:_NAMED]
        if not kill.is_main
    )
    peak = end.peak_bytes
    return f"{text}; the peak of the cgroup was {format_bytes(peak)}" if peak else text


def _of_command(end: Evidence) -> tuple[Outcome, str]:
    """Judge a command: any kill counts, even if the first process ended well, because a pipeline that lost a
    process may print a wrong result.
    """
    ended, kills, stopped = end.ended, end.kills or (), end.stopped
    if end.ready and not end.oom_kills:
        return Outcome.OK, ""  # weighin stopped a server that was ready
    if end.oom_kills or kills:
        return Outcome.OOM_KILLED, _killed(end)
    if stopped and stopped.timeout_s is None:
        return Outcome.THRASHING, verdict.why_killed(stopped)
    if stopped:
        how = "still running" if end.ready is None else "not ready"
        return Outcome.TIMEOUT, f"{how} after {stopped.timeout_s:g} s"
    if end.oom_kills is None and end.machine_oom_kills and ended.signal == signal.SIGKILL:
        return Outcome.OOM_KILLED, "killed by the kernel when the whole machine ran out of memory"
    how = f"exit code {ended.code}"
    if ended.signal == signal.SIGKILL:
        limit, peak, proof = end.cell.ram_limit_bytes, end.peak_bytes, "the kernel counts no kill"
        if limit is not None and peak is not None and peak < limit:
            proof = f"{format_bytes(limit - peak)} of its limit were never used"
        how = f"killed by SIGKILL, not for lack of memory: {proof}, so another process sent SIGKILL"
    elif ended.signal:
        how = f"ended by {ended.signal_name}"
    elif end.ready is False:
        how += " before the server was ready"
    elif not ended.code:
        how = ""
    return (Outcome.COMMAND_FAILED if how else Outcome.OK), how


def _killed(end: Evidence) -> str:
    kills = end.kills or ()
    number = max(end.oom_kills or 0, len(kills), 1)
    if not kills:
        who = "a process" if number == 1 else f"{number} processes"
    else:
        who = ", ".join(f"{kill.command} (pid {kill.pid})" for kill in kills[:_NAMED])
        who += f" and {number - _NAMED} more" if number > _NAMED else ""
    lived = "" if end.ended.signal == signal.SIGKILL else "; the command's first process lived on"
    limit = f"the command reached its RAM limit of {format_limit(end.cell.ram_limit_bytes or 0)}"
    return f"the kernel killed {who} for lack of memory: {_other_limit(end) or limit}{lived}"


def _other_limit(end: Evidence) -> str:
    """Say which limit was reached, from the kernel's log, or else from the peak; empty for the own."""
    own, what = end.cell.ram_limit_bytes, f"the {end.cell.operation} reached the limit"
    of = {kill.limit_of for kill in end.kills or ()} - {kernel_log.UNKNOWN}
    if not of and own and end.peak_bytes and end.peak_bytes >= _FULL * own:
        of = {""}
    if of == {""} and own:
        return ""
    if kernel_log.MACHINE in of:
        return "the machine had no memory left"
    for kill in end.kills or ():
        if kill.limit_of in of - {""}:
            size = f" of {format_bytes(kill.limit_bytes)}" if kill.limit_bytes else ""
            group = f"the outer cgroup {kill.limit_of}"
            if kill.limit_is != "around":
                where = {"below": " below its own", "elsewhere": " outside its own"}
                group = f"the cgroup {kill.limit_of}{where.get(kill.limit_is, '')}"
            return f"{what}{size} of {group}"
    if end.limits and (own is None or end.limits[0][0] < own):
        limit, around = end.limits[0]
        return f"{what} of {format_bytes(limit)} of the outer cgroup {around}"
    return f"{what} of an outer cgroup, or the end of the machine's memory"


def is_beyond(bytes_: int | None, bound_bytes: int | None) -> bool:
    if bytes_ is None or bound_bytes is None:
        return False
    return bytes_ > bound_bytes + max(_SLACK_BYTES, _SLACK_SHARE * bound_bytes)


def contradictions(
    cell: Cell, peaks: Peaks, baseline: Memory | None, spent_ns: int, wall_ns: int
) -> Iterator[str]:
    """Yield how figures contradict each other: what was measured got around the measurement."""
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
            yield f"the {what}, {sizes[0]}, is more than the {than}, {sizes[1]}: {cause}"
    if spent_ns > wall_ns:
        times = [format_seconds(each) for each in (spent_ns, wall_ns)]
        yield f"a time, {times[0]}, is longer than the whole measurement, {times[1]}"
