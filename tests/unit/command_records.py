"""Records of commands, as the runner would write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weighin.cell import Cell
from weighin.result import SCHEMA, Outcome, Peaks, Process, Ran, Result, Sample, Stack
from weighin.units import MIB

PID = 100
SECOND = 1_000_000_000


def made(
    outcome: Outcome = Outcome.OK,
    *,
    limit: int | None = None,
    needed: int | None = None,
    peaks: Peaks = Peaks(),  # noqa: B008 (frozen)
    message: str = "",
    samples_path: str | None = None,
    **ran: Any,
) -> Result:
    """The result of a command; further arguments are fields of its ``Ran``."""
    cell = Cell.of_command("load.py", ("python", "load.py"), "cgroup", ram_limit_bytes=limit)
    return Result(
        schema=SCHEMA,
        cell=cell,
        outcome=outcome,
        message=message,
        peaks=peaks,
        samples_path=samples_path,
        ran=Ran(pid=PID, needed_bytes=needed, **ran),
    )


def process(
    pid: int = PID,
    *,
    anon: int,
    shmem: int = 0,
    command: str = "/usr/bin/python load.py",
    parent: int = 1,
    **fields: Any,
) -> Process:
    return Process(
        pid, parent, command, 0, SECOND, anon_bytes=anon, file_bytes=0, shmem_bytes=shmem, **fields
    )


def stack(usage: int, *frames: str, pid: int = PID, t_ns: int = 0, code: str = "") -> Stack:
    """A stack of the main thread; the time follows the usage, unless it is given."""
    return Stack(t_ns or usage, pid, "MainThread", usage, frames, code)


def samples_of(anon: Sequence[int], *, shmem: int = 0, step_ns: int = 100_000_000) -> list[Sample]:
    """Samples at equal intervals, with this anonymous memory."""
    return [
        Sample(
            (number + 1) * step_ns, size + shmem, size, 0, shmem, 0, 0, 0, size + shmem + MIB, shmem
        )
        for number, size in enumerate(anon)
    ]
