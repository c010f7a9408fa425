"""Read lines from pipes, and write whole lines to pipes; parent and child processes use this module.

This module imports little, because a measured process imports it before torch, and because Ray
copies the functions of this module to other machines.
"""

import contextlib
import os
import select
from math import ceil, inf
from time import monotonic

_PART_BYTES = 4096  # small, so that the worker's heap does not grow


_LONGEST_BYTES = 256 * 1024**2


class LineBuffer:
    """Splits bytes into lines; drops an incomplete last line, such as that of a killed writer.

    Of a line of more than 256 MiB, only the end is kept, which is no event.
    """

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._lines: list[bytes] = []

    def __len__(self) -> int:
        return len(self._lines)

    def feed(self, data: bytes) -> None:
        first, *lines = data.split(b"\n")
        self._pending.append(first)  # joined at the line's end only: else long lines take forever
        self._pending_bytes += len(first)
        if self._pending_bytes > _LONGEST_BYTES:
            self._pending, self._pending_bytes = [first], len(first)
        if lines:
            self._lines += [b"".join(self._pending), *lines[:-1]]
            self._pending, self._pending_bytes = [lines[-1]], len(lines[-1])

    def pop(self) -> bytes | None:
        return self._lines.pop(0) if self._lines else None


class LineReader:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines = LineBuffer()

    def receive(self, timeout_s: float = inf) -> bytes | None:
        """Return the next line, or None at the end of the input.

        Raises:
            TimeoutError: no line arrived within ``timeout_s``.
        """
        deadline = monotonic() + timeout_s
        while (line := self._lines.pop()) is None:
            if not ready([self._descriptor], deadline - monotonic()):
                raise TimeoutError
            if not (data := os.read(self._descriptor, _PART_BYTES)):
                return None
            self._lines.feed(data)
        return line


def ready(descriptors: list[int], timeout_s: float) -> list[int]:
    """Wait at most ``timeout_s`` until a descriptor can be read, and return all descriptors that
    can then be read.

    ``ready`` uses poll, because select cannot wait for descriptors above 1023, which a process with
    many open files has.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    found = poll.poll(None if timeout_s == inf else ceil(max(0.0, timeout_s) * 1000))
    return [descriptor for descriptor, _ in found]


def write(descriptor: int, data: bytes) -> None:
    """Write all bytes to a pipe, in several parts if the pipe is full; stop if nobody reads the pipe."""
    left = memoryview(data)
    with contextlib.suppress(BrokenPipeError):
        while left:
            left = left[os.write(descriptor, left) :]


def pass_on(descriptor: int, data: bytes) -> bool:
    """Write all bytes to a descriptor, also a non-blocking one; return False if the write fails."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(descriptor, select.POLLOUT)
            writable.poll()
        except OSError:  # for example, nobody reads the pipe any more
            return False
    return True


def printed_lines(printed: bytes) -> list[str]:
    """Return the lines that a process printed, without blank lines at the beginning and the end."""
    return printed.decode(errors="replace").strip().splitlines()


def last_line(printed: bytes) -> str:
    """Return the last line that a process printed; empty if the process printed nothing."""
    lines = printed_lines(printed)
    return lines[-1].strip() if lines else ""
