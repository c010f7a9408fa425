"""Run the worker (or a command) as a plain process, whose memory is measured but not limited."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from weighin import child_process
from weighin.cell import Cell, Job
from weighin.errors import IsolationUnavailable, StillRunning
from weighin.isolation.base import Exit, Isolation, RunningCommand, Streams
from weighin.isolation.command import UNSEEN, LocalCommand, thaw
from weighin.isolation.process_tree import ProcessTree, end_orphans
from weighin.program_phases import VARIABLE as PHASES_VARIABLE
from weighin.protocol import encode_job

WORKER = child_process.module("weighin.worker")
_UNSEEN = "a plain process has no cgroup of its own"


class ProcessIsolation(Isolation):
    """Runs plain processes, one for each cell (measurement)."""

    name = "process"
    limits = False

    def check(self) -> None:
        """Raise IsolationUnavailable if the system has no /proc/PID/clear_refs, which resets peaks."""
        if not Path("/proc/self/clear_refs").exists():
            raise IsolationUnavailable(
                "this system has no /proc/PID/clear_refs, without which weighin cannot measure"
                " peaks",
                "run on Linux",
            )

    def start(self, job: Job) -> "LocalRunning":
        """Start a worker without a RAM limit, which only a cgroup could enforce."""
        running = LocalRunning(WORKER, environment=job.cell.environment)
        running.channel.send(encode_job(job))
        return running

    def start_command(
        self,
        cell: Cell,
        folder: str,
        streams: Streams,
        _mounts: Sequence[str] = (),
    ) -> RunningCommand:
        return ProcessCommand(cell, folder, streams)

    def remove_stale(self) -> list[str]:
        """Kill what workers and commands of killed runs started; they themselves ended with weighin."""
        return end_orphans()


class ProcessCommand(LocalCommand):
    """A command without a cgroup, whose orphans weighin adopts until ``close``."""

    def __init__(self, cell: Cell, folder: str, streams: Streams) -> None:
        self._tree = ProcessTree(adopts=True)
        environment = cell.environment | self._tree.environment
        try:
            super().__init__(cell.command, folder=folder, environment=environment, streams=streams)
        except BaseException:
            self._tree.end()
            raise
        self._tree.begin(self.pid)

    def members(self) -> list[int]:
        return self._tree.members()

    def kill(self) -> None:
        thaw(self._tree.kill())

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.kill()
            self._tree.end()
            self.unseen = self._tree.unseen(UNSEEN)


class LocalRunning:
    """A worker that is a child of this process, in its own session and process group."""

    helpers: frozenset[int] = frozenset()

    def __init__(
        self,
        command: tuple[str, ...],
        cgroup: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._tree = ProcessTree(adopts=child_process.is_program)
        # If weighin itself is measured, its worker must not report phases to the outer weighin.
        variables = {name: value for name, value in os.environ.items() if name != PHASES_VARIABLE}
        variables |= dict(environment or {})
        variables |= {"PYTHONPATH": os.pathsep.join(child_process.CODE_PATH)}
        try:
            self.channel = child_process.Child(command, variables | self._tree.environment)
        except BaseException:
            self._tree.end()
            raise
        self._tree.begin(self.channel.pid)
        self.pid: int | None = self.channel.pid
        self.cgroup = cgroup
        self.unseen = "" if cgroup else _UNSEEN

    def wait(self, timeout_s: float) -> Exit:
        code = self.channel.wait(timeout_s)
        return Exit(code) if code >= 0 else Exit(None, signal=-code)

    def kill(self) -> None:
        self.channel.kill()

    def close(self) -> None:
        try:
            self.channel.close()
        except TimeoutError:
            raise StillRunning(
                f"the measured process {self.pid} does not end, not even after SIGKILL"
            ) from None
        finally:
            self._tree.end()
            if not self.cgroup:
                self.unseen = self._tree.unseen(_UNSEEN)
