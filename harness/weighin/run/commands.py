"""Measure the commands of a run."""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from weighin.cell import Cell
from weighin.errors import Interrupted
from weighin.isolation import select
from weighin.isolation.base import Isolation, Running
from weighin.isolation.process import PASSED
from weighin.plan.commands import files_in
from weighin.plan.task import Planned, Progress, Run
from weighin.program_phases import VARIABLE
from weighin.run import output
from weighin.run.measure import Measured, measure
from weighin.run.spec import Spec
from weighin.settings.definition import Settings
from weighin.units import format_bytes

_STOPPED: Final = "stopped; nothing is left running"
_TIMES: Final = 10
_LEAST_S: Final = 30.0
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BY_KERNEL: Final = 0x80  # SI_KERNEL, of <signal.h>: the kernel sends the terminal's signals


@dataclass(slots=True)
class CommandSpec(Spec):
    """A command, with this process's streams; it gets the signals that this process gets.

    Attributes:
        asked_to_end: whether weighin received SIGINT, SIGTERM or SIGHUP meanwhile.
    """

    asked_to_end: bool = False
    _output: output.Relay | None = None
    _receiver: Callable[[int], None] | None = None
    _shares_terminal: bool = False  # the terminal sends its signals (Ctrl-C, Ctrl-Z) to it, too
    _numbers: frozenset[int] = frozenset()
    _listening: threading.Thread | None = None
    _over: bool = False

    @classmethod
    def of(cls, cell: Cell, settings: Settings, timeout_s: float = 0.0) -> "CommandSpec":
        """Return the spec of a cell's command; a ``timeout_s`` of 0 stands for no time-out."""
        readiness = output.Readiness(settings) if settings.ready or settings.ready_url else None
        cold = settings.command(cell.strategy).cold
        files = files_in(cold) if cold else ()
        return cls(
            cell,
            files,
            settings=settings,
            timeout_s=timeout_s or math.inf,
            readiness=readiness,
        )

    @property
    def _settings(self) -> Settings:
        assert self.settings
        return self.settings

    def enter(self, opened: ExitStack) -> None:
        opened.enter_context(self._passing_signals_on())
        at_ready = self.readiness.now if self.readiness else lambda: None
        relaying = output.relaying(self._settings, self.cell, at_ready)
        self._output = opened.enter_context(relaying)

    def start(self, isolation: Isolation, listener: Path) -> Running:
        assert self._output
        environment = self.cell.environment | {VARIABLE: str(listener)}
        mounts = (*self._settings.mounts, str(listener.parent))
        cell = replace(self.cell, environment=environment)
        return isolation.start_command(cell, self._settings.cwd, self._output.streams, mounts)

    def begun(self, running: Any) -> None:
        """From now on, take signals in a thread: only there Linux says whether a terminal sent one."""
        assert self._output
        self._receiver = running.send_signal
        self._shares_terminal = running.shares_terminal
        self._listening = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._listening.start()
        self._output.start()

    def finish(self, cached_bytes: int | None) -> list[str]:
        assert self._output
        self._output.finish()
        self.marks, warnings = self._output.marks, []
        if cached_bytes:
            left = format_bytes(cached_bytes)
            warnings.append(f"{left} of the --cold files stayed in the page cache")
        if self._output.number_of_marks > len(self.marks):
            warnings.append(
                f"{self._output.number_of_marks:,} lines matched --mark; the record keeps the newest"
                f" {len(self.marks):,}"
            )
        if self._output.given_up:
            warnings.append(
                f"{self._output.given_up:,} lines were not searched to the end for --mark or --ready,"
                " which took more than 0.1 s each: a repeat inside a repeat, such as (a+)+, can take"
                " forever"
            )
        return warnings

    def _take(self, number: int, _frame: object = None, *, by_terminal: bool | None = None) -> None:
        """Pass one signal on. Without ``by_terminal``, a SIGINT counts as Ctrl-C of the terminal."""
        self.asked_to_end |= number in _ENDING
        if by_terminal is None:
            by_terminal = number == signal.SIGINT
        if self._receiver and not (by_terminal and self._shares_terminal):
            self._receiver(number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _listen(self) -> None:
        while info := signal.sigwaitinfo(self._numbers):
            if self._over:
                return
            resize = signal.getsignal(info.si_signo) if info.si_signo == signal.SIGWINCH else None
            if callable(resize) and resize != self._take:
                resize(info.si_signo, None)
                if info.si_pid == os.getpid():  # ``resize`` sent it to the command as well
                    continue
            self._take(info.si_signo, by_terminal=info.si_code == _BY_KERNEL)

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """Pass signals on; one that this process ignores, as under nohup, stays ignored."""
        before = {number: signal.getsignal(number) for number in PASSED}
        kept = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
        self._numbers = frozenset({*kept, signal.SIGUSR1})
        for number in kept:
            signal.signal(number, self._take)
        # Before any thread starts, which would take a signal that nobody then looks at. What comes
        # before ``begun`` waits for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        try:
            yield
        finally:
            if self._listening and self._listening.ident:
                self._over = True
                signal.pthread_kill(self._listening.ident, signal.SIGUSR1)
                self._listening.join()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
            for number, handler in kept.items():
                signal.signal(number, handler)


class Commands:
    """Measures the commands of a run.

    ``stopped`` tells whether weighin received SIGINT, SIGTERM or SIGHUP during a command.
    """

    def __init__(self, task: Run, progress: Progress) -> None:
        """Prepare the isolation; raise ConfigError if a cell's limit exceeds that of an outer cgroup."""
        select.check_limits_around(task.isolation, [each.cell for each in task.planned])
        task.prepare(progress)
        self._task, self.environment, self.stopped = task, task.environment(), False

    def take(self, planned: Planned) -> Measured:
        """Run one command and return its measurement.

        In a search for the smallest limit, a command may run for hours under a limit that is too
        small. Without --timeout, its time-out is therefore 10 times its time without a limit, plus 30 s.

        Raises:
            Interrupted: a signal ended the run, during an earlier command or during this one. What
                a signal broke off is no result, unless it is all that there is to measure.
        """
        if self.stopped:
            raise Interrupted(_STOPPED)
        cell, task, timeout_s = planned.cell, self._task, self._task.settings.timeout_s
        is_search = task.settings.within is not None
        if not timeout_s and is_search and (first := task.unlimited_result(cell)):
            timeout_s = round(_TIMES * (first.ready_ns or 0) / 1e9 + _LEAST_S, 1)
        spec = CommandSpec.of(cell, task.settings, timeout_s)
        measured = measure(task.isolation, spec, self.environment, task.reference_for(cell))
        self.stopped = spec.asked_to_end
        if self.stopped and (is_search or len(task.planned) > 1):
            raise Interrupted(_STOPPED)
        return measured
