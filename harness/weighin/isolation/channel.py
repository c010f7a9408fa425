"""The channel between parent and worker, for events, acknowledgements and standard error.

The worker writes events to its original standard output, one line for each event, and points file
descriptor 1 at standard error, so that a strategy's prints cannot mix with events.
"""

import contextlib
import os
import select
import time
from typing import Protocol

STDERR_KEPT_BYTES = 64 * 1024
_MOST_READS = 32  # reads of 64 KiB: more than a pipe can hold


class Channel(Protocol):
    """The parent's ends of a worker's standard streams."""

    @property
    def stderr_tail(self) -> bytes:
        """The last 64 KiB that the worker and its strategy printed."""
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next event line, or None at the end; raise TimeoutError if it is late."""
        ...

    def send(self, line: bytes) -> None:
        """Write a line to the worker; do nothing if it has ended, as its exit is read elsewhere."""
        ...

    def close(self) -> None: ...


class LineBuffer:
    """Splits bytes into complete lines; drops an incomplete last line, whose writer was killed."""

    def __init__(self) -> None:
        self._pending = b""
        self._lines: list[bytes] = []

    def feed(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._lines.extend(lines)

    def pop(self) -> bytes | None:
        return self._lines.pop(0) if self._lines else None


class PipeChannel:
    """A channel over three pipes, which owns the descriptors of the pipes.

    ``process`` is a descriptor that becomes readable when the worker ends. Without ``process``,
    events end when the pipe closes, and a forked child of the worker can delay that.
    """

    def __init__(self, stdin: int, stdout: int, stderr: int, process: int | None = None) -> None:
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        self._process = process
        self._open = [stdout, stderr]
        self._lines = LineBuffer()
        self.stderr_tail = b""

    def receive(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        while (line := self._lines.pop()) is None:
            if self._stdout not in self._open:
                self._drain(self._stderr)
                return None
            left_s = deadline - time.monotonic()
            # After the deadline, wait only for events, because a worker may print without end.
            awaited = self._open if left_s > 0 else [self._stdout]
            ended = [] if self._process is None else [self._process]
            ready, _, _ = select.select([*awaited, *ended], [], [], max(0.0, left_s))
            if not ready:
                raise TimeoutError
            if self._process in ready:  # everything that the worker wrote is in the pipes
                self._drain(self._stdout)
                self._open = [descriptor for descriptor in self._open if descriptor == self._stderr]
                continue
            for descriptor in ready:
                self._read(descriptor)
        return line

    def send(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdin, line)

    def close(self) -> None:
        for descriptor in (self._stdin, self._stdout, self._stderr, self._process):
            if descriptor is not None:
                os.close(descriptor)

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, 65536)
        if not data:
            self._open.remove(descriptor)
        elif descriptor == self._stdout:
            self._lines.feed(data)
        else:
            self.stderr_tail = (self.stderr_tail + data)[-STDERR_KEPT_BYTES:]

    def _drain(self, descriptor: int) -> None:
        """Read the pipe until it is empty, up to a maximum, because a child may go on writing."""
        for _ in range(_MOST_READS):
            if descriptor not in self._open or not select.select([descriptor], [], [], 0)[0]:
                return
            self._read(descriptor)
