"""Start a cell's ranks (processes that load one model), and pass messages between them and weighin.

The launcher runs inside the cell's container or cgroup, and replaces torchrun for two reasons.
torchrun would import torch into the cell's cgroup. torchrun also ends all ranks before weighin can
see which rank the kernel killed. Each rank gets the environment variables that torchrun sets.
"""

import os
import socket
import threading
import time
from dataclasses import replace
from typing import NoReturn

from weighin import child_process
from weighin.cell import Job
from weighin.child_process import Lifeline
from weighin.protocol import ACKNOWLEDGED, ACKNOWLEDGEMENT, MET, decode_event, encode_job

_KEPT_BYTES = 4096  # of a rank's standard error
_GRACE_S = 0.5  # between the ends of ranks that fail because one of them failed


def launch(job: Job, lifeline: Lifeline) -> NoReturn:
    """Run all ranks of a cell. If a rank fails, report the failure and end the other ranks."""
    ranks = _Ranks(job, lifeline)
    if (failed := ranks.wait_for_failure()) is None:
        os._exit(0)
    ranks.report(failed)
    deadline = time.monotonic() + _GRACE_S
    # A killed rank makes other ranks fail. The parent needs all failures to find the first cause.
    while time.monotonic() < deadline:
        if (failed := ranks.failed(os.WNOHANG)) is None:
            time.sleep(_GRACE_S / 50)
        else:
            ranks.report(failed)
    os._exit(1)  # the other ranks end too, because their standard input ends


class _Ranks:
    def __init__(self, job: Job, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._sending = threading.Lock()
        self._arrived = 0  # ranks that have sent the event for which all ranks wait
        self._done: set[int] = set()
        environment = os.environ | _environment(job.cell.ranks)
        self._ranks = [
            child_process.Child(
                child_process.module("weighin.worker"),
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                copy=2,
            )
            for rank in range(job.cell.ranks)
        ]
        self._left = {each.pid: rank for rank, each in enumerate(self._ranks)}
        self._relays = [
            threading.Thread(target=self._relay, args=(rank,), daemon=True)
            for rank in range(job.cell.ranks)
        ]
        for relay in self._relays:
            relay.start()
        for rank, each in enumerate(self._ranks):
            each.send(encode_job(replace(job, rank=rank)))

    def wait_for_failure(self) -> tuple[int, int] | None:
        """Return (rank, exit status) of the first rank that fails; None if no rank fails."""
        while self._left:
            if failed := self.failed():
                return failed
        return None

    def failed(self, options: int = 0) -> tuple[int, int] | None:
        """Wait for the end of one process; return (rank, exit status) if it failed, else None.

        A rank failed if it ended before its event ``done``, even with exit status 0.
        """
        try:
            pid, status = os.waitpid(-1, options)
        except ChildProcessError:
            return None
        if (rank := self._left.pop(pid, None)) is None:
            return None
        self._relays[rank].join(_GRACE_S)  # waits until the rank's last events are passed on
        return None if rank in self._done else (rank, status)

    def report(self, failed: tuple[int, int]) -> None:
        rank, status = failed
        code = os.waitstatus_to_exitcode(status)
        with self._sending:
            self._lifeline.send(
                "ended",
                rank=rank,
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                stderr_tail=self._ranks[rank].stderr_tail[-_KEPT_BYTES:].decode(errors="replace"),
            )

    def _relay(self, rank: int) -> None:
        """Pass a rank's events to weighin's own process, and the acknowledgements back to the rank."""
        while (line := self._ranks[rank].receive()) is not None:
            if (event := decode_event(line)) is None:
                continue
            kind = event.pop("event")
            with self._sending:
                if kind in ACKNOWLEDGED:
                    self._lifeline.send_and_wait(kind, rank=rank, **event)
                else:
                    self._lifeline.send(kind, rank=rank, **event)
                if kind == "done":
                    self._done.add(rank)
                if kind in MET:
                    self._meet()
            if kind in ACKNOWLEDGED and kind not in MET:
                self._ranks[rank].send(ACKNOWLEDGEMENT)

    def _meet(self) -> None:
        """Acknowledge an event to all ranks, after every rank has sent the event."""
        self._arrived = (self._arrived + 1) % len(self._ranks)
        if not self._arrived:
            for each in self._ranks:
                each.send(ACKNOWLEDGEMENT)


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
