"""The streams of a container: a terminal of its own, and output that comes late or never ends."""

import atexit
import fcntl
import os
import signal
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leftovers import wait_until
from test_docker_commands import Wires

from weighin.isolation.base import Streams
from weighin.isolation.docker import attachment
from weighin.isolation.docker.attachment import Attachment, Standard
from weighin.isolation.docker.stream import STDERR, STDOUT


class Screen:
    """An attachment to a terminal, the user's end of it, and the engine's end of the stream."""

    def __init__(self) -> None:
        self.user, self.terminal = os.openpty()
        self.sizes: list[tuple[int, int]] = []
        self.engine, ours = socket.socketpair()
        self.engine.settimeout(10)
        self.resize(40, 120)
        self.usual = self.mode()
        standard = Standard(Streams(*[self.terminal] * 3))
        self.is_terminal = standard.is_terminal
        self.attachment = Attachment(
            ours, standard, resize=lambda rows, columns: self.sizes.append((rows, columns))
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def mode(self) -> list[object]:
        return termios.tcgetattr(self.terminal)

    def close(self) -> None:
        self.attachment.close()
        self.engine.close()
        os.close(self.user)
        os.close(self.terminal)


@pytest.fixture
def screen() -> Iterator[Screen]:
    screen = Screen()
    yield screen
    screen.close()


def test_a_terminal_is_raw_until_the_command_has_ended(screen: Screen) -> None:
    assert screen.is_terminal
    screen.attachment.begin()
    assert screen.mode() != screen.usual
    os.write(screen.user, b"a\x03")  # Ctrl-C is a key of the command
    assert screen.engine.recv(2, socket.MSG_WAITALL) == b"a\x03"
    screen.engine.sendall(b"\x01\x00not a frame" + screen.attachment.mark)
    screen.attachment.finish()
    assert screen.mode() == screen.usual
    assert os.read(screen.user, 100) == b"\x01\x00not a frame"


def test_a_terminal_that_is_closed_is_as_it_was(screen: Screen) -> None:
    screen.attachment.begin()
    screen.attachment.close()
    assert screen.mode() == screen.usual


def test_an_exit_of_this_process_restores_the_terminal(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    screen.attachment.begin()
    for restore in tuple(at_exit):
        restore()
    assert screen.mode() == screen.usual
    assert at_exit == []  # once is enough


def test_the_containers_terminal_has_the_size_of_the_users(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_RESIZE_S", 0.01)
    screen.attachment.begin()
    assert screen.sizes == [(40, 120)]
    screen.resize(50, 80)
    wait_until(lambda: len(screen.sizes) > 1, "the new size was not passed on")
    os.write(screen.user, b"key")
    assert screen.engine.recv(3, socket.MSG_WAITALL) == b"key"
    assert screen.sizes == [(40, 120), (50, 80)]


@pytest.mark.parametrize("is_file", [0, 1, 2])
def test_one_stream_that_is_no_terminal_keeps_all_apart(screen: Screen, is_file: int) -> None:
    with Path(os.devnull).open("r+b") as file:
        streams = [screen.terminal] * 3
        streams[is_file] = file.fileno()
        standard = Standard(Streams(*streams))
    assert not standard.is_terminal
    standard.close()


def test_a_command_in_the_background_gets_no_input(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    standard = Standard(Streams(*[screen.terminal] * 3))
    monkeypatch.undo()
    assert (standard.is_in_background, standard.is_terminal) == (True, False)
    engine, ours = socket.socketpair()
    apart = Attachment(ours, standard, resize=lambda *_: None)
    apart.begin()
    os.write(screen.user, b"typed\n")
    engine.settimeout(0.05)
    with pytest.raises(TimeoutError):
        engine.recv(100)
    apart.close()
    engine.close()


def test_a_terminal_in_the_foreground_is_none_of_the_background(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    standard = Standard(Streams(*[screen.terminal] * 3))
    assert (standard.is_in_background, standard.is_terminal) == (False, True)
    standard.close()


def test_errors_that_come_after_the_end_of_the_output_are_passed_on() -> None:
    wires = Wires()
    mark = wires.attachment.mark
    wires.say((STDOUT, b"one\n" + mark))
    assert os.read(wires.out, 100) == b"one\n"
    wires.say((STDERR, b"late"), (STDERR, mark))
    assert wires.end() == (b"", b"late")


def test_output_after_the_mark_is_not_the_commands() -> None:
    wires = Wires()
    mark = wires.attachment.mark
    wires.say((STDOUT, b"one" + mark + b"two"), (STDOUT, b"three"), (STDERR, mark))
    assert wires.end() == (b"one", b"")


def test_a_stream_without_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "_PATIENCE_S", 0.05)
    wires = Wires()
    wires.say((STDOUT, b"one"))  # and no mark: the keeper was killed
    assert wires.end() == (b"one", b"")


def test_a_slow_reader_gets_all_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "_PATIENCE_S", 0.0)
    wires = Wires()
    whole = b"x" * 200_000  # more than a pipe holds
    sent = threading.Thread(
        target=wires.say,
        args=[(STDOUT, whole), (STDOUT, wires.attachment.mark), (STDERR, wires.attachment.mark)],
    )
    sent.start()
    first = os.read(wires.out, 10)
    got: list[bytes] = []

    def read() -> None:
        while data := os.read(wires.out, 1 << 16):
            got.append(data)

    ended = threading.Thread(target=wires.attachment.finish)
    ended.start()
    ended.join(0.2)
    assert ended.is_alive()  # it waits for the reader
    reading = threading.Thread(target=read)
    reading.start()
    ended.join(20)
    sent.join(20)
    wires.attachment.close()
    reading.join(20)
    assert first + b"".join(got) == whole
    assert wires.signals == []
    wires.engine.close()
    for descriptor in (wires.keys, wires.out, wires.err):
        os.close(descriptor)


@pytest.mark.parametrize("stream", [STDOUT, STDERR])
def test_a_reader_that_leaves_ends_only_its_own_stream(stream: int) -> None:
    wires = Wires()
    gone, other = (wires.out, wires.err) if stream == STDOUT else (wires.err, wires.out)
    os.close(gone)
    wires.say((stream, b"unheard"), (3 - stream, b"heard"), (stream, b"unheard too"))
    mark = wires.attachment.mark
    wires.say((STDOUT, mark), (STDERR, mark))
    wires.attachment.finish()
    assert os.read(other, 100) == b"heard"
    assert wires.signals == [signal.SIGPIPE]
    wires.attachment.close()
    wires.engine.close()
    os.close(wires.keys)
    os.close(other)
