"""Read the memory of one process from /proc/PID; without pathlib (1 MiB), because a worker imports this."""

from typing import NamedTuple

from weighin import phase_reporter
from weighin.phase_reporter import parse_status, read_text
from weighin.result import Memory
from weighin.units import KIB


class Shares(NamedTuple):
    """The parts of a process's proportional set size (PSS), in bytes; a page that n processes map counts 1/n."""

    anon: int  # without pages that were given back with MADV_FREE
    file: int
    shmem: int
    locked: int = 0  # of ``file``
    private: int = 0  # of ``anon``, which no other process maps


def read_status(pid: int | str = "self") -> dict[str, int]:
    return parse_status(read_text(f"/proc/{pid}/status"))


def memory_of(status: dict[str, int]) -> Memory:
    return Memory(**phase_reporter.memory_of(status))


def read_rollup(pid: int | str = "self") -> dict[str, int]:
    """Return the fields of smaps_rollup in bytes. The kernel walks the whole address space: 25 ms at 4 GiB."""
    _addresses, *lines = read_text(f"/proc/{pid}/smaps_rollup").splitlines()
    return {name: int(size.split()[0]) * KIB for name, _, size in (x.partition(":") for x in lines)}


def read_shares(pid: int) -> Shares | None:
    """Return None for a process without memory, at its end."""
    rollup = read_rollup(pid)
    if "Pss_Anon" not in rollup:
        return None
    anon, file, shmem = (rollup[f"Pss_{kind}"] for kind in ("Anon", "File", "Shmem"))
    locked = min(max(rollup["Locked"] - anon - shmem, 0), file)
    private = min(max(rollup["Private_Dirty"] - shmem, 0), rollup["Anonymous"])
    return Shares(max(anon - rollup["LazyFree"], 0), file, shmem, locked, private)
