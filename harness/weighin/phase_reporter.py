"""Report when this process begins and ends a phase, so that ``weighin run`` reads the memory peaks
at these times.

Each message of the measured process to ``weighin run`` is one packet with one line of JSON:
``{"event": "begin", "id": 1, "name": "read"}`` or ``{"event": "end", "id": 1, "t_ns": ...}``. After
its message, the measured process waits for one byte from ``weighin run``. ``weighin run`` answers
with a byte after it has read and reset the kernel's high-water marks. The measured process connects
to the socket by path, because launchers such as torchrun close descriptors that their children
would inherit.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import RLock
from time import monotonic_ns
from typing import Any, Final

PATIENCE_S: Final = 2.0
LONGEST_NAME: Final = 200
_LONGEST_PATH: Final = 107  # bytes of a path in sockaddr_un, without the final zero (sys/un.h)


@contextmanager
def address(path: str) -> Iterator[str]:
    """Yield an address of at most 107 bytes for the socket at ``path``, valid in the ``with`` block."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


class Reporter:
    """The connection of this process to ``weighin run``, made at the first phase.

    A failure raises no error, but this process then reports no further phases.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_off = False
        self._ids = count(1)
        self._lock = RLock()  # reentrant: a signal handler may begin a phase during a message
        self._descriptor = self._inode = -1
        os.register_at_fork(after_in_child=self._after_fork)

    def begin(self, name: str) -> tuple[int, int]:
        """Report that a phase begins; return the pid and the phase's number, to pass to ``end``."""
        number = next(self._ids)
        self._tell(event="begin", id=number, name=name)
        return os.getpid(), number

    def end(self, begun: tuple[int, int]) -> None:
        """Report that a phase ends; do nothing in a forked child of the process that began the phase."""
        pid, number = begun
        if pid == os.getpid():
            self._tell(event="end", id=number, t_ns=monotonic_ns())

    def _tell(self, **fields: Any) -> None:
        """Send a message and wait for the acknowledgement; after a failure, never send again."""
        if self._is_off:
            return
        if not self._lock.acquire(timeout=PATIENCE_S):
            self._is_off = True
            return
        try:
            if "name" in fields:
                name = str(fields["name"])[:LONGEST_NAME]
                fields["name"] = name.encode(errors="replace").decode()  # no lone surrogate
            self._exchange(json.dumps(fields).encode() + b"\n")
        except Exception:  # the measured program must go on as it would without weighin
            self._is_off = True
            self._drop()
        except BaseException:  # Ctrl-C: an acknowledgement may still arrive on this connection
            self._drop()
            raise
        finally:
            self._lock.release()

    def _exchange(self, message: bytes) -> None:
        if not self._is_ours():
            self._descriptor = -1
            self._connect()
        connection = _socket(self._descriptor)
        try:
            connection.settimeout(PATIENCE_S)
            connection.send(message, socket.MSG_NOSIGNAL)  # SIGPIPE could kill the program
            if not connection.recv(1):
                raise ConnectionResetError
        finally:
            connection.detach()

    def _connect(self) -> None:
        connection = _socket()
        try:
            connection.settimeout(PATIENCE_S)
            with address(self._path) as place:
                connection.connect(place)
            self._inode = os.fstat(connection.fileno()).st_ino
            # Only the descriptor is kept: an open socket object causes a ResourceWarning at exit.
            self._descriptor = connection.detach()
        finally:
            connection.close()

    def _is_ours(self) -> bool:
        """Return whether the descriptor is still the connection to ``weighin run``. The program may
        have closed it, and opened another file with the same number.
        """
        try:
            return self._descriptor >= 0 and os.fstat(self._descriptor).st_ino == self._inode
        except OSError:
            return False

    def _drop(self) -> None:
        if self._is_ours():
            os.close(self._descriptor)
        self._descriptor = -1

    def _after_fork(self) -> None:
        """In a forked child, drop the parent's connection, and make a new, unlocked lock."""
        self._lock = RLock()
        self._drop()


def _socket(descriptor: int | None = None) -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, descriptor)
