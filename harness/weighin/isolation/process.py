"""Run the worker as a plain process: measured, but without a limit."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from weighin import child_process
from weighin.cell import Job
from weighin.errors import IsolationUnavailable, StillRunning
from weighin.isolation import process_tree, read_only
from weighin.isolation.base import Exit
from weighin.protocol import encode_job

WORKER = child_process.module("weighin.worker")


class ProcessIsolation:
    """Runs plain processes, one for each cell."""

    name = "process"
    limits = False

    def check(self) -> None:
        """Raise IsolationUnavailable if /proc lacks the files that measurements need."""
        if not Path("/proc/self/clear_refs").exists():
            raise IsolationUnavailable(
                "this system has no /proc/PID/clear_refs: peaks cannot be measured",
                "run on Linux",
            )

    def prepare(self, _progress: Callable[[str], None] = lambda _: None, /) -> None:
        return

    def added_code(self, _job: Job, /) -> list[str]:
        """Return an empty list, because a worker imports the packages of this environment."""
        return []

    def start(self, job: Job) -> "LocalRunning":
        """Start a worker; callers reject RAM limits, which a plain process does not enforce."""
        command = read_only.wrapped(WORKER, job.checkpoint, job.manifest)
        running = LocalRunning(command, environment=job.cell.environment)
        running.channel.send(encode_job(job))
        return running

    def remove_stale(self, *, any_lock: bool = False) -> list[str]:
        """Kill the children of workers of dead runs; the workers ended with their parent."""
        return process_tree.end_orphans(any_lock=any_lock)

    def describe(self) -> dict[str, str]:
        return {}


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
            os.environ
            | dict(environment or {})
            | {"PYTHONPATH": os.pathsep.join(child_process.CODE_PATH)}
            | process_tree.environment(self._mark),
        )
        process_tree.set_limit(self.channel.pid, self._mark)
        self.pid: int | None = self.channel.pid
        self.cgroup = cgroup
        self.unseen = "" if cgroup else "a plain process has no cgroup of its own"
        self.read_only = read_only.is_possible()

    def observe_inside(self, interval_s: float) -> None:
        """Return None: a child of this process is always visible."""

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
                f"the worker, process {self.pid}, does not end, not even after SIGKILL"
            ) from None
        finally:
            process_tree.end(self._mark)
