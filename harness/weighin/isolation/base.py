"""What all isolations share: they run a worker or a command, the measured process."""

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from weighin.cell import Cell
from weighin.child_process import signal_each, wait_for_end
from weighin.probes.cgroup import Cgroup


class Streams(NamedTuple):
    """File descriptors for a child's standard streams; None lets the child inherit weighin's own."""

    stdin: int | None = None
    stdout: int | None = None
    stderr: int | None = None


OWN_STREAMS: Final = Streams()


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: its exit code, or the signal that killed it; or not at all (``still_runs``)."""

    code: int | None
    signal: int | None = None
    still_runs: bool = False

    @property
    def shell_code(self) -> int | None:
        return self.code if self.signal is None else 128 + self.signal

    @property
    def signal_name(self) -> str:
        try:
            return signal.Signals(self.signal).name if self.signal else ""
        except ValueError:  # a real-time signal
            return f"signal {self.signal}"


class Running(ABC):
    """A started worker or command, together with all processes that it starts."""

    pid = 0  # the first process's, as weighin's process sees it
    process: int | None = None  # its pidfd; None if the kernel gives none
    cgroup: Path | None = None
    unseen = ""  # what weighin cannot see
    shares_terminal = False  # whether the terminal itself sends Ctrl-C to the command
    # If its peak was reset: on v2, only this open file shows the reset.
    opened: Cgroup | None = None
    ended: Exit | None = None  # how the first process ended, when it was reaped

    def wait(self, timeout_s: float) -> bool:
        """Return whether the first process ends in ``timeout_s``, without reaping it."""
        return wait_for_end(self.process, self.has_ended, timeout_s)

    @abstractmethod
    def has_ended(self) -> bool: ...

    @abstractmethod
    def reap(self) -> Exit:
        """Wait for the end of the first process, and return how it ended."""

    def send_signal(self, number: int) -> None:
        """Send a signal to the first process, unless it was reaped, or is another user's."""
        if self.pid and not self.ended:
            with contextlib.suppress(PermissionError):  # of sudo, for example
                signal_each([self.pid], number)

    @abstractmethod
    def members(self) -> list[int]:
        """Return the pids of the processes that exist now."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all processes, and return without waiting for their end."""

    def close(self) -> None:
        """Kill the remaining processes; remove the container or cgroups. Repeated calls do nothing.
        StillRunning or IsolationUnavailable: one of them remains; the others were removed.
        """
        if self.opened:
            self.opened.close()
        if self.process is not None:
            os.close(self.process)
            self.process = None


class Isolation(Protocol):
    name: str
    limits: bool  # whether it can enforce a RAM limit

    def check(self) -> None:
        """Raise IsolationUnavailable, with advice, if this isolation does not work on this machine."""

    def start(
        self,
        cell: Cell,
        command: Sequence[str],
        folder: str = "",
        streams: Streams = OWN_STREAMS,
        mounts: Iterable[str] = (),
    ) -> Running:
        """Start a cell; its limits hold before its first instruction. A command runs in ``folder``. A container
        sees ``folder``, where it may write, and ``mounts``, all at the same paths as here.
        """

    def remove_stale(self) -> list[str]:
        """Clean up after runs that were killed; return a line for each process, cgroup or container."""

    def describe(self) -> dict[str, str]:
        """Return facts about the isolation for the records, such as the version of Docker."""
        return {}
