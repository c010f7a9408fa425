"""Read the memory and page faults of one process from its files in /proc/PID.

The measured process (worker) reads its own high-water mark with this module. The module does not
import pathlib, which would take 1 MiB in the worker. Source: Documentation/filesystems/proc.rst of
the kernel.
"""

from weighin import phase_reporter
from weighin.phase_reporter import parse_faults, parse_status, read_text
from weighin.result import Memory
from weighin.units import KIB

__all__ = ["parse_faults", "parse_status", "read_text"]


def read_status(pid: int | str = "self") -> dict[str, int]:
    """Return the memory fields of /proc/PID/status, in bytes."""
    return parse_status(read_text(f"/proc/{pid}/status"))


def read_pss(pid: int | str = "self") -> int:
    """Return the proportional set size of a process: a page that n processes map counts 1/n.

    The result is in bytes. The kernel walks the whole address space: about 25 ms at 4 GiB.
    """
    return read_rollup(pid)["Pss"]


def read_private(pid: int) -> int:
    """Return the private memory of a process, in bytes: the pages that no other process maps."""
    return sum(size for name, size in read_rollup(pid).items() if name.startswith("Private_"))


def read_rollup(pid: int | str) -> dict[str, int]:
    """Return the fields of /proc/PID/smaps_rollup, in bytes."""
    _addresses, *lines = read_text(f"/proc/{pid}/smaps_rollup").splitlines()
    return {name: int(size.split()[0]) * KIB for name, _, size in (x.partition(":") for x in lines)}


def memory_of(status: dict[str, int]) -> Memory:
    """Return the result of ``read_status`` as ``Memory``; its fields of cgroup and GPU stay None."""
    return Memory(**phase_reporter.memory_of(status))
