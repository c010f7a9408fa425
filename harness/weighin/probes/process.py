"""Read the kernel's figures of one process from /proc/PID/status and /proc/PID/stat.

The worker reads its own high-water mark with this module. The module does not import pathlib, which
would take 1 MiB in the worker. Source: Documentation/filesystems/proc.rst of the kernel.
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
    for line in text.split("\n"):  # the process's name may contain other ends of lines
        name, _, value = line.partition(":")
        if name in _STATUS_FIELDS:
            fields[name] = int(value.split()[0]) * KIB
    return fields


def read_pss(pid: int | str = "self") -> int:
    """Return the proportional set size of a process, in bytes: each page divided by its users.

    The kernel walks the whole address space, which takes about 25 ms at 4 GiB.
    """
    return _read_rollup(pid)["Pss"]


def read_shares(pid: int | str = "self") -> tuple[int, int, int] | None:
    """Return the anonymous, file-backed and shared parts of a process's PSS, in bytes.

    The result is None for a process without memory, which has just ended, and before Linux 5.4. The
    kernel walks the whole address space, as for ``read_pss``.
    """
    rollup = _read_rollup(pid)
    try:
        return rollup["Pss_Anon"], rollup["Pss_File"], rollup["Pss_Shmem"]
    except KeyError:
        return None


def read_private(pid: int) -> int:
    """Return the memory of a process in pages that no other process maps, in bytes.

    The kernel walks the whole address space, as for ``read_pss``.
    """
    return sum(size for name, size in _read_rollup(pid).items() if name.startswith("Private_"))


def read_private_dirty(pid: int | str = "self") -> int:
    """Return the memory in pages that a process has changed and no other process maps, in bytes.

    The kernel walks the whole address space, as for ``read_pss``.
    """
    return _read_rollup(pid)["Private_Dirty"]


def _read_rollup(pid: int | str) -> dict[str, int]:
    """Return the fields of /proc/PID/smaps_rollup, in bytes."""
    lines = read_text(f"/proc/{pid}/smaps_rollup").splitlines()[1:]  # the first is a range
    return {name: int(size.split()[0]) * KIB for name, _, size in (x.partition(":") for x in lines)}


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
