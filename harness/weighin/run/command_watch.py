"""Measure one command from outside, and build its result."""

import os
import signal
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weighin.cell import Cell
from weighin.isolation.base import RunningCommand
from weighin.probes import kernel_log, mounts
from weighin.probes.cgroup import (
    Counters,
    MemoryCgroup,
    PeakMark,
    grown,
    limits_around,
    memory_cgroup_of,
    pressure_file_of,
    read_machine_oom_kills,
)
from weighin.probes.memory import FamilyMemory, GroupMemory
from weighin.probes.sampler import Sampler
from weighin.records.repeats import largest
from weighin.result import (
    SCHEMA,
    Cost,
    Faults,
    Kill,
    Outcome,
    Peaks,
    Pressure,
    Process,
    Ran,
    Result,
    Sample,
    Stack,
    Stopped,
)
from weighin.run import command_outcome, plausible, readiness
from weighin.run.program_phases import PhaseListener
from weighin.run.thrash_guard import ThrashGuard
from weighin.settings.definition import Settings
from weighin.text import few, one_line
from weighin.units import MIB, format_bytes

if TYPE_CHECKING:
    from weighin.probes.stacks import StackTaker

_SETTLE_S: Final = 0.3  # in which short children of the command end by themselves
_PATIENCE_S: Final = 10.0
_CLOCK_S: Final = 0.02  # the kernel's clock for files is a little behind


class CommandWatch:
    """Measures one command from its start until its end.

    Call ``begin``, ``wait``, ``end`` and ``result`` in this order, or ``abandon`` if the command does
    not start.
    """

    def __init__(self, cell: Cell, settings: Settings, folder: Path) -> None:
        self.samples: list[Any] = []
        self.readiness = readiness.Readiness(settings, self._read_figures)
        self._listener = PhaseListener(folder)
        self._cell, self._settings = cell, settings
        self._log = kernel_log.position()
        self._started_s = time.time()
        self._machine_oom_kills = read_machine_oom_kills()
        self._started_ns = time.monotonic_ns()
        self._stopped: Stopped | None = None
        self._in_time = True
        self._ended: tuple[str, ...] = ()
        self._kernel_bytes: int | None = None
        self._left = ""

    def cell_with_phases(self) -> Cell:
        """Return the cell with an environment variable that names the socket for reporting phases."""
        environment = self._cell.environment | self._listener.environment
        return replace(self._cell, environment=environment)

    def abandon(self) -> None:
        """Close the socket for phases, because the command could not be started."""
        self._listener.close()
        if self._log is not None:
            os.close(self._log)

    def begin(self, running: RunningCommand, guard: ThrashGuard | None = None) -> None:
        """Begin to measure a command that has just started; ``guard`` tests if the command thrashes."""
        self._running, self._guard = running, guard
        self._cgroup = (
            MemoryCgroup(running.cgroup, pressure_file_of(running.pid)) if running.cgroup else None
        )
        self._limits = limits_around(running.cgroup.parent) if running.cgroup else []
        self._home = None if running.cgroup else memory_cgroup_of(running.pid)
        self._mark = PeakMark(self._cgroup) if self._cgroup else None
        self._stacks = _stack_taker(running) if self._settings.stacks else None
        self._sampler = Sampler(
            GroupMemory(self._cgroup, running.pid, running.helpers)
            if self._cgroup
            else FamilyMemory(running.pid),
            at_maximum=self._stacks.look if self._stacks else None,
        )
        self._sampler.start()
        self._listener.watch(self._cgroup)
        self.readiness.begin()

    def wait(self, timeout_s: float) -> bool:
        """Return True when the command has ended, or when a server is ready. Return False after
        ``timeout_s`` seconds, or when the command thrashes.
        """
        is_over = self._thrashes if self._guard else None
        oom_kills = lambda: self._sampler.oom_kills  # noqa: E731
        if self.readiness.wait(self._running, timeout_s, oom_kills, is_over):
            self._stopped = None
            return True
        after_ns = time.monotonic_ns() - self._started_ns
        self._stopped = self._stopped or Stopped(after_ns, timeout_s)
        return False

    def _thrashes(self) -> bool:
        assert self._guard
        self._stopped = self._guard.proof(self._counters, Counters())
        return self._stopped is not None

    def _counters(self) -> Counters:
        return self._mark.counters() if self._mark else Counters()

    def _read_figures(self) -> None:
        """Read the cgroup's figures; called when the server is ready or the command has ended."""
        self._last = self._counters()
        self._peak_bytes = largest((self._last.peak_bytes, self._listener.peak_bytes))
        if self._cgroup:
            self._kernel_bytes = self._cgroup.read_kernel("max_usage_in_bytes")

    def end(self, *, in_time: bool) -> None:
        """Read the last figures, end all processes of the command, and reap its first process."""
        running = self._running
        self._in_time = in_time
        if self.readiness.ready_ns is not None:
            self.samples = self._sampler.stop()
            readiness.stop(running, self._settings.grace_s)
        elif not in_time:
            running.kill()
            running.wait(_PATIENCE_S)
        self.readiness.end()
        is_ready = self.readiness.ready_ns is not None
        if not is_ready:
            self._read_figures()
        if in_time:
            self._ended = command_outcome.end_rest(running, self._settings.grace_s, _SETTLE_S)
        if not is_ready and self._cgroup:
            self._last = replace(self._last, oom_kills=self._cgroup.read_oom_kills())
        self._exit = running.reap()
        # The last sample has all page cache, which stays in the cgroup after the process's end.
        self.samples = self.samples or self._sampler.stop()
        self._phases, self._tracks = self._listener.close()
        if not is_ready:
            self._peak_bytes = largest((self._peak_bytes, self._listener.peak_bytes))
        self.samples = self._sampler.without_caches()
        if running.shares_terminal and not running.members():  # else a container's files are gone
            last = self.samples[-1] if self._cgroup and self.samples and not is_ready else None
            self._left = _left(self._started_s, last)
        if self._mark:
            self._mark.close()

    def result(self, elapsed_ns: int) -> Result:
        sampler, running = self._sampler, self._running
        machine_oom_kills = grown(self._machine_oom_kills, read_machine_oom_kills())
        assert sampler.table
        processes = sampler.table.processes()
        kills = self._kills(processes)
        if machine_oom_kills == 0:
            kills = ()
        elif kills is not None and kernel_log.has_our_pids():
            machine_oom_kills = 0  # the log names the killed: those of other programs are not ours
        facts = command_outcome.Facts(
            cell=self._cell,
            ended=self._exit,
            in_time=self._in_time,
            oom_kills=largest((self._last.oom_kills, sampler.oom_kills)),
            machine_oom_kills=machine_oom_kills,
            kills=kills,
            peak_bytes=self._peak_bytes,
            limits=self._limits,
            ready=self.readiness.ready_ns is not None if self.readiness.is_expected else None,
            stopped=self._stopped,
        )
        outcome, message = command_outcome.judge(facts)
        # weighin killed a command that thrashes, so its time is no result.
        spent_ns = None if outcome is Outcome.THRASHING else elapsed_ns
        sampled, reclaimable = self._most("needed_bytes"), self._most("reclaimable_bytes") or 0
        by_peak = None if self._peak_bytes is None else max(0, self._peak_bytes - reclaimable)
        by_kernel = self._kernel_bytes and max(0, self._kernel_bytes - sampler.caches_bytes)
        needed = largest((sampled, by_peak, by_kernel))
        is_exact = needed == by_peak and reclaimable <= max(MIB, (needed or 0) // 100)
        some_ns, full_ns = self._last.some_ns, self._last.full_ns
        why = self._stacks.why if self._stacks else ""
        notes = tuple(filter(None, (running.unseen, self._left)))
        result = Result(
            schema=SCHEMA,
            cell=self._cell,
            outcome=outcome,
            message=message,
            peaks=Peaks(
                cgroup_bytes=self._peak_bytes,
                anon_sampled_bytes=self._most("anon_bytes"),
                file_sampled_bytes=self._most("page_cache_bytes"),
                unreclaimable_sampled_bytes=sampled,
                shmem_sampled_bytes=self._most("shmem_bytes"),
                kernel_bytes=self._kernel_bytes,
            ),
            last_phase=self._listener.last_phase,
            phases=self._phases,
            load_ns=spent_ns,
            ready_ns=spent_ns,
            faults=self._faults(),
            pressure=None if some_ns is full_ns is None else Pressure(some_ns, full_ns),
            oom_kills=facts.oom_kills,
            limit_events=self._last.limit_events,
            exit_code=self._exit.shell_code,
            cost=Cost(wall_ns=0, load_ns=spent_ns),
            warnings=tuple(filter(None, (*notes, *self._listener.warnings, why))),
            ran=Ran(
                pid=running.pid,
                peak_ns=sampler.peak.t_ns if sampler.peak else None,
                needed_bytes=needed,
                needed_is_sampled=not is_exact,
                at_peak=sampler.peak,
                notes=notes,
                signal=self._exit.signal,
                survived=self._exit.signal != signal.SIGKILL,
                processes=tuple(map(self._with_highest, processes)),
                kills=tuple(kills or ()),
                stacks=self._taken_stacks(),
                ended=self._ended,
                tracks=self._tracks,
                cold=tuple(self._settings.command(self._cell.strategy).cold),
                frozen_ns=self._stacks.frozen_ns if self._stacks else 0,
            ),
            stopped=self._stopped if outcome in (Outcome.TIMEOUT, Outcome.THRASHING) else None,
        )
        if not (escape := sampler.memory.escape or self._filled_outside()):
            return result
        assert result.ran
        why = f"{escape}, so the figures are of a part of it and its limit is not valid (--isolation process measures all processes)"
        result = replace(result, ran=replace(result.ran, needed_is_sampled=True))
        return plausible.void(result, Outcome.MEASUREMENT_FAILED, why)

    def _most(self, part: str) -> int | None:
        """Return the most memory of a kind in one sample; None without samples."""
        return largest(getattr(one, part) for one in self.samples)

    def _filled_outside(self) -> str:
        """Say if a process had more memory than its cgroup ever had: it left meanwhile."""
        assert self._sampler.table
        most_bytes = self._sampler.table.most_anon_bytes
        if not self._cgroup or not plausible.is_beyond(most_bytes, self._peak_bytes):
            return ""
        return (
            f"a process had {format_bytes(most_bytes)} of anonymous memory, and the command's cgroup"
            f" never more than {format_bytes(self._peak_bytes or 0)}"
        )

    def _kills(self, processes: Sequence[Process]) -> tuple[Kill, ...] | None:
        """Return the kernel log's OOM kills in the command; None if this user may not read the log."""
        running, pids = self._running, [each.pid for each in processes]
        found = kernel_log.kills_since(self._log, running.cgroup, running.pid, pids, self._home)
        own_bytes = self._cell.ram_limit_bytes
        return found and command_outcome.with_limits(found, own_bytes, self._limits)

    def _with_highest(self, process: Process) -> Process:
        """Return the process with its highest RSS in any reading, because each phase resets VmHWM."""
        highest = self._listener.highest_rss_bytes.get(process.pid)
        seen = largest((highest, process.highest_rss_bytes))
        return replace(process, highest_rss_bytes=seen)

    def _taken_stacks(self) -> tuple[Stack, ...]:
        if not self._stacks:
            return ()
        from weighin.run.stack_code import with_code  # takes 0.01 s, with its regular expressions

        return with_code(self._stacks.stacks, self._settings.cwd, self._started_s)

    def _faults(self) -> Faults | None:
        if not self._cgroup or not self.samples:
            return None
        last = self.samples[-1]
        return Faults(last.minor_faults, last.major_faults, self._last.refaults)


def _stack_taker(running: RunningCommand) -> "StackTaker":
    from weighin.probes.stacks import StackTaker  # needs py-spy, and takes time to import

    return StackTaker(running.members, running.cgroup)


def _left(started_s: float, last: Sample | None) -> str:
    """Say which files of a tmpfs that changed since ``started_s`` take memory; empty below 1 MiB.

    ``last`` is the cgroup's sample after the end of all processes, with the shared memory that they
    left. Without it (and a cgroup), a file may be another program's.
    """
    if last and last.shmem_bytes <= MIB:
        return ""
    sizes: dict[str, int] = {}
    for place in (one.place for one in mounts.read() if one.kind in ("tmpfs", "ramfs")):
        for folder, below, names in os.walk(place):
            below[:] = [name for name in below if not os.path.ismount(Path(folder, name))]
            for path in (Path(folder, name) for name in names):
                with suppress(OSError):  # removed meanwhile
                    state = path.lstat()
                    if stat.S_ISREG(state.st_mode) and state.st_ctime >= started_s - _CLOCK_S:
                        sizes[str(path)] = state.st_blocks * 512
    total = last.shmem_bytes if last else sum(sizes.values())
    if total <= MIB:
        return ""
    own = [path for path, size in sizes.items() if size <= total]  # a larger one is another's
    largest_first = sorted(own, key=lambda path: -sizes[path])
    named = few([f"{one_line(path)} ({format_bytes(sizes[path])})" for path in largest_first])
    who = "the command left" if last else "while it ran, files of a tmpfs got"
    return f"{who} {format_bytes(total)} of shared memory: {named or 'in no file that is visible'}"
