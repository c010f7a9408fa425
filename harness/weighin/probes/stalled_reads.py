"""Find the system calls in which a process waits for a read, with the file's path and offset.

A thread that waits for a page of a mapped file is in no system call, so that weighin cannot find
this thread.
"""

import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_OF_DESCRIPTOR: Final = {"x86_64": (0, 19), "aarch64": (63, 65)}  # read and readv, by processor
_OF_ARGUMENT: Final = {
    "x86_64": (17, 295, 327),
    "aarch64": (67, 69, 286),
}  # pread64, preadv, preadv2
_PAUSE_S: Final = 0.3

Read = tuple[int, str, int]
"""A thread's id, the path of the file that it reads, and the offset of the read in bytes."""


def waiting(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Return the path and the offset of each read that has lasted for at least 0.3 s."""
    pids = list(pids)
    before = {read for pid in pids for read in _reads(pid)}
    if not before:
        return []
    time.sleep(_PAUSE_S)
    now = {read for pid in pids for read in _reads(pid)}
    return sorted((path, offset) for _, path, offset in before & now)


def _reads(pid: int) -> Iterable[Read]:
    """Yield the reads of files that a process's threads wait for; none if this user may not look."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for thread in threads:
        try:
            words = (thread / "syscall").read_text().split()
            if read := _read_of(pid, words):
                yield int(thread.name), *read
        except (OSError, ValueError):  # the thread has ended, or is in no system call
            continue


def _read_of(pid: int, words: list[str]) -> tuple[str, int] | None:
    """Return the file and the offset of a system call; None if the call reads no file.

    ``words`` are the call's number and arguments from /proc/PID/task/TID/syscall.
    """
    number, machine = int(words[0]), platform.machine()
    by_descriptor = number in _OF_DESCRIPTOR.get(machine, ())
    if not by_descriptor and number not in _OF_ARGUMENT.get(machine, ()):
        return None
    descriptor = int(words[1], 16)
    path = str(Path(f"/proc/{pid}/fd/{descriptor}").readlink())
    if not path.startswith("/"):  # a pipe or a socket; a stat of the file could wait, too
        return None
    if not by_descriptor:
        return path, int(words[4], 16)
    position = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines()[0]
    return path, int(position.split()[1])
