"""Tell weighin what this process does: its phases, each with the peak of its memory, and more of a load.

Each message is a packet with a JSON object (its fields: ``weighin.run.listener``), sent to a Unix socket by path,
because launchers such as torchrun close descriptors that their children would inherit. After a message in ``AWAITED``,
the process waits for one byte: weighin has then read and reset the high-water mark of the cgroup; at those in ``MET``,
all ranks wait for each other. The process reads and resets its own mark, VmHWM.
"""

import _socket  # not socket, which takes 1.4 MiB of a worker's memory
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import RLock
from time import monotonic_ns
from typing import Any, Final

MET: Final = ("baseline", "ready", "shared", "done")
AWAITED: Final = (*MET, "begin", "end", "phase")
SOCKET, JOB = "phases", "job"  # in the folder of a cell: the socket, and a worker's job
PATIENCE_S: Final = 2.0
_LONGEST_NAME: Final = 200
LONGEST_MESSAGE: Final = 128 * 1024  # bytes; the kernel refuses a packet of more than 200 KiB
_FIELDS: Final = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "VmSwap")


@contextmanager
def address(path: str) -> Iterator[str]:
    """Yield an address of the socket at ``path`` that is short enough for the kernel."""
    if len(os.fsencode(path)) <= 107:  # sockaddr_un has 108 bytes, with a final zero (sys/un.h)
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def read_text(path: str) -> str:
    """Return the text of a small file in /proc; bytes that are not UTF-8 become surrogates."""
    with open(path, newline="", errors="surrogateescape") as file:  # noqa: PTH123 (pathlib takes 1 MiB)
        return file.read()


def parse_status(text: str) -> dict[str, int]:
    """Return the memory fields of a /proc/PID/status text, in bytes."""
    # Not by splitlines, which would also split at "\r" in the process's name.
    lines = (line.partition(":") for line in text.split("\n"))
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if name in _FIELDS}


def parse_faults(text: str) -> tuple[int, int]:
    # The program's name in brackets may itself contain blanks and brackets.
    fields = text.rpartition(")")[2].split()
    return int(fields[7]), int(fields[9])


def memory_of(status: dict[str, int]) -> dict[str, int]:
    return {
        "rss_bytes": status["VmRSS"],
        "anon_bytes": status["RssAnon"],
        "file_bytes": status["RssFile"],
        "shmem_bytes": status["RssShmem"],
        "swap_bytes": status.get("VmSwap", 0),
    }


def read_figures(pid: int | str = "self") -> dict[str, Any]:
    """Return what a process reports of itself: its peak VmHWM, its memory and its page faults."""
    status = parse_status(read_text(f"/proc/{pid}/status"))
    faults = parse_faults(read_text(f"/proc/{pid}/stat"))
    return {"peak_rss_bytes": status["VmHWM"], "memory": memory_of(status), "faults": faults}


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123
        file.write("5")


class Connection:
    """A connection to weighin, made at the first message, and anew if the program closed its descriptor or forked."""

    def __init__(self, path: str, patience_s: float | None = None) -> None:
        self._path, self._patience_s = path, patience_s
        self._descriptor = self._inode = -1

    def send(self, message: dict[str, Any], *, wait: bool) -> None:
        packet = json.dumps(message, separators=(",", ":")).encode()
        if not self._is_ours():
            self._descriptor = -1
        known = self._descriptor if self._descriptor >= 0 else None
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, known)
        try:
            connection.settimeout(self._patience_s)
            if known is None:
                with address(self._path) as place:
                    connection.connect(place)
                self._inode = os.fstat(connection.fileno()).st_ino
                self._descriptor = connection.fileno()
            connection.send(packet, _socket.MSG_NOSIGNAL)  # SIGPIPE could kill the program
            if wait and not connection.recv(1):
                raise ConnectionResetError
        finally:
            # Only the descriptor is kept: an open socket object causes a ResourceWarning at exit.
            if connection.fileno() == self._descriptor:
                connection.detach()
            connection.close()

    def drop(self) -> None:
        if self._is_ours():
            os.close(self._descriptor)
        self._descriptor = -1

    def _is_ours(self) -> bool:
        try:
            return self._descriptor >= 0 and os.fstat(self._descriptor).st_ino == self._inode
        except OSError:
            return False


class Reporter:
    """Reports the phases of any program, until a message fails, which raises no error in the program."""

    def __init__(self, path: str) -> None:
        self._connection = Connection(path, PATIENCE_S)
        self._is_off = False
        self._ids = count(1)
        self._lock = RLock()  # reentrant: a signal handler may begin a phase during a message
        os.register_at_fork(after_in_child=self._after_fork)

    def begin(self, name: str) -> tuple[int, int]:
        """Report that a phase begins; return what ``end`` needs: the pid, and the phase's number."""
        number = next(self._ids)
        self._tell(number, name)
        return os.getpid(), number

    def end(self, begun: tuple[int, int]) -> None:
        """Report that a phase ends; do nothing in a forked child of the process that began it."""
        if begun[0] == os.getpid():
            self._tell(begun[1])

    def _tell(self, number: int, name: str | None = None) -> None:
        """Send this process's memory. A ``name`` says that a phase begins: the high-water mark is reset, too."""
        if self._is_off:
            return
        if not self._lock.acquire(timeout=PATIENCE_S):
            self._is_off = True
            return
        try:
            fields = {"event": "end", "id": number, "t_ns": monotonic_ns()} | read_figures()
            if name is not None:
                valid = str(name)[:_LONGEST_NAME].encode(errors="replace")  # no lone surrogate
                fields |= {"event": "begin", "name": valid.decode(), "resets": True}
                try:
                    reset_peak()  # before weighin samples this process as one in the new phase
                except OSError:  # the program has another user now, or /proc is read-only
                    fields["resets"] = False
            self._connection.send(fields, wait=True)
        except Exception:  # the measured program must go on as it would without weighin
            self._is_off = True
            self._connection.drop()
        except BaseException:  # Ctrl-C: an answer may still arrive on this connection
            self._connection.drop()
            raise
        finally:
            self._lock.release()

    def _after_fork(self) -> None:
        self._lock = RLock()
        self._connection.drop()
