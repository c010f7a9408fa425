"""Run the worker (or a command) as a plain process, whose memory is measured but not limited."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep

from weighin import child_process
from weighin.cell import Cell, Job
from weighin.errors import IsolationUnavailable, StillRunning
from weighin.isolation import process_tree
from weighin.isolation.base import Exit, Isolation, RunningCommand, Streams
from weighin.isolation.command import LocalCommand, thaw
from weighin.parent_process import adopt_orphans
from weighin.probes.other_processes import limit_of
from weighin.program_phases import VARIABLE as PHASES_VARIABLE
from weighin.protocol import encode_job

_PAUSE_S = 0.005  # a killed process takes a moment to end
WORKER = child_process.module("weighin.worker")


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

    def remove_stale(self, *, any_lock: bool = False) -> list[str]:
        """Kill processes that workers of killed runs started; the workers ended with weighin."""
        return process_tree.end_orphans(any_lock=any_lock)


class ProcessCommand(LocalCommand):
    """A command without a cgroup; all its processes inherit a resource limit that marks them."""

    def __init__(self, cell: Cell, folder: str, streams: Streams) -> None:
        self._mark = process_tree.new_mark()
        # Samples find descendants by their parents, and the parent of a daemon ends.
        self._adopted_before = adopt_orphans()
        try:
            super().__init__(
                cell.command,
                folder=folder,
                environment=cell.environment,
                streams=streams,
                limit=limit_of(self._mark),
            )
        except BaseException:
            adopt_orphans(adopt=self._adopted_before)
            raise

    def members(self) -> list[int]:
        return [pid for pid in process_tree.members(self._mark) if not self._reaped(pid)]

    def _reaped(self, pid: int) -> bool:
        """Reap ``pid``, a process that weighin adopted, if it has ended; return whether it had."""
        if pid == self.pid:
            return False
        with contextlib.suppress(ChildProcessError):  # the process still has a parent of its own
            return os.waitpid(pid, os.WNOHANG)[0] == pid
        return False

    def kill(self) -> None:
        frozen = self.members()
        process_tree.kill(self._mark)
        thaw(frozen)

    def close(self) -> None:
        super().close()
        deadline_s = monotonic() + child_process.PATIENCE_S
        while self.members() and monotonic() < deadline_s:
            self.kill()
            sleep(_PAUSE_S)
        adopt_orphans(adopt=self._adopted_before)


class LocalRunning:
    """A worker that is a child of this process, in its own session and process group."""

    def __init__(
        self,
        command: tuple[str, ...],
        cgroup: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._mark = process_tree.new_mark()
        self.channel = child_process.Child(
            command,
            # If weighin itself is measured, its worker must not report phases to the outer weighin.
            {name: value for name, value in os.environ.items() if name != PHASES_VARIABLE}
            | dict(environment or {})
            | {"PYTHONPATH": os.pathsep.join(child_process.CODE_PATH)}
            | process_tree.environment(self._mark),
        )
        process_tree.set_limit(self.channel.pid, self._mark)
        self.pid: int | None = self.channel.pid
        self.cgroup = cgroup
        self.unseen = "" if cgroup else "a plain process has no cgroup of its own"

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
            process_tree.end(self._mark)
