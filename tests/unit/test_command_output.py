"""Output passes through a relay unchanged, and its lines become marks."""

import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from weighin.result import Mark
from weighin.run.output import Relay

PASSED_ON = """
import pathlib, sys, time
def wait_until(is_true):
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
def say(text, into, end="\\n", stream=sys.stdout):
    print(text, flush=True, end=end, file=stream)
    wait_until(lambda: text.strip().encode() in pathlib.Path(into).read_bytes())
    time.sleep(0.1)
"""
"""``say`` waits until the relay has passed the text on, however busy the machine is, and for 0.1 s more."""
GAP_NS = 80_000_000


def to_files(
    folder: Path, program: str, marks: Sequence[str], **how: Any
) -> tuple[bytes, tuple[Mark, ...]]:
    """Run a Python program whose output goes to files; return its errors, and the marks."""
    with (
        (folder / "out").open("wb") as out,
        (folder / "err").open("wb") as err,
        closing(Relay((out.fileno(), err.fileno()), marks, **how)) as relay,
    ):
        with subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=relay.streams.stdout,
            stderr=relay.streams.stderr,
        ) as process:
            relay.start()
            process.wait()
        relay.finish()
    return (folder / "err").read_bytes(), relay.marks


def test_lines_that_match_are_marks_in_the_order_of_time(tmp_path: Path) -> None:
    program = PASSED_ON + (
        f"say('epoch 1', '{tmp_path}/out')\n"
        f"say('loss', '{tmp_path}/err', stream=sys.stderr)\n"
        "print('the epoch 2 \\x1b[31mred\\x1b[0m')"
    )
    start_ns = time.monotonic_ns()
    _, marks = to_files(tmp_path, program, ["^epoch", r"\b2 red$", "lo.s"])
    assert [mark.text for mark in marks] == ["epoch 1", "loss", "the epoch 2 red"]
    times = [start_ns, *(mark.t_ns for mark in marks), time.monotonic_ns()]
    assert times == sorted(times)
    assert times[2] - times[1] >= GAP_NS


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        *((each, ["two"]) for each in ("^two$", "two(?!\\s)", "^t\\w+o\\Z", r"\Atwo", r"two\s*+$", "[^x]wo", "^(two|2)$")),
        # It does not reach into the next line.
        (r"two\s+three", []), ("two[^x]", []),
    ],
)  # fmt: skip
def test_a_pattern_is_of_one_line(tmp_path: Path, pattern: str, found: list[str]) -> None:
    _, marks = to_files(tmp_path, "print('one\\n\\ntwo\\n  three', end='')", [pattern])
    assert [mark.text for mark in marks] == found


def test_a_progress_bar_is_many_lines_each_at_its_own_time(tmp_path: Path) -> None:
    program = PASSED_ON + (
        "for share in (10, 20, 30):\n"
        f"    say(f'\\r{{share}}%|##', '{tmp_path}/err', end='', stream=sys.stderr)\n"
    )
    err, marks = to_files(tmp_path, program, [r"\d+%"])
    ended_ns = time.monotonic_ns()
    assert err == b"\r10%|##\r20%|##\r30%|##"
    assert [mark.text for mark in marks] == ["10%|##", "20%|##", "30%|##"]
    assert ended_ns - marks[2].t_ns >= GAP_NS  # it came before the pause, not at the end


def test_a_mark_is_one_short_line_that_can_be_printed(tmp_path: Path) -> None:
    _, (mark,) = to_files(tmp_path, "print('mark\\x07' + 'x' * 500_000)", ["mark"])
    assert mark.text.startswith("mark?xxx")
    assert len(mark.text) <= 200


def test_the_command_is_ready_when_a_line_says_so_that_does_not_end(tmp_path: Path) -> None:
    called = tmp_path / "called"
    calls: list[Path] = []

    def at_ready() -> None:
        calls.append(called)
        called.touch()

    program = PASSED_ON + (
        f"say('not yet', '{tmp_path}/out')\n"
        "print('ready on port 80', end='', flush=True)\n"
        f"wait_until(pathlib.Path('{called}').exists)\n"
        "print('80'); print('ready')"
    )
    _, marks = to_files(tmp_path, program, (), ready="^ready on", at_ready=at_ready)
    assert len(calls) == 1
    assert [mark.text for mark in marks] == ["ready on port 8080"]


def test_output_that_another_process_keeps_open_does_not_delay_the_end(tmp_path: Path) -> None:
    program = "import subprocess; print('first', subprocess.Popen(['sleep', '60']).pid)"
    _, (mark,) = to_files(tmp_path, program, ["first"])
    sleeper = int(mark.text.split()[1])
    assert Path(f"/proc/{sleeper}/fd/1").readlink().name.startswith("pipe:")
    os.kill(sleeper, signal.SIGKILL)


def test_a_terminal_that_is_closed_meanwhile_is_not_resized() -> None:
    main, terminal = os.openpty()
    relay = Relay([terminal] * 2, ["mark"])
    relay.close()
    termios.tcsetwinsize(terminal, (40, 90))
    assert not relay.resize()
    os.close(main)
    os.close(terminal)
