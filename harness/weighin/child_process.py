"""Exchange events between weighin and the processes that it starts, over a socket that is their standard input.

``Child`` is weighin's end, and ``Parent`` that of the child. A measured process imports this module before
torch, so it imports little. Ray pickles ``Child``, and what it uses, by value.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, inf
from time import monotonic
from typing import Any

STDERR_KEPT_BYTES = 64 * 1024
PATIENCE_S = 10.0  # from SIGKILL to the end of a process
ORPHANED = 125
_PIDFD_INFO_EXIT = 8  # since Linux 6.15
_LIBC = ctypes.CDLL(None)  # loaded here, because a child must not load it between fork and exec
_PAUSE_S = 0.02  # before Linux 5.3, which has no pidfd, a process is polled at this interval

_PACKAGE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 (a worker imports no pathlib)
_DATA = f"{_PACKAGE}/_data"
_ABOVE = os.path.dirname(_PACKAGE)  # noqa: PTH120
CODE_PATH = (_ABOVE, _DATA if os.path.isdir(_DATA) else os.path.dirname(_ABOVE))  # noqa: PTH112, PTH120
"""The folders from which a child imports weighin and weighin's own strategies."""
is_program = False  # whether weighin is this process's program, and no part of pytest, for example


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module; -P keeps Python from importing from the current folder."""
    return (sys.executable, "-P", "-m", name, *arguments)


def path_of_worker(python: str) -> str:
    """Return PYTHONPATH of a worker: in an environment of ``run.releases``, the folder with the link to weighin's code."""
    code = f"{os.path.dirname(os.path.dirname(python))}/code"  # noqa: PTH120
    return code if os.path.isdir(f"{code}/weighin") else os.pathsep.join(CODE_PATH)  # noqa: PTH112


def environment(python_path: Iterable[str] = (), *, inherit: bool = True) -> dict[str, str]:
    """Return this process's environment, in which a child finds ``python_path`` and weighin's code."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep) if inherit else []
    # An empty entry would be the current folder.
    paths = [*python_path, *CODE_PATH, *filter(None, own)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class Channel:
    """One end of a socket between two processes; ``other`` is the pidfd of the one at the other end."""

    def __init__(self, descriptor: int, other: int | None = None) -> None:
        import socket  # imported here to save a worker's memory

        self._socket, self._read = socket.socket(fileno=descriptor), bytearray()
        # A process that the other one has forked may keep the socket open after the other's end.
        self._awaited = [descriptor] if other is None else [descriptor, other]

    def send(self, event: str, **fields: Any) -> None:
        """Send an event; do nothing if the other process has ended."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")

    def receive(self, timeout_s: float = inf) -> dict[str, Any] | None:
        """Return the next event; None if the other process has ended. TimeoutError: no event came in time."""
        deadline, start = monotonic() + timeout_s, 0
        while (end := self._read.find(b"\n", start)) < 0:
            start = len(self._read)  # a long event is searched once
            if not (found := ready(self._awaited, deadline - monotonic())):
                raise TimeoutError
            try:
                data = self._socket.recv(1 << 20) if self._awaited[0] in found else b""
            except OSError:  # it was killed
                data = b""
            if not data:
                return None
            self._read += data
        event: dict[str, Any] = json.loads(self._read[:end])
        del self._read[: end + 1]
        return event


class Tail:
    """Reads what processes print into a pipe, in a thread, to its end; keeps the last 64 KiB."""

    def __init__(self, file: int) -> None:
        self._text = b""
        self._reader = threading.Thread(target=self._read, args=[file], daemon=True)
        self._reader.start()

    def _read(self, file: int) -> None:
        while data := os.read(file, 4096):
            self._text = (self._text + data)[-STDERR_KEPT_BYTES:]
        os.close(file)

    @property
    def text(self) -> bytes:
        """What was printed until now; this takes 0.5 s while any process keeps the pipe open."""
        self._reader.join(0.5)  # for what a process printed before its end
        return self._text


class Child(Channel, contextlib.AbstractContextManager["Child"]):
    """A running child in a session and process group of its own, which Ctrl-C does not reach."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        import socket  # as is subprocess, to save a worker's memory
        import subprocess

        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._popen = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=variables,
            )
            self.pid = self._popen.pid
            self.process = open_process(self.pid)
            super().__init__(ours.detach(), self.process)
        assert self._popen.stdout
        self._printed = Tail(os.dup(self._popen.stdout.fileno()))
        self._popen.stdout.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def printed(self) -> bytes:
        return self._printed.text

    def wait(self, timeout_s: float = inf) -> int:
        """Return the exit code, -n for signal n; raise TimeoutError if it does not end."""
        if not wait_for_end(self.process, lambda: self._popen.poll() is not None, timeout_s):
            raise TimeoutError
        return int(self._popen.returncode)

    def close(self) -> None:
        """Kill the child's process group, and wait for the child's end; TimeoutError: it does not end."""
        if self._socket.fileno() < 0:  # it is closed
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self.wait(PATIENCE_S)
        finally:
            self._socket.close()
            if self.process is not None:
                os.close(self.process)
                self.process = None


def ask(
    command: Sequence[str], variables: Mapping[str, str], timeout_s: float = inf
) -> tuple[dict[str, Any] | None, str]:
    """Run a command to its end; return the event that it sent and "", or None and why it sent none."""
    deadline = monotonic() + timeout_s
    with Child(command, variables) as child:
        event = child.receive(timeout_s)
        if (code := child.wait(deadline - monotonic())) or not event:
            return None, last_line(child.printed) or f"exit code {code}"
        return event, ""


def fields_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a child's event; raise the HarnessError that it sent by ``Parent.answer``."""
    from weighin import errors  # imported here, because a measured process needs none

    if event["event"] == "error":
        raise getattr(errors, event["type"])(event["message"], event["repair"])
    return {name: value for name, value in event.items() if name != "event"}


class Parent(Channel):
    def __init__(self) -> None:
        super().__init__(os.dup(0))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def answer(self, event: str, make: Callable[[], Mapping[str, Any]]) -> int:
        """Send what ``make`` returns as the fields of ``event``, or its error; return the exit code."""
        from weighin.errors import CheckpointError, ConfigError, FormatLimit, HarnessError, explain

        try:
            self.send(event, **make())
        except (HarnessError, OSError) as fault:
            error = explain(fault) if isinstance(fault, OSError) else fault
            kinds = (FormatLimit, ConfigError, CheckpointError, HarnessError)
            kind = next(kind for kind in kinds if isinstance(error, kind))
            self.send("error", type=kind.__name__, message=error.message, repair=error.repair)
            return error.exit_code
        return 0


def end_with_parent(parent: int = 0) -> None:
    """Let the kernel kill this process when the thread of ``parent`` that started it ends."""
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG in linux/prctl.h
    if parent and os.getppid() != parent:  # it has ended before
        os._exit(ORPHANED)


def adopt_orphans(*, adopt: bool = True) -> bool:
    """Become a child subreaper, the parent of orphaned descendants, or not; return whether it was one before."""
    before = ctypes.c_int()
    _LIBC.prctl(37, ctypes.byref(before))  # PR_GET_CHILD_SUBREAPER in linux/prctl.h
    _LIBC.prctl(36, int(adopt))  # PR_SET_CHILD_SUBREAPER
    return bool(before.value)


def ready(descriptors: list[int], timeout_s: float) -> list[int]:
    """Wait at most ``timeout_s`` until a descriptor can be read; return all that can then be read."""
    poll = select.poll()  # select cannot wait for descriptors above 1023, as of many open files
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    timeout_ms = None if timeout_s == inf else ceil(max(0.0, timeout_s) * 1000)
    return [descriptor for descriptor, _ in poll.poll(timeout_ms)]


def write(descriptor: int, data: bytes) -> bool:
    """Write all bytes, in several parts if a pipe is full; return False if nobody reads any more."""
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
    return printed.decode(errors="replace").strip().splitlines()


def last_line(printed: bytes) -> str:
    return "".join(printed_lines(printed)[-1:]).strip()


def signal_each(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to each process that has not ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_for_end(process: int | None, has_ended: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether a process ends within ``timeout_s``; ``process`` is its pidfd, if there is one."""
    deadline = monotonic() + timeout_s
    # A signal that another thread took late is handled in this one, but does not end its poll.
    awaited, pause_s = ([], _PAUSE_S) if process is None else ([process], 1.0)
    while not has_ended():
        if (left_s := deadline - monotonic()) <= 0:
            return False
        ready(awaited, min(left_s, pause_s))
    return True


def wait_status(process: int) -> int | None:
    """Return the status of a reaped process (its pidfd, also of no child); None before Linux 6.15."""
    import fcntl  # imported here to save a worker's memory

    told = bytearray(struct.pack("=QQ", _PIDFD_INFO_EXIT, 0) + bytes(48))
    with contextlib.suppress(OSError):
        fcntl.ioctl(process, 0xC040FF0B, told)  # of linux/pidfd.h, since Linux 6.13
    mask, status = struct.unpack("=Q52xi", told)
    return status if mask & _PIDFD_INFO_EXIT else None


def open_process(pid: int) -> int | None:
    """Return a pidfd, which is readable when the process ends; None if the kernel gives none."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # AttributeError: Python was built for an older kernel
        return None
