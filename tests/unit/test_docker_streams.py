"""The streams of a process in a container: what is copied, where it ends, and a terminal's mode."""

import os
import signal
import socket
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weighin import child_process
from weighin.isolation.base import Streams
from weighin.isolation.docker import _Pump


class Wires:
    """A pump, the engine's end of its stream, and the user's ends of the standard streams."""

    def __init__(self, *files: int) -> None:
        self.engine, ours = socket.socketpair()
        self.engine.settimeout(10)
        self.pump = _Pump(Streams(*files), list[int]().append)
        self.pump.stream = ours

    def end(self) -> None:
        self.engine.close()
        self.pump.finish()
        self.pump.close()
        self.pump.close()


@pytest.fixture
def pipes() -> Iterator[tuple[list[int], int, int, int]]:
    """Ends for a pump, and then the user's: of what is typed, of the output and of the errors."""
    (stdin, keys), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
    yield [stdin, stdout, stderr], keys, out, err
    for file in (stdin, stdout, stderr, keys, out, err):
        try:
            os.close(file)
        except OSError:
            continue


Pipes = tuple[list[int], int, int, int]


def test_a_pump_that_never_began_leaves_no_descriptor(pipes: Pipes) -> None:
    files, *_ = pipes
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    wires = Wires(*files)
    wires.end()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


class Screen(Wires):
    """A pump to a terminal, whose user's end is ``user``."""

    def __init__(self) -> None:
        self.user, self.terminal = os.openpty()
        self.usual = self.mode()
        super().__init__(*[self.terminal] * 3)

    def mode(self) -> list[Any]:
        return termios.tcgetattr(self.terminal)


@pytest.fixture
def screen() -> Iterator[Screen]:
    screen = Screen()
    yield screen
    screen.end()
    os.close(screen.user)
    os.close(screen.terminal)


def test_a_terminal_that_is_closed_is_as_it_was(screen: Screen) -> None:
    screen.pump.begin()
    screen.pump.close()
    assert screen.mode() == screen.usual


@pytest.mark.parametrize("is_file", [0, 1, 2])
def test_one_stream_that_is_no_terminal_keeps_all_apart(screen: Screen, is_file: int) -> None:
    with Path(os.devnull).open("r+b") as file:
        files = [screen.terminal] * 3
        files[is_file] = file.fileno()
        wires = Wires(*files)
    assert not wires.pump.is_terminal
    wires.end()


def test_a_command_in_the_background_gets_no_input(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
        wires = Wires(*[screen.terminal] * 3)
    assert not wires.pump.is_terminal
    wires.pump.begin()
    os.write(screen.user, b"key")
    assert wires.engine.recv(3) == b""
    wires.end()


def test_the_status_of_another_processes_child_is_known_when_it_was_reaped() -> None:
    with subprocess.Popen(["sh", "-c", "kill -9 $$"]) as running:
        process = child_process.open_process(running.pid)
        assert process is not None
        assert child_process.wait_status(process) is None  # nobody has reaped it yet
        running.wait()
    assert child_process.wait_status(process) in (signal.SIGKILL, None)  # None before Linux 6.15
    os.close(process)
