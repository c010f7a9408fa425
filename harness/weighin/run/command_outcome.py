"""Derive the outcome of a command that has ended, and end the processes that it left running."""

import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from weighin.cell import Cell
from weighin.child_process import signal_each
from weighin.isolation.base import Exit, RunningCommand
from weighin.probes import kernel_log
from weighin.probes.process_table import command_of
from weighin.records import thrashing
from weighin.result import Kill, Outcome, Stopped
from weighin.text import one_line
from weighin.units import format_bytes

_PAUSE_S: Final = 0.01
_COMMAND_LENGTH: Final = 120
_FULL: Final = 0.9  # of the command's limit; a kill at a smaller charge was for another limit


@dataclass(frozen=True, slots=True)
class Facts:
    """What weighin knows about a command that has ended; a figure that was not measured is None.

    Attributes:
        in_time: whether the command ended, or a server was ready, before the time-out.
        kills: the kills in the kernel's log; None if this user may not read the log.
        limits: the limits of the cgroups around the command, the smallest first.
        ready: whether a server was ready before it was stopped; None if the command is no server.
        stopped: why weighin killed the command; None if weighin did not kill it.
    """

    cell: Cell
    ended: Exit
    in_time: bool
    oom_kills: int | None
    machine_oom_kills: int | None
    kills: Sequence[Kill] | None
    peak_bytes: int | None
    limits: Sequence[tuple[int, Path]]
    ready: bool | None = None
    stopped: Stopped | None = None


def judge(facts: Facts) -> tuple[Outcome, str]:
    """Return the outcome of a command, and the proof of this outcome in one line.

    Any kill for lack of memory makes the outcome ``oom_killed``, even if the first process ended
    well, because a pipeline that lost a process may print a wrong result.
    """
    ended, kills = facts.ended, facts.kills or ()
    if facts.ready and not facts.oom_kills:
        return Outcome.OK, ""  # weighin stopped a server that was ready
    if facts.oom_kills or kills or (ended.oom_killed and ended.signal == signal.SIGKILL):
        return Outcome.OOM_KILLED, _killed(facts)
    if facts.stopped and facts.stopped.timeout_s is None:
        return Outcome.THRASHING, thrashing.words(facts.stopped)
    if not facts.in_time:
        assert facts.stopped
        how = "still running" if facts.ready is None else "not ready"
        return Outcome.TIMEOUT, f"{how} after {facts.stopped.timeout_s:g} s"
    if facts.oom_kills is None and facts.machine_oom_kills and ended.signal == signal.SIGKILL:
        return Outcome.OOM_KILLED, "killed by the kernel when the whole machine ran out of memory"
    return (Outcome.COMMAND_FAILED, how) if (how := _failure(facts)) else (Outcome.OK, "")


def _failure(facts: Facts) -> str:
    """Return how a command failed, by its exit code or by a signal; empty if it succeeded."""
    ended = facts.ended
    if ended.signal == signal.SIGKILL:
        return f"killed by SIGKILL, not for lack of memory{_room(facts)}"
    if ended.signal:
        return f"ended by {ended.signal_name}"
    if facts.ready is False:
        return f"exit code {ended.code} before the server was ready"
    return f"exit code {ended.code}" if ended.code else ""


def _killed(facts: Facts) -> str:
    kills = facts.kills or ()
    number = max(facts.oom_kills or 0, len(kills), 1)
    if not kills:
        who = "a process" if number == 1 else f"{number} processes"
    else:
        who = ", ".join(f"{kill.command} (pid {kill.pid})" for kill in kills[:3])
        who += f" and {number - 3} more" if number > 3 else ""
    lived = "" if facts.ended.signal == signal.SIGKILL else "; the command's first process lived on"
    return f"the kernel killed {who} for lack of memory: {_limit(facts)}{lived}"


def _limit(facts: Facts) -> str:
    """Say which limit the command reached, from the kernel's log, or else from the command's peak."""
    own = facts.cell.ram_limit_bytes
    of = {kill.limit_of for kill in facts.kills or ()} - {kernel_log.UNKNOWN}
    if not of and own and facts.peak_bytes and facts.peak_bytes >= _FULL * own:
        of = {""}
    if of == {""} and own:
        return f"the command reached its RAM limit of {format_bytes(own)}"
    if kernel_log.MACHINE in of:
        return "the machine had no memory left"
    for kill in facts.kills or ():
        if kill.limit_of in of - {""}:
            size = f" of {format_bytes(kill.limit_bytes)}" if kill.limit_bytes else ""
            return f"the command reached the limit{size} of {_group(kill)}"
    if facts.limits and (own is None or facts.limits[0][0] < own):
        limit, group = facts.limits[0]
        return f"the command reached the limit of {format_bytes(limit)} of the outer cgroup {group}"
    return "the command reached the limit of an outer cgroup, or the end of the machine's memory"


def _group(kill: Kill) -> str:
    if kill.limit_is == "around":
        return f"the outer cgroup {kill.limit_of}"
    return f"the cgroup {kill.limit_of}" + f" {kill.limit_place}" * bool(kill.limit_is)


def with_limits(
    kills: Sequence[Kill], own_bytes: int | None, around: Sequence[tuple[int, Path]]
) -> tuple[Kill, ...]:
    """Return the kills, each with its limit's size: the command's own, or a cgroup's in ``around``."""
    return tuple(
        replace(kill, limit_bytes=_size(kill.limit_of, own_bytes, around)) for kill in kills
    )


def _size(of: str, own_bytes: int | None, around: Sequence[tuple[int, Path]]) -> int | None:
    if not of:
        return own_bytes
    return next((limit for limit, group in around if f"{group}".endswith(of)), None)


def _room(facts: Facts) -> str:
    limit, peak = facts.cell.ram_limit_bytes, facts.peak_bytes
    if limit is None or peak is None or peak >= limit:
        return ": the kernel counts no kill, so another process sent SIGKILL"
    return (
        f": {format_bytes(limit - peak)} of its limit were never used, so another process sent"
        " SIGKILL"
    )


def end_rest(running: RunningCommand, grace_s: float, settle_s: float) -> tuple[str, ...]:
    """End the processes of a command that outlive its first process, and return their command lines.

    A process that ends by itself within ``settle_s`` is not listed. The other processes get SIGTERM,
    and SIGKILL after ``grace_s``; one that this user may not signal is neither listed nor waited for.
    """
    names, spared = [], {running.pid}
    for pid in _wait_for_rest(running, settle_s, spared):
        name = command_line(pid)
        try:
            signal_each([pid], signal.SIGTERM)
            names.append(name)
        except PermissionError:
            spared.add(pid)
    if _wait_for_rest(running, grace_s, spared) or len(spared) > 1:
        running.kill()  # of a container, the engine ends also those
    return tuple(names)


def _wait_for_rest(
    running: RunningCommand, patience_s: float, spared: Collection[int]
) -> list[int]:
    """Wait up to ``patience_s`` for the end of all processes that are not ``spared``; return the pids
    of those that still run.
    """
    deadline = time.monotonic() + patience_s
    while rest := [pid for pid in running.members() if pid not in spared]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_PAUSE_S)
    return rest


def command_line(pid: int) -> str:
    """Return at most 120 characters of a process's command line; its pid if it has ended."""
    try:
        text = command_of(pid)
    except OSError:
        text = ""
    return one_line(text, _COMMAND_LENGTH) or f"process {pid}"
