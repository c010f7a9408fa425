"""Read the kernel's figures of one process from /proc/PID/status and /proc/PID/stat.

The worker reads its own high-water mark with this module. The module does not import pathlib, which
would take 1 MiB in the worker. Source: Documentation/filesystems/proc.rst of the kernel.
"""

from weighin.record import Memory
from weighin.units import KIB

_STATUS_FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "VmSwap")


def read_status(pid: int | str = "self") -> dict[str, int]:
    """Return the memory fields of /proc/PID/status, in bytes."""
    return parse_status(read_text(f"/proc/{pid}/status"))


def parse_status(text: str) -> dict[str, int]:
    """Return the memory fields that a status text contains, in bytes."""
    fields = {}
    for line in text.split("\n"):  # the process's name may contain other ends of lines
        name, _, value = line.partition(":")
        if name in _STATUS_FIELDS:
            fields[name] = int(value.split()[0]) * KIB
    return fields


def read_pss(pid: int | str = "self") -> int:
    """Return the proportional set size of a process, in bytes: each page divided by its users.

    The kernel walks the whole address space, which takes about 25 ms at 4 GiB.
    """
    lines = read_text(f"/proc/{pid}/smaps_rollup").splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith("Pss:"))


def read_private(pid: int) -> int:
    """Return the memory of a process in pages that no other process maps, in bytes.

    The kernel walks the whole address space, as for ``read_pss``.
    """
    lines = read_text(f"/proc/{pid}/smaps_rollup").splitlines()
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith("Private_"))


def memory_of(status: dict[str, int]) -> Memory:
    """Return the fields of a status as ``Memory``, without figures of the cgroup and the GPU."""
    return Memory(
        rss_bytes=status["VmRSS"],
        anon_bytes=status["RssAnon"],
        file_bytes=status["RssFile"],
        shmem_bytes=status["RssShmem"],
        swap_bytes=status.get("VmSwap", 0),
    )


def parse_faults(text: str) -> tuple[int, int]:
    """Return (minor, major) faults of a /proc/PID/stat text.

    Fields are counted after the last bracket, because the command's name before it may contain
    blanks and brackets.
    """
    fields = text.rpartition(")")[2].split()
    return int(fields[7]), int(fields[9])


def read_text(path: str) -> str:
    """Return the text of a small file of the kernel, whose names may be any bytes."""
    with open(path, errors="surrogateescape") as file:  # noqa: PTH123 (see the module's docstring)
        return file.read()
