"""Start child processes, and exchange lines with them. A child uses ``weighin.parent_process``.

``Child`` uses nothing but the standard library and ``weighin.pipes``, because Ray pickles the class
``Child`` by value and sends it to other machines.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, Self

from weighin.pipes import LineBuffer, last_line, ready, write
from weighin.protocol import decode_event

STDERR_KEPT_BYTES = 64 * 1024
PATIENCE_S = 10.0
"""The longest wait from SIGKILL to the end of a process."""
_PART_BYTES = 65536
_MOST_READS = 32  # 32 parts are 2 MiB, more than a pipe can hold
_PAUSE_S = 0.02  # before Linux 5.3, which has no pidfd, a process is polled at this interval

_PACKAGE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 (a worker imports no pathlib)
_DATA = f"{_PACKAGE}/_data"
_ABOVE = os.path.dirname(_PACKAGE)  # noqa: PTH120
CODE_PATH = (_ABOVE, _DATA if os.path.isdir(_DATA) else os.path.dirname(_ABOVE))  # noqa: PTH112, PTH120
"""The folders from which a child imports weighin and weighin's own strategies."""


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module; -P keeps Python from importing from the current folder."""
    return (sys.executable, "-P", "-m", name, *arguments)


def environment(python_path: Iterable[str] = (), *, inherit: bool = True) -> dict[str, str]:
    """Return this process's environment, with a PYTHONPATH of ``python_path`` and ``CODE_PATH``.

    With ``inherit``, the entries of this process's own PYTHONPATH follow, without empty entries,
    which stand for the current folder.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep) if inherit else []
    paths = [*python_path, *CODE_PATH, *filter(None, inherited)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class PipeChannel:
    """The parent's ends of the pipes to a child's standard streams; ``close`` closes them.

    ``process`` is a descriptor that becomes readable when the child ends. Without ``process``, the
    lines end when standard output closes. This may be after the child's end, because a process that
    the child forked can keep standard output open. ``copy`` is a descriptor to which the channel
    also writes the child's standard error.

    Attributes:
        stderr_tail: the last 64 KiB that the child printed to standard error.
    """

    def __init__(
        self,
        stdin: int,
        stdout: int,
        stderr: int,
        process: int | None = None,
        copy: int | None = None,
    ) -> None:
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        self._process, self._copy = process, copy
        self._open = [stdout, stderr]
        self._lines = LineBuffer()
        self._owned = {stdin, stdout, stderr, *([] if process is None else [process])}
        self.stderr_tail = b""

    def receive(self, timeout_s: float = inf) -> bytes | None:
        """Return the child's next line, or None after the last line.

        Raises:
            TimeoutError: no line arrived within ``timeout_s``.
        """
        deadline = monotonic() + timeout_s
        while (line := self._lines.pop()) is None:
            if self._stdout not in self._open:
                self._drain(self._stderr)
                return None
            left_s = deadline - monotonic()
            # After the deadline, read no standard error: a child may print there without end.
            if not self._read_ready(self._open if left_s > 0 else [self._stdout], left_s):
                raise TimeoutError
        return line

    def read(self) -> bool:
        """Read the data that has arrived; return whether ``receive`` would return at once."""
        self._read_ready(self._open, 0)
        return bool(self._lines) or self._stdout not in self._open

    def filenos(self) -> list[int]:
        """Return the descriptors to poll: one is readable if data arrived or the child ended."""
        return [*self._open, *([] if self._process is None else [self._process])]

    def send(self, line: bytes) -> None:
        """Write a line to the child; do nothing if the child has ended."""
        if self._stdin in self._owned:
            write(self._stdin, line)

    def end_input(self) -> None:
        self._close(self._stdin)

    def close(self) -> None:
        self._open = []
        for descriptor in list(self._owned):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._owned:
            self._owned.remove(descriptor)
            os.close(descriptor)

    def _read_ready(self, awaited: list[int], timeout_s: float) -> bool:
        """Wait for data or the child's end, and read the data; return False if the time ran out."""
        ended = [] if self._process is None else [self._process]
        found = ready([*awaited, *ended], timeout_s)
        if self._process in found:  # all that the child wrote is now in the pipes
            self._drain(self._stdout)
            self._open = [descriptor for descriptor in self._open if descriptor == self._stderr]
        else:
            for descriptor in found:
                self._read(descriptor)
        return bool(found)

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, _PART_BYTES)
        if not data:
            self._open.remove(descriptor)
        elif descriptor == self._stdout:
            self._lines.feed(data)
        else:
            self.stderr_tail = (self.stderr_tail + data)[-STDERR_KEPT_BYTES:]
            if self._copy is not None:
                write(self._copy, data)

    def _drain(self, descriptor: int) -> None:
        """Read a pipe until it is empty, but at most 2 MiB: a process may write without end."""
        for _ in range(_MOST_READS):
            if descriptor not in self._open or not ready([descriptor], 0):
                return
            self._read(descriptor)


class Child(PipeChannel):
    """A running child process, in a session and process group of its own.

    Ctrl-C in a terminal does not reach the child; ``close`` kills the child.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], copy: int | None = None
    ) -> None:
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=variables,
        )
        self.pid = self._popen.pid
        streams = [
            each for each in (self._popen.stdin, self._popen.stdout, self._popen.stderr) if each
        ]
        # The channel owns duplicates, because Popen closes the original descriptors.
        stdin, stdout, stderr = (os.dup(stream.fileno()) for stream in streams)
        for stream in streams:
            stream.close()
        super().__init__(stdin, stdout, stderr, open_process(self.pid), copy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, timeout_s: float = inf) -> int:
        """Wait for the child's end while reading its output; return the exit code, -n for signal n.

        Raises:
            TimeoutError: the child still runs after ``timeout_s``.
        """
        deadline = monotonic() + timeout_s
        while (code := self._popen.poll()) is None:
            if (left_s := deadline - monotonic()) <= 0:
                raise TimeoutError
            self._read_ready(
                self._open, left_s if self._process is not None else min(left_s, _PAUSE_S)
            )
        self._drain(self._stderr)
        return code

    def kill(self) -> None:
        """Kill the child's process group."""
        with contextlib.suppress(ProcessLookupError):  # the child has ended by itself
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the child's process group, and wait for the child's end; a second call does nothing.

        Raises:
            TimeoutError: the child still runs ``PATIENCE_S`` after SIGKILL.
        """
        if not self._owned:
            return
        self.kill()
        try:
            self.wait(PATIENCE_S)
        finally:
            super().close()


@dataclass(frozen=True, slots=True)
class Answer:
    """A child's exit code (-n for signal n), events, and last 64 KiB of standard error."""

    code: int
    events: list[dict[str, Any]]
    stderr_tail: bytes

    @property
    def why(self) -> str:
        """The last line that the child printed to standard error, or else the child's exit code."""
        return last_line(self.stderr_tail) or f"exit code {self.code}"


def ask(
    command: Sequence[str],
    variables: Mapping[str, str],
    question: bytes = b"",
    timeout_s: float = inf,
) -> Answer:
    """Run a command to its end, with ``question`` as its standard input; return its ``Answer``.

    Raises:
        TimeoutError: the command still ran after ``timeout_s``, and was killed.
    """
    deadline = monotonic() + timeout_s
    with Child(command, variables) as child:
        child.send(question)
        child.end_input()
        lines = list(iter(lambda: child.receive(deadline - monotonic()), None))
        code = child.wait(deadline - monotonic())
        return Answer(code, list(filter(None, map(decode_event, lines))), child.stderr_tail)


def signal_each(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send the signal ``number`` to each process; ignore processes that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_for_end(process: int | None, has_ended: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether a process ends within ``timeout_s``; ``process`` is its pidfd, or None."""
    deadline = monotonic() + timeout_s
    while not has_ended():
        left_s = deadline - monotonic()
        if left_s <= 0:
            return False
        if process is None:
            ready([], min(left_s, _PAUSE_S))
        else:
            ready([process], left_s)
    return True


def open_process(pid: int) -> int | None:
    """Return a pidfd, which is readable when the process ends; None if the kernel gives none."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # AttributeError: a Python built for older kernels
        return None
