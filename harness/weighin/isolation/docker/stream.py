"""The channel to a worker in a container: one attached stream carries stdin, stdout and stderr.

The engine multiplexes the stream in frames. A frame has a header of 8 bytes: the stream's number (1
stdout, 2 stderr), three zeros and the payload's length, big-endian. Source: Docker Engine API,
"Attach to a container, Stream format".
"""

import contextlib
import socket
import time
from collections import deque
from typing import Any, Final

from weighin.child_process import STDERR_KEPT_BYTES, LineBuffer

STDOUT: Final = 1
STDERR: Final = 2

CANCEL: Final = b"\x18"
"""ASCII CAN, which the keeper writes after the worker's end; text before it on a line is void."""

KEEPER: Final = (
    '"$@"; code=$?; '
    r"""printf '\030%d\n' "$code"; printf '\030' >&2; """
    'while read -r _; do :; done; exit "$code"'
)
"""The shell script of the keeper: the first process of a container, with the worker as its only
child.

The keeper keeps the container and its cgroup alive until weighin has read the cgroup's counters.
After the worker's end, the keeper writes CAN and the exit code to stdout; CAN invalidates an
incomplete line of a killed worker. The keeper also writes CAN to stderr, to mark the end of stderr.
The keeper ends when its stdin closes, at the latest when weighin ends. The shell (dash) needs 0.1
MiB of anonymous memory. The kernel charges 0.9 MiB to the cgroup before the worker starts, for the
keeper and the container's own start (measured on Debian 12, cgroup v1).
"""

_SEND_TIMEOUT_S: Final = 10.0
_STDERR_TIMEOUT_S: Final = 1.0


def close_stream(stream: Any) -> None:
    """Close an ``attach_socket`` stream, its socket, and the HTTP response that has the socket."""
    for each in (getattr(stream, "_response", None), stream, getattr(stream, "_sock", None)):
        if each is not None:
            each.close()


class FrameBuffer:
    """Splits the bytes of a multiplexed stream into (stream number, payload) frames."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the frames that ``data`` completes, and keep the incomplete rest."""
        pending, frames, start = self._pending + data, [], 0
        while len(pending) - start >= 8:
            end = start + 8 + int.from_bytes(pending[start + 4 : start + 8], "big")
            if end > len(pending):
                break
            frames.append((pending[start], pending[start + 8 : end]))
            start = end
        self._pending = pending[start:]
        return frames


class StreamChannel:
    """A channel to a worker over its container's stream; the container's keeper reports the exit code.

    Attributes:
        stderr_tail: the last 64 KiB that the worker and its strategy printed to stderr.
        worker_code: the exit code that the keeper sent, as a shell reports it (128 + n for signal
            n); None before the keeper sends it, or if the stream ended first.
    """

    def __init__(self, stream: Any) -> None:
        """``stream`` is the result of ``attach_socket``: a SocketIO, or a socket-like object."""
        self._stream = stream
        self._socket: socket.socket = getattr(stream, "_sock", stream)
        self._frames = FrameBuffer()
        self._stdout = LineBuffer()
        self._lines: deque[bytes] = deque()
        self._over = False  # no more events will arrive
        self._quiet = False  # no more stderr will arrive
        self.worker_code: int | None = None
        self.stderr_tail = b""

    def receive(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        while not self._lines and not self._over:
            self._read(deadline)
        if self._lines:
            return self._lines.popleft()
        self._drain_stderr()
        return None

    def wait(self, timeout_s: float) -> int | None:
        """Return ``worker_code`` once the worker has ended; ``receive`` still has its last events.

        Raises:
            TimeoutError: the worker still runs after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not self._over:
            self._read(deadline)
        self._drain_stderr()
        return self.worker_code

    def send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.settimeout(_SEND_TIMEOUT_S)
            self._socket.sendall(line)

    def end(self) -> None:
        """Expect no more data, for example because the container did not start."""
        self._over = self._quiet = True

    def close(self) -> None:
        self.end()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        close_stream(self._stream)

    def _read(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:  # a worker may print without end
            raise TimeoutError
        # recv with a timeout, not select: recv also works on TLS sockets.
        try:
            self._socket.settimeout(left)
            data = self._socket.recv(65536)
        except TimeoutError:  # an OSError, too
            raise
        except OSError:  # reset by the engine, or closed by this process
            data = b""
        if not data:
            self.end()
        for stream, payload in self._frames.feed(data):
            if stream == STDOUT:
                self._take_lines(payload)
            elif stream == STDERR:
                self._take_stderr(payload)

    def _take_lines(self, payload: bytes) -> None:
        self._stdout.feed(payload)
        while (line := self._stdout.pop()) is not None:
            _, cancelled, word = line.rpartition(CANCEL)
            if not cancelled:
                self._lines.append(line)
            elif word.isdigit():
                self.worker_code = int(word)
                self._over = True

    def _take_stderr(self, payload: bytes) -> None:
        self._quiet = payload.endswith(CANCEL)
        self.stderr_tail = (self.stderr_tail + payload.removesuffix(CANCEL))[-STDERR_KEPT_BYTES:]

    def _drain_stderr(self) -> None:
        deadline = time.monotonic() + _STDERR_TIMEOUT_S
        with contextlib.suppress(TimeoutError):
            while not self._quiet:
                self._read(deadline)
        self._quiet = True
