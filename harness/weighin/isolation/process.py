"""Run the worker as a plain process: measured, but without a limit."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from weighin.cell import Job
from weighin.errors import IsolationUnavailable, StillRunning
from weighin.isolation import process_tree
from weighin.isolation.base import Exit
from weighin.isolation.channel import PipeChannel
from weighin.protocol import encode_job
from weighin.suite.registry import data_folder

_PATIENCE_S = 10.0  # from SIGKILL to the end of the process
CODE_PATH = (Path(__file__).resolve().parents[2], data_folder("strategies").parent)
"""The folders from which a worker imports weighin and weighin's strategies. Other strategies may
import these strategies."""
WORKER = (sys.executable, "-P", "-m", "weighin.worker")


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
        running = LocalRunning(WORKER, environment=job.cell.environment)
        running.channel.send(encode_job(job))
        return running

    def remove_stale(self) -> list[str]:
        """Kill the children of workers of dead runs; the workers ended with their parent."""
        return process_tree.end_orphans()

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
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=os.environ
            | dict(environment or {})
            | {"PYTHONPATH": os.pathsep.join(map(str, CODE_PATH))}
            | process_tree.environment(self._mark),
        )
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        assert all(streams)
        # The channel owns the duplicates, so that Popen does not close its descriptors twice.
        stdin, stdout, stderr = (os.dup(stream.fileno()) for stream in streams if stream)
        self.channel = PipeChannel(stdin, stdout, stderr, _open_process(self._process.pid))
        for stream in streams:
            if stream:
                stream.close()
        self.pid: int | None = self._process.pid
        self.cgroup = cgroup
        self.unseen = "" if cgroup else "a plain process has no cgroup of its own"
        self._closed = False

    def observe_inside(self, interval_s: float) -> None:
        """Return None: a child of this process is always visible."""

    def wait(self, timeout_s: float) -> Exit:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        return Exit(code) if code >= 0 else Exit(None, signal=-code)

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # the process has ended by itself
            return

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.kill()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pid = self._process.pid
            raise StillRunning(
                f"the worker, process {pid}, does not end, not even after SIGKILL"
            ) from None
        finally:
            self.channel.close()
            if self.cgroup is None:
                process_tree.end(self._mark)


def _open_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None before Linux 5.3."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
