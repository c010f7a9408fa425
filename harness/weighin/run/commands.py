"""Measure the commands of a run."""

import linecache
import os
import signal
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weighin.cell import Cell
from weighin.errors import ConfigError, Interrupted
from weighin.isolation.base import Isolation, Running
from weighin.isolation.process import PASSED
from weighin.phase_reporter import SOCKET
from weighin.plan.start import files_in
from weighin.plan.task import Planned, Progress, Run, skipped
from weighin.probes import cgroup
from weighin.program_phases import VARIABLE
from weighin.records import explanation
from weighin.records.metrics import largest
from weighin.result import Faults, Outcome, Peaks, Ran, Sample, Track
from weighin.run.interrupts import STOPPED
from weighin.run.judge import Evidence
from weighin.run.measure import Measured, Spec, Watch, measure
from weighin.run.output import STANDARD, Readiness, Relay
from weighin.settings.definition import Settings
from weighin.text import few, one_line
from weighin.units import MIB, format_bytes

if TYPE_CHECKING:
    from weighin.run.releases import Environment

_CLOCK_S: Final = 0.02  # the kernel's clock for files is a little behind
_BY_KERNEL: Final = 0x80  # SI_KERNEL, of <signal.h>: the kernel sends the terminal's signals


class CommandSpec(Spec):
    """A command, with this process's streams and signals; ``asked_to_end`` by SIGINT, SIGTERM or SIGHUP."""

    named = "the --cold files"

    def __init__(self, cell: Cell, settings: Settings) -> None:
        self._own = settings.command(cell.strategy)
        super().__init__(cell, settings, files_in(self._own.cold) if self._own.cold else ())
        self.asked_to_end = False
        self.python = ""  # of the releases that were asked for
        if settings.ready or settings.ready_url:
            self.readiness = Readiness(settings.ready_url)
        self._running: Running | None = None  # gets the signals
        self._early: list[int] = []
        self._listening: threading.Thread | None = None

    def enter(self, opened: ExitStack) -> None:
        opened.enter_context(self._passing_signals_on())
        nothing = opened.enter_context(FileIO(os.devnull, "r+")).fileno()
        is_search = self.settings.within is not None  # it hides the output under a limit
        is_hidden = is_search and self.cell.ram_limit_bytes is not None
        at_ready = self.readiness.now if self.readiness else lambda: None
        targets = [nothing] * 2 if is_hidden else STANDARD
        self._output = Relay(targets, self._own.marks, self.settings.ready, at_ready)
        opened.callback(self._output.close)
        if is_search:
            self._output.streams = self._output.streams._replace(stdin=nothing)

    def start(self, isolation: Isolation, folder: Path) -> Running:
        environment = self.cell.environment | {VARIABLE: str(folder / SOCKET)}
        if self.python:
            path = environment.get("PATH") or os.environ.get("PATH", os.defpath)
            environment["PATH"] = f"{Path(self.python).parent}{os.pathsep}{path}"
        cell, mounts = replace(self.cell, environment=environment), self.settings.mounts
        streams, where = self._output.streams, self.settings.cwd
        running = isolation.start(cell, cell.command, where, streams, (*mounts, str(folder)))
        # From now on, take signals in a thread: only there Linux says whether a terminal sent one.
        self._running = running
        for number in self._early:  # before the command was there: it may get one of them twice
            self._take(number, by_terminal=False)
        self._listening = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._listening.start()
        self._output.start()
        return running

    def finish(self, _seen: Evidence) -> list[str]:
        self._output.finish()
        return []

    def _take(self, number: int, *, by_terminal: bool) -> None:
        self.asked_to_end |= number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if not self._running:  # another thread of this process took it before the command ran
            self._early.append(number)
            return
        if not (by_terminal and self._running.shares_terminal):  # which then sends it itself
            self._running.send_signal(number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _listen(self) -> None:
        while info := signal.sigwaitinfo(self._numbers):
            if info.si_signo == signal.SIGUSR1 and info.si_pid == os.getpid():
                return  # the command is over
            if info.si_signo == signal.SIGWINCH and self._output.resize():
                # The command got this signal, too, and may have read the size before it was copied.
                os.killpg(0, signal.SIGWINCH)
                continue
            # That line's own signal has reached who the terminal's reaches.
            is_own = info.si_signo == signal.SIGWINCH and info.si_pid == os.getpid()
            self._take(info.si_signo, by_terminal=is_own or info.si_code == _BY_KERNEL)

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """Pass signals on; one that this process ignores, as under nohup, stays ignored."""
        kept = {number: signal.getsignal(number) for number in PASSED}
        kept = {number: handler for number, handler in kept.items() if handler != signal.SIG_IGN}
        self._numbers = frozenset({*kept, signal.SIGUSR1})

        def take(number: int, _frame: object) -> None:
            # No handler learns who sent a signal: where there is a terminal, SIGINT is Ctrl-C.
            self._take(number, by_terminal=number == signal.SIGINT and _in_terminal())

        for number in kept:
            signal.signal(number, take)
        # Before any thread starts, which would take a signal that nobody then looks at. What comes
        # before ``start`` waits for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        try:
            yield
        finally:
            if self._listening and self._listening.ident:
                signal.pthread_kill(self._listening.ident, signal.SIGUSR1)
                self._listening.join()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
            for number, handler in kept.items():
                signal.signal(number, handler)

    def figures(self, watch: Watch, _outcome: Outcome) -> dict[str, Any]:
        sampler, samples, end, stacks = watch.sampler, watch.samples, watch.at_end, watch.stacks
        assert sampler
        main, others, spent_ns = watch.ranks[0], watch.others, watch.ended_ns - watch.started_ns

        def most(part: str) -> int | None:
            return largest(getattr(sample, part) for sample in samples)

        peak_bytes, kernel_bytes = watch.peak_bytes, end.kernel_peak_bytes
        sampled, reclaimable = most("needed_bytes"), most("reclaimable_bytes") or 0
        by_peak = None if peak_bytes is None else max(0, peak_bytes - reclaimable)
        by_kernel = kernel_bytes and max(0, kernel_bytes - sampler.caches_bytes)
        needed = largest((sampled, by_peak, by_kernel))
        is_exact = needed == by_peak and reclaimable <= max(MIB, (needed or 0) // 100)
        if kernel_bytes is None:  # v2 keeps no mark of the kernel's own memory
            own_bytes = most("kernel_needed_bytes") or 0
            is_exact = is_exact and own_bytes <= MIB + (needed or 0) // 100
        last = samples[-1] if watch.cgroup and samples else None
        faults = Faults(last.minor_faults, last.major_faults, end.refaults) if last else None
        in_memory = []
        # Else the container's files are gone, or what still runs holds the memory.
        if watch.running.shares_terminal and watch.all_ended:
            in_memory = left(watch.started_s, None if watch.server_ready_ns else last)
        # Each phase resets VmHWM, so the highest of all readings counts.
        highest = {each.pid: each.highest_rss_bytes for each in (main, *others)}
        processes = tuple(
            replace(one, highest_rss_bytes=largest((highest.get(one.pid), one.highest_rss_bytes)))
            for one in watch.processes
        )
        ran = Ran(
            pid=watch.running.pid,
            peak_ns=sampler.peak.t_ns if sampler.peak else None,
            needed_bytes=needed,
            needed_is_sampled=not is_exact or bool(watch.seen.escape),
            at_peak=sampler.peak,
            notes=(*filter(None, [watch.running.unseen]), *in_memory),
            signal=watch.seen.ended.signal,
            survived=watch.seen.ended.signal != signal.SIGKILL,
            processes=processes,
            kills=tuple(watch.seen.kills or ()),
            stacks=tuple(
                replace(each, code=code_of(each.frames, self.settings.cwd, watch.started_s))
                for each in (stacks.stacks if stacks else ())
            ),
            ended=watch.ended_rest,
            tracks=tuple(Track(each.pid, each.phases) for each in others),
            cold=tuple(self._own.cold),
            frozen_ns=stacks.frozen_ns if stacks else 0,
            marks=self._output.marks,
        )
        return {
            "peaks": Peaks(
                cgroup_bytes=peak_bytes,
                anon_sampled_bytes=most("anon_bytes"),
                file_sampled_bytes=most("page_cache_bytes"),
                unreclaimable_sampled_bytes=sampled,
                shmem_sampled_bytes=most("shmem_bytes"),
                kernel_bytes=kernel_bytes,
            ),
            "last_phase": main.died_in,
            "phases": main.phases,
            "load_ns": spent_ns,
            "ready_ns": spent_ns,
            "cost": {"load_ns": spent_ns},
            "faults": faults,
            "warnings": [*in_memory, *([stacks.why] if stacks and stacks.why else [])],
            "ran": ran,
        }


def left(started_s: float, last: Sample | None) -> list[str]:
    """Say which files of a tmpfs that changed since ``started_s`` take 1 MiB of memory or more (``last``: then all ended)."""
    if last and last.shmem_bytes <= MIB:
        return []
    sizes: dict[str, int] = {}
    for place in (one.place for one in cgroup.mounts() if one.kind in ("tmpfs", "ramfs")):
        for folder, below, names in os.walk(place):
            below[:] = [name for name in below if not os.path.ismount(Path(folder, name))]
            for path in (Path(folder, name) for name in names):
                with suppress(OSError):  # removed meanwhile
                    state = path.lstat()
                    if stat.S_ISREG(state.st_mode) and state.st_ctime >= started_s - _CLOCK_S:
                        sizes[str(path)] = state.st_blocks * 512
    total = last.shmem_bytes if last else sum(sizes.values())
    if total <= MIB:
        return []
    own = [path for path, size in sizes.items() if size <= total]  # a larger one is another's
    own.sort(key=lambda path: -sizes[path])
    named = few([f"{one_line(path)} ({format_bytes(sizes[path])})" for path in own])
    named = named or "in no file that is visible"
    who = "the command left" if last else "while it ran, files of a tmpfs got"
    return [f"{who} {format_bytes(total)} of shared memory: {named}"]


def _in_terminal() -> bool:
    """Tell whether Ctrl-C in the terminal reaches this process."""
    with suppress(OSError), Path("/dev/tty").open("rb") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def code_of(frames: Sequence[str], folder: str, started_s: float) -> str:
    """Return the innermost line of the user's own program; none of a file that changed after ``started_s``."""
    if frame := explanation.own(explanation.read_all(frames)):
        path = Path(folder, frame.path)
        with suppress(OSError):
            if path.is_file() and path.stat().st_mtime <= started_s:
                return one_line(linecache.getline(str(path), frame.line).partition("  #")[0])
    return ""


def take(
    task: Run,
    progress: Progress,
    environments: dict[str, "Environment | ConfigError"],  # of this run, by the choice
    planned: Planned,
    known_environment: Mapping[str, Any],
) -> Measured:
    """Run one command. If a signal broke it off, raise Interrupted, unless there is nothing else to measure."""
    cell, settings = planned.cell, task.settings
    is_search = settings.within is not None
    if not settings.timeout_s and is_search and (first := task.unlimited_result(cell)):
        # Ten times its time without a limit, plus 30 s.
        timeout_s = round(10 * (first.ready_ns or 0) / 1e9 + 30, 1)
        settings = settings.model_copy(update={"timeout_s": timeout_s})
    spec = CommandSpec(cell, settings)
    if cell.releases:
        from weighin.run import releases  # takes time to import

        if (found := environments.get(cell.releases)) is None:
            try:
                found = releases.ensure(cell.releases, (), progress.preparing)
            except ConfigError as error:
                found = error
            environments[cell.releases] = found
        if isinstance(found, ConfigError):
            return Measured(skipped(replace(planned, skip=found.message), dict(known_environment)))
        spec.python = found.python
        known_environment = {**known_environment, "releases": found.chosen}
    progress.starting(cell)
    measured = measure(task.isolation, spec, known_environment, task.reference_for(cell))
    if spec.asked_to_end and (is_search or len(task.planned) > 1):
        raise Interrupted(STOPPED)
    return measured
