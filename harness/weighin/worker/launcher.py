"""Start one worker for each rank of a cell, and pass messages between these workers and the parent.

The launcher runs inside the cell's isolation and imports no torch. It gives each rank the
environment variables that torchrun sets. torchrun itself would import torch into the cell's cgroup,
and it ends all ranks before one can see which rank the kernel killed.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import NoReturn

from weighin.cell import Job
from weighin.protocol import ACKNOWLEDGED, ACKNOWLEDGEMENT, MET, decode_event, encode_job
from weighin.worker.connection import Lifeline

_STDERR_KEPT_BYTES = 4096
_GRACE_S = 0.5  # between the ends of ranks that end for one reason


def launch(job: Job, lifeline: Lifeline) -> NoReturn:
    """Run all ranks of a cell to their end. If one fails, report it, and end the others."""
    ranks = _Ranks(job, lifeline)
    if (failed := ranks.wait_for_failure()) is None:
        os._exit(0)
    ranks.report(failed)
    deadline = time.monotonic() + _GRACE_S
    # A rank that was killed makes others fail: report all, and the parent tells cause from effect.
    while time.monotonic() < deadline:
        if (failed := ranks.failed(os.WNOHANG)) is None:
            time.sleep(_GRACE_S / 50)
        else:
            ranks.report(failed)
    os._exit(1)  # ends the ranks that still run (``Lifeline``)


class _Ranks:
    """The running ranks of a cell."""

    def __init__(self, job: Job, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._sending = threading.Lock()
        self._meeting = threading.Barrier(job.cell.ranks)
        self._done: set[int] = set()
        environment = os.environ | _environment(job.cell.ranks)
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "weighin.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(job.cell.ranks)
        ]
        self._left = {process.pid: rank for rank, process in enumerate(self._processes)}
        self._stderr_tails = [b""] * job.cell.ranks
        self._relays = [
            threading.Thread(target=relay, args=(rank,), daemon=True)
            for rank in range(job.cell.ranks)
            for relay in (self._relay, self._copy_stderr)
        ]
        for relay in self._relays:
            relay.start()
        for rank in range(job.cell.ranks):
            self._write(rank, encode_job(replace(job, rank=rank)))

    def wait_for_failure(self) -> tuple[int, int] | None:
        """Return (rank, exit status) of the first rank that fails; None if all ranks end well."""
        while self._left:
            if failed := self.failed():
                return failed
        return None

    def failed(self, options: int = 0) -> tuple[int, int] | None:
        """Return the next process that ended as (rank, exit status) if it is a rank that failed.

        A rank failed if it ended before its event ``done``, whatever its exit status is.
        """
        try:
            pid, status = os.waitpid(-1, options)
        except ChildProcessError:
            return None
        if (rank := self._left.pop(pid, None)) is None:
            return None
        for relay in self._relays[2 * rank : 2 * rank + 2]:
            relay.join(_GRACE_S)  # until all that the rank sent has been passed on
        return None if rank in self._done else (rank, status)

    def report(self, failed: tuple[int, int]) -> None:
        """Tell the parent how a rank ended."""
        rank, status = failed
        code = os.waitstatus_to_exitcode(status)
        with self._sending:
            self._lifeline.send(
                "ended",
                rank=rank,
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                stderr_tail=self._stderr_tails[rank].decode(errors="replace"),
            )

    def _relay(self, rank: int) -> None:
        """Pass a rank's events to the parent, and acknowledge them as the parent does."""
        events = self._processes[rank].stdout
        assert events
        for line in events:
            if (event := decode_event(line)) is None:
                continue
            kind = event.pop("event")
            with self._sending:
                if kind in ACKNOWLEDGED:
                    self._lifeline.send_and_wait(kind, rank=rank, **event)
                else:
                    self._lifeline.send(kind, rank=rank, **event)
            if kind in MET:
                self._meeting.wait()
            if kind == "done":
                self._done.add(rank)
            if kind in ACKNOWLEDGED:
                self._write(rank, ACKNOWLEDGEMENT)

    def _copy_stderr(self, rank: int) -> None:
        """Copy what a rank prints to the worker's standard error, and keep the last 4 KiB."""
        printed = self._processes[rank].stderr
        assert printed
        while data := os.read(printed.fileno(), 65536):
            os.write(2, data)
            self._stderr_tails[rank] = (self._stderr_tails[rank] + data)[-_STDERR_KEPT_BYTES:]

    def _write(self, rank: int, line: bytes) -> None:
        stdin = self._processes[rank].stdin
        assert stdin
        try:
            stdin.write(line)
            stdin.flush()
        except BrokenPipeError:  # the rank has ended
            return


def _environment(ranks: int) -> dict[str, str]:
    """Return the variables that torchrun sets for all ranks of one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
