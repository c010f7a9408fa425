"""Connect the standard streams of a container with descriptors of this process.

If standard input, output and error are all terminals, the container gets a terminal of its own.
weighin then sets its own terminal to raw mode, so that each key, even Ctrl-C, reaches the command
at once. If one of the three streams is no terminal, the streams of the container stay separate.
"""

import atexit
import contextlib
import os
import secrets
import signal
import socket
import sys
import termios
import threading
import tty
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any, Final

from weighin.child_process import ready, write
from weighin.isolation.base import Streams
from weighin.isolation.docker.stream import CANCEL, STDERR, STDOUT, FrameBuffer, close_stream

_AT_ONCE: Final = 64 * 1024
_RESIZE_S: Final = 0.25
_PAUSE_S: Final = 0.05
_PATIENCE_S: Final = 5.0  # for output that the command has written before its end


class Standard:
    """This process's descriptors for a command's standard streams; None for a closed stream."""

    def __init__(self, streams: Streams) -> None:
        """Copy the descriptors, because a caller may close the originals after the command's start."""
        self.stdin = _copied(0, streams.stdin)
        self.outputs = {STDOUT: _copied(1, streams.stdout), STDERR: _copied(2, streams.stderr)}
        every = (self.stdin, *self.outputs.values())
        self.is_in_background = self.stdin is not None and _in_background(self.stdin)
        self.is_terminal = not self.is_in_background and all(map(_is_terminal, every))

    def close(self) -> None:
        for descriptor in (self.stdin, *self.outputs.values()):
            if descriptor is not None:
                os.close(descriptor)
        self.stdin = None
        self.outputs = {}


class _Output:
    """One stream's output, up to the mark with which the container's first process ends it."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._held = b""
        self.is_over = False

    def feed(self, data: bytes) -> bytes:
        """Return the output in ``data``, except bytes at its end that may be the beginning of the mark."""
        if self.is_over:
            return b""
        output, found, _ = (self._held + data).partition(self._mark)
        self.is_over = bool(found)
        held = 0 if found else _overlap(output, self._mark)
        self._held = output[len(output) - held :]
        return output[: len(output) - held]

    def rest(self) -> bytes:
        """Return the bytes that ``feed`` kept back; for a stream that ended without the mark."""
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, mark: bytes) -> int:
    """Return how many bytes at the end of ``data`` are also the beginning of ``mark``."""
    longest = min(len(data), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if data.endswith(mark[:n])), 0)


class Attachment:
    """The streams of one container, from ``begin`` until ``finish``.

    Attributes:
        mark: the bytes that the container's first process writes after the command's last output;
            weighin does not pass them on.
        interrupted: a function to call with SIGPIPE when the reader of the output has closed it.
    """

    def __init__(
        self, stream: Any, standard: Standard, *, resize: Callable[[int, int], None]
    ) -> None:
        """``stream`` is the result of ``attach_socket``; ``resize`` sets the terminal's (rows, columns)."""
        self._stream = stream
        self._socket: socket.socket = getattr(stream, "_sock", stream)
        self._socket.settimeout(None)
        self._standard = standard
        self._resize = resize
        self._size: os.terminal_size | None = None
        self._mode: list[Any] | None = None
        self.mark = CANCEL + secrets.token_hex(8).encode()
        self._outputs = {
            number: _Output(self.mark)
            for number in ([STDOUT] if standard.is_terminal else [STDOUT, STDERR])
        }
        self._woken, self._wake = os.pipe()
        self._closed = self._writing = False
        self.interrupted: Callable[[int], None] = lambda _: None
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._pass_output, "output"), (self._pass_input, "input"))
        ]

    def begin(self) -> None:
        """Begin to copy the streams, after the container starts and before the command starts."""
        if self._standard.is_terminal:
            assert self._standard.stdin is not None
            self._follow_size()
            self._mode = termios.tcgetattr(self._standard.stdin)
            atexit.register(self._restore)
            tty.setraw(self._standard.stdin, termios.TCSADRAIN)
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Copy the rest of the output, and restore the terminal, after the command's end."""
        output, _ = self._threads
        deadline = monotonic() + _PATIENCE_S
        while output.is_alive():
            output.join(_PAUSE_S)
            if monotonic() > deadline and not self._writing:  # a slow reader may block the copying
                self._end_stream()
        self._end_input()
        self._restore()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_stream()
        self._end_input()
        self._restore()
        close_stream(self._stream)
        os.close(self._woken)
        os.close(self._wake)
        self._standard.close()

    def _end_stream(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _end_input(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake, b"\n")
        _, keys = self._threads
        if keys.is_alive():
            keys.join(_PATIENCE_S)

    def _restore(self) -> None:
        if self._mode is not None and self._standard.stdin is not None:
            termios.tcsetattr(self._standard.stdin, termios.TCSADRAIN, self._mode)
            self._mode = None
            atexit.unregister(self._restore)

    def _pass_output(self) -> None:
        frames, outputs = FrameBuffer(), self._outputs
        while not all(output.is_over for output in outputs.values()):
            if not (data := self._receive()):
                break
            parts = [(STDOUT, data)] if self._standard.is_terminal else frames.feed(data)
            for number, payload in parts:
                if number in outputs:
                    self._write(number, outputs[number].feed(payload))
        for number, output in outputs.items():
            self._write(number, output.rest())

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_AT_ONCE)
        except OSError:  # reset by the engine, or closed by this process
            return b""

    def _write(self, number: int, data: bytes) -> None:
        if (descriptor := self._standard.outputs.get(number)) is None:
            return
        self._writing = True
        if not write(descriptor, data):
            os.close(descriptor)
            self._standard.outputs[number] = None
            self.interrupted(
                signal.SIGPIPE
            )  # without a container, the command would get this signal
        self._writing = False

    def _pass_input(self) -> None:
        if self._standard.is_in_background:
            return
        stdin, is_terminal = self._standard.stdin, self._standard.is_terminal
        while stdin is not None:
            found = ready([stdin, self._woken], _RESIZE_S if is_terminal else inf)
            if self._woken in found:
                return
            if is_terminal:
                self._follow_size()
            if stdin in found and not self._send(stdin):
                break
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _send(self, stdin: int) -> bool:
        try:
            if data := os.read(stdin, _AT_ONCE):
                self._socket.sendall(data)
        except OSError:
            return False
        return bool(data)

    def _follow_size(self) -> None:
        assert self._standard.stdin is not None
        with contextlib.suppress(OSError):
            if (size := os.get_terminal_size(self._standard.stdin)) != self._size:
                self._size = size
                self._resize(size.lines, size.columns)


def _copied(standard: int, given: int | None) -> int | None:
    """Return a copy of ``given``, else of the standard stream; None if weighin never had it."""
    if given is not None:
        return os.dup(given)
    # Another file may have got the number of a closed standard stream by now.
    was_open = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[standard] is not None
    return os.dup(standard) if was_open else None


def _is_terminal(descriptor: int | None) -> bool:
    return descriptor is not None and os.isatty(descriptor)


def _in_background(descriptor: int) -> bool:
    """Tell whether a read would stop this process, because it is in the background of its terminal."""
    try:
        return os.tcgetpgrp(descriptor) != os.getpgrp()
    except OSError:  # no terminal, or not that of this session
        return False
