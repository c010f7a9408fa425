"""Output passes through a relay unchanged, and its lines become marks."""

import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ran_commands import make_command, settings_of

from weighin.result import Mark
from weighin.run.commands import CommandSpec
from weighin.run.output import Relay

NOTHING = "[^\\s\\S]"  # a search that finds nothing
PASSED_ON = """
import pathlib, sys, time
def passed_on(file, text):
    for _ in range(20_000):
        if text in pathlib.Path(file).read_text(): return
        time.sleep(0.001)
"""
"""Lets a program wait until the relay has read its output, however busy the machine is."""


def relay(
    program: str,
    targets: Sequence[int],
    marks: Sequence[str] = (NOTHING,),
    during: Callable[[Relay], object] = lambda _: None,
    **how: Any,
) -> tuple[Mark, ...]:
    """Run a Python program, and return the marks."""
    relay = Relay(targets, marks, **how)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=relay.streams.stdout,
            stderr=relay.streams.stderr,
        ) as process:
            relay.start()
            during(relay)
            process.wait()
        relay.finish()
    finally:
        relay.close()
    return relay.marks


def to_files(folder: Path, program: str, **how: Any) -> tuple[bytes, bytes, tuple[Mark, ...]]:
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        marks = relay(program, (out.fileno(), err.fileno()), **how)
    return (folder / "out").read_bytes(), (folder / "err").read_bytes(), marks


def test_lines_that_match_are_marks_in_the_order_of_time(tmp_path: Path) -> None:
    program = PASSED_ON + (
        f"print('epoch 1', flush=True); passed_on('{tmp_path}/out', 'epoch 1'); time.sleep(0.1)\n"
        f"print('loss', file=sys.stderr, flush=True); passed_on('{tmp_path}/err', 'loss')\n"
        "time.sleep(0.1); print('the epoch 2 \\x1b[31mred\\x1b[0m')"
    )
    start_ns = time.monotonic_ns()
    _, _, marks = to_files(tmp_path, program, marks=["^epoch", r"\b2 red$", "lo.s"])
    assert [mark.text for mark in marks] == ["epoch 1", "loss", "the epoch 2 red"]
    times = [start_ns, *(mark.t_ns for mark in marks), time.monotonic_ns()]
    assert times == sorted(times)
    assert times[2] - times[1] >= 80_000_000


@pytest.mark.parametrize(
    "pattern", ["^two$", "two(?!\\s)", "^t\\w+o\\Z", r"\Atwo", r"two\s*+$", "[^x]wo", "^(two|2)$"]
)
def test_a_pattern_is_looked_for_in_each_line_by_itself(tmp_path: Path, pattern: str) -> None:
    program = "print('one\\n\\ntwo\\n  three', end='')"
    _, _, marks = to_files(tmp_path, program, marks=[pattern])
    assert [mark.text for mark in marks] == ["two"]


def test_a_pattern_does_not_reach_into_the_next_line(tmp_path: Path) -> None:
    _, _, marks = to_files(tmp_path, "print('one\\ntwo')", marks=[r"one\s+two", "one[^x]"])
    assert marks == ()


def test_a_progress_bar_is_many_lines_each_at_its_own_time(tmp_path: Path) -> None:
    program = PASSED_ON + (
        "for share in (10, 20, 30):\n"
        "    print(f'\\r{share}%|##', end='', file=sys.stderr, flush=True)\n"
        f"    passed_on('{tmp_path}/err', str(share)); time.sleep(0.1)"
    )
    _, err, marks = to_files(tmp_path, program, marks=[r"\d+%"])
    ended_ns = time.monotonic_ns()
    assert err == b"\r10%|##\r20%|##\r30%|##"
    assert [mark.text for mark in marks] == ["10%|##", "20%|##", "30%|##"]
    assert ended_ns - marks[2].t_ns >= 80_000_000  # it came before the pause, not at the end


def test_a_mark_is_one_short_line_that_can_be_printed(tmp_path: Path) -> None:
    _, _, (mark,) = to_files(tmp_path, "print('mark\\x07' + 'x' * 500_000)", marks=["mark"])
    assert mark.text.startswith("mark?xxx")
    assert len(mark.text) <= 200


def test_the_order_of_output_and_errors_in_one_file_is_kept(tmp_path: Path) -> None:
    program = "import os\nfor n in range(1000): os.write(1 + n % 2, b'%d ' % n)"
    with (tmp_path / "both").open("wb") as both:
        relay(program, [both.fileno()] * 2)
    assert (tmp_path / "both").read_bytes() == b"".join(b"%d " % n for n in range(1000))


def test_output_that_another_process_keeps_open_does_not_delay_the_end(tmp_path: Path) -> None:
    program = "import subprocess; print('first'); subprocess.Popen(['sleep', '30'])"
    start_s = time.monotonic()
    out, _, _ = to_files(tmp_path, program)
    assert out == b"first\n"
    assert time.monotonic() - start_s < 25


class Terminal:
    """A terminal whose output is read all the time."""

    def __init__(self) -> None:
        self._main, self.descriptor = os.openpty()
        self.resize(30, 100)
        self.shown = b""

    def resize(self, rows: int, columns: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)

    def read(self) -> bytes:
        while select.select([self._main], [], [], 0.2)[0]:
            self.shown += os.read(self._main, 65536)
        return self.shown

    def close(self) -> None:
        os.close(self._main)
        os.close(self.descriptor)


def test_a_command_gets_the_size_of_the_terminal() -> None:
    terminal = Terminal()

    def resize(relay: Relay) -> None:
        while b"(100, 30)" not in terminal.read():
            time.sleep(0.01)
        assert not relay.resize()
        terminal.resize(40, 90)
        assert relay.resize()

    program = (
        "import os, time\n"
        "size = before = os.get_terminal_size(1)\n"
        "print(tuple(before), flush=True)\n"
        "while size == before: size = os.get_terminal_size(1); time.sleep(0.01)\n"
        "print(tuple(size))"
    )
    relay(program, [terminal.descriptor] * 2, during=resize)
    shown = terminal.read()
    terminal.close()
    assert shown == b"(100, 30)\r\n(90, 40)\r\n"


def test_a_terminal_that_is_closed_meanwhile_is_not_resized() -> None:
    terminal = Terminal()
    relay = Relay([terminal.descriptor] * 2, [NOTHING])
    relay.close()
    terminal.resize(40, 90)
    assert not relay.resize()
    terminal.close()


def test_the_command_is_ready_when_a_line_says_so_that_does_not_end(tmp_path: Path) -> None:
    calls: list[int] = []
    program = PASSED_ON + (
        "print('not yet', flush=True); time.sleep(0.1)\n"
        f"print('ready on port 80', end='', flush=True); passed_on('{tmp_path}/out', 'port')\n"
        "time.sleep(0.3); print('80'); print('ready')"
    )
    _, _, marks = to_files(
        tmp_path,
        program,
        marks=(),
        ready="^ready on",
        at_ready=lambda: calls.append(time.monotonic_ns()),
    )
    (ready_ns,) = calls
    assert time.monotonic_ns() - ready_ns >= 200_000_000
    assert [mark.text for mark in marks] == ["ready on port 8080"]


@pytest.mark.parametrize(
    ("within", "limit_bytes", "hidden"),
    [
        (None, None, (False, False, False)),
        (None, 2**30, (False, False, False)),
        (0.01, None, (True, False, False)),  # a search reads nothing from standard input
        (0.01, 2**30, (True, True, True)),  # and shows only the output without a limit
    ],
)
def test_the_streams_of_commands_in_a_search(
    within: float | None, limit_bytes: int | None, hidden: tuple[bool, ...]
) -> None:
    cell = make_command(ram_limit_bytes=limit_bytes)
    spec = CommandSpec(cell, settings_of(cell, within=within))
    with ExitStack() as opened:
        spec.enter(opened)
        streams = spec._output.streams
        given = (streams.stdin, streams.stdout, streams.stderr)
        assert tuple(each is not None for each in given) == hidden
        for each in filter(None, given):
            assert os.path.samestat(os.fstat(each), Path(os.devnull).stat())
