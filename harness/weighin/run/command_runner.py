"""Measure the commands of a run: start each command, watch it from outside, and build its result."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any, Final

from weighin.cell import Cell
from weighin.checkpoint import staging
from weighin.errors import Interrupted
from weighin.isolation import select
from weighin.isolation.base import Isolation, RunningCommand
from weighin.isolation.command import PASSED
from weighin.plan.commands import files_in
from weighin.plan.task import Planned, Progress, Run
from weighin.probes import page_cache
from weighin.records import run_folder
from weighin.records.thrashing import Reference
from weighin.result import Outcome
from weighin.run import command_output
from weighin.run.command_watch import CommandWatch
from weighin.run.measurement import CellMeasurement, trouble_of
from weighin.run.plausible import checked
from weighin.run.thrash_guard import ThrashGuard
from weighin.settings.definition import Settings
from weighin.units import format_bytes

_PREFIX: Final = "weighin-run-"
_STOPPED: Final = "stopped; nothing is left running"
_TIMES: Final = 10
_LEAST_S: Final = 30.0
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BY_KERNEL: Final = 0x80  # SI_KERNEL, of <signal.h>: the kernel sends the terminal's signals


@dataclass(slots=True)
class CommandBench:
    """Measures the commands of a run.

    ``stopped`` tells whether weighin received SIGINT, SIGTERM or SIGHUP during a command.
    """

    task: Run
    environment: dict[str, Any]
    stopped: bool = False

    def measure(self, planned: Planned) -> CellMeasurement:
        """Run one command and return its measurement.

        Raises:
            Interrupted: a signal ended the run, during an earlier command or during this one. What
                a signal broke off is no result, unless it is all that there is to measure.
        """
        if self.stopped:
            raise Interrupted(_STOPPED)
        measured, self.stopped = take(
            self.task.isolation,
            self.task.settings,
            planned.cell,
            self.task.settings.timeout_s or self._patience_s(planned.cell),
            self.environment,
            self.task.reference_for(planned.cell),
        )
        if self.stopped and len(self.task.planned) > 1 and measured.result.outcome != Outcome.OK:
            raise Interrupted(_STOPPED)
        return measured

    def _patience_s(self, cell: Cell) -> float:
        """Return the time-out of a cell without --timeout, in seconds; 0 for no time-out.

        In a search for the smallest limit, a command may run for hours under a limit that is too
        small. The time-out is therefore 10 times the command's time without a limit, plus 30 s.
        """
        if self.task.settings.within is None:
            return 0.0
        first = self.task.unlimited_result(cell)
        return round(_TIMES * (first.ready_ns or 0) / 1e9 + _LEAST_S, 1) if first else 0.0


def set_up(task: Run, progress: Progress) -> CommandBench:
    """Prepare the isolation; raise ConfigError if a cell's limit exceeds that of an outer cgroup."""
    select.check_limits_around(task.isolation, [each.cell for each in task.planned])
    task.prepare(progress)
    return CommandBench(task, task.environment())


def take(
    isolation: Isolation,
    settings: Settings,
    cell: Cell,
    timeout_s: float,
    environment: dict[str, Any],
    reference: Reference | None = None,
) -> tuple[CellMeasurement, bool]:
    """Run one command to its end; return its measurement, and whether weighin received a signal.

    Args:
        timeout_s: the time after which the command is killed, in seconds; 0 for no time-out.
        environment: facts about the machine and the software's versions, for the record.
        reference: the figures of the same command without a limit; a command that thrashes in
            comparison is killed.
    """
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    cold = settings.command(cell.strategy).cold
    cached_bytes = page_cache.drop(files_in(cold)) if cold else None
    with (
        staging.own_folder(_temporary(), _PREFIX) as folder,
        _passing_signals_on() as signals,
        ExitStack() as opened,
    ):
        watch = CommandWatch(cell, settings, folder)
        output = opened.enter_context(command_output.relaying(settings, cell, watch.readiness.now))
        start_ns = time.monotonic_ns()
        try:
            running = isolation.start_command(
                watch.cell_with_phases(),
                settings.cwd,
                output.streams,
                (*settings.mounts, str(folder)),
            )
        except BaseException:
            watch.abandon()
            raise
        try:
            signals.listen(running)
            limit = cell.ram_limit_bytes
            watch.begin(running, ThrashGuard(reference, limit) if reference and limit else None)
            output.start()
            in_time = watch.wait(timeout_s or inf)
            end_ns = watch.readiness.ready_ns or time.monotonic_ns()
            watch.end(in_time=in_time)
        finally:
            trouble = trouble_of(running.close)
        output.finish()
    result = watch.result(end_ns - start_ns)
    assert result.ran
    result = replace(result, ran=replace(result.ran, marks=output.marks))
    warnings = result.warnings
    if cached_bytes:
        warnings += (f"{format_bytes(cached_bytes)} of the --cold files stayed in the page cache",)
    if output.number_of_marks > len(output.marks):
        warnings += (
            f"{output.number_of_marks:,} lines matched --mark; the record keeps the newest"
            f" {len(output.marks):,}",
        )
    if output.given_up:
        warnings += (
            f"{output.given_up:,} lines were not searched to the end for --mark or --ready, which took"
            " more than 0.1 s each: a repeat inside a repeat, such as (a+)+, can take forever",
        )
    assert result.cost
    result = replace(
        result,
        cost=replace(result.cost, wall_ns=time.monotonic_ns() - start_ns),
        cached_bytes_at_start=cached_bytes,
        samples_path=run_folder.samples_path(cell) if watch.samples else None,
        started_at=started_at,
        environment=environment,
        warnings=warnings,
    )
    return CellMeasurement(checked(result), watch.samples, trouble=trouble), signals.asked_to_end


def remove_leftovers() -> list[str]:
    """Remove the temporary folders of killed runs; return one line for each folder."""
    return [f"folder {folder}" for folder in staging.remove_orphans(_temporary(), _PREFIX)]


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


@dataclass(slots=True)
class _Signals:
    """Passes signals on to a command: all that this process gets, but what the command got as well.

    Attributes:
        shares_terminal: whether the terminal sends its signals (Ctrl-C, Ctrl-Z) to the command, too.
    """

    receiver: Callable[[int], None] | None = None
    asked_to_end: bool = False
    shares_terminal: bool = False
    numbers: frozenset[int] = frozenset()
    _listener: threading.Thread | None = None
    _over: bool = False

    def take(self, number: int, _frame: object = None, *, by_terminal: bool | None = None) -> None:
        """Pass one signal on. Without ``by_terminal``, a SIGINT counts as Ctrl-C of the terminal."""
        self.asked_to_end |= number in _ENDING
        if by_terminal is None:
            by_terminal = number == signal.SIGINT
        if self.receiver and not (by_terminal and self.shares_terminal):
            self.receiver(number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def listen(self, running: RunningCommand) -> None:
        """From now on, take signals in a thread: only there Linux says whether a terminal sent one."""
        self.receiver, self.shares_terminal = running.send_signal, running.shares_terminal
        self._listener = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        while info := signal.sigwaitinfo(self.numbers):
            if self._over:
                return
            resize = signal.getsignal(info.si_signo) if info.si_signo == signal.SIGWINCH else None
            if callable(resize) and resize != self.take:
                resize(info.si_signo, None)
                if info.si_pid == os.getpid():  # ``resize`` sent it to the command as well
                    continue
            self.take(info.si_signo, by_terminal=info.si_code == _BY_KERNEL)

    def stop(self) -> None:
        if self._listener and self._listener.ident:
            self._over = True
            signal.pthread_kill(self._listener.ident, signal.SIGUSR1)
            self._listener.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)


@contextmanager
def _passing_signals_on() -> Iterator[_Signals]:
    """Pass signals on to the command; one that this process ignores, as under nohup, stays ignored."""
    before = {number: signal.getsignal(number) for number in PASSED}
    kept = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    signals = _Signals(numbers=frozenset({*kept, signal.SIGUSR1}))
    for number in kept:
        signal.signal(number, signals.take)
    # Before any thread starts, which would take a signal that nobody then looks at. What comes before
    # ``listen`` waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.numbers)
    try:
        yield signals
    finally:
        signals.stop()
        for number, handler in kept.items():
            signal.signal(number, handler)
