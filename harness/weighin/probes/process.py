"""Read the memory and page faults of one process from its files in /proc/PID.

The measured process (worker) reads its own high-water mark with this module. The module does not
import pathlib, which would take 1 MiB in the worker. Source: Documentation/filesystems/proc.rst of
the kernel.
"""

from weighin.result import Memory
from weighin.units import KIB

_STATUS_FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "VmSwap")


def read_status(pid: int | str = "self") -> dict[str, int]:
    """Return the memory fields of /proc/PID/status, in bytes."""
    return parse_status(read_text(f"/proc/{pid}/status"))


def parse_status(text: str) -> dict[str, int]:
    """Return the memory fields that a status text contains, in bytes."""
    fields = {}
    for line in text.split("\n"):  # splitlines would also split at "\r" in the process's name
        name, _, value = line.partition(":")
        if name in _STATUS_FIELDS:
            fields[name] = int(value.split()[0]) * KIB
    return fields


def read_pss(pid: int | str = "self") -> int:
    """Return the proportional set size of a process: a page that n processes map counts 1/n.

    The result is in bytes. The kernel walks the whole address space: about 25 ms at 4 GiB.
    """
    return read_rollup(pid)["Pss"]


def read_private(pid: int) -> int:
    """Return the private memory of a process, in bytes: the pages that no other process maps."""
    return sum(size for name, size in read_rollup(pid).items() if name.startswith("Private_"))


def read_private_dirty(pid: int | str = "self") -> int:
    """Return the private memory that a process has written, in bytes."""
    return read_rollup(pid)["Private_Dirty"]


def read_rollup(pid: int | str) -> dict[str, int]:
    """Return the fields of /proc/PID/smaps_rollup, in bytes."""
    lines = read_text(f"/proc/{pid}/smaps_rollup").splitlines()[
        1:
    ]  # the first line is a range of addresses
    return {name: int(size.split()[0]) * KIB for name, _, size in (x.partition(":") for x in lines)}


def memory_of(status: dict[str, int]) -> Memory:
    """Return the result of ``read_status`` as ``Memory``; its fields of cgroup and GPU stay None."""
    return Memory(
        rss_bytes=status["VmRSS"],
        anon_bytes=status["RssAnon"],
        file_bytes=status["RssFile"],
        shmem_bytes=status["RssShmem"],
        swap_bytes=status.get("VmSwap", 0),
    )


def parse_faults(text: str) -> tuple[int, int]:
    """Return (minor, major) page faults of a /proc/PID/stat text."""
    # The program's name in brackets may itself contain blanks and brackets.
    fields = text.rpartition(")")[2].split()
    return int(fields[7]), int(fields[9])


def read_text(path: str) -> str:
    """Return the text of a small file in /proc; bytes that are not UTF-8 become surrogates."""
    with open(path, errors="surrogateescape") as file:  # noqa: PTH123 (see the module's docstring)
        return file.read()
