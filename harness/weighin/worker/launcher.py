"""Start a cell's ranks (processes that load one model), and report how they end.

The launcher runs inside the cell's container or cgroup, and replaces torchrun for two reasons.
torchrun would import torch into the cell's cgroup. torchrun also ends all ranks before weighin can
see which rank the kernel killed. Each rank gets the environment variables that torchrun sets, and
connects to weighin itself.
"""

import os
import socket
from dataclasses import replace
from typing import NoReturn

from weighin.cell import Job
from weighin.child_process import Child, module
from weighin.protocol import encode_job
from weighin.worker.phases import Lifeline

_KEPT_BYTES = 4096  # of a rank's standard error


def launch(job: Job, lifeline: Lifeline) -> NoReturn:
    """Run all ranks of a cell, report each one's end, and end after the last one.

    If a rank fails, weighin ends the others: they end with the launcher, as their standard input does.
    """
    environment = os.environ | _environment(job.cell.ranks)
    ranks = {}
    for rank in range(job.cell.ranks):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        child = Child(module("weighin.worker"), environment | numbers)
        ranks[child.pid] = rank, child
    for rank, child in ranks.values():
        child.send(encode_job(replace(job, rank=rank)))
    while ranks:
        pid, status = os.wait()
        rank, child = ranks.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        lifeline.send(
            "ended",
            rank=rank,
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stderr_tail=child.stderr_tail[-_KEPT_BYTES:].decode(errors="replace"),
        )
    os._exit(0)


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
