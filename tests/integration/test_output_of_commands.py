"""A command prints under weighin what it prints without it, with and without --mark."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typed import CommandLine

PROGRAM = """
import os, sys
print("terminals:", *(os.isatty(number) for number in range(3)), flush=True)
for step in range(5):
    print(f"\\rstep {step}", end="", file=sys.stderr, flush=True)
print(file=sys.stderr, flush=True)
sys.stdout.buffer.write(bytes(range(256)) * 4)
"""
MARKS = [[], ["--mark", r"^step \d"]]


@pytest.fixture
def weighin(tmp_path: Path) -> CommandLine:
    (tmp_path / "program.py").write_text(PROGRAM)
    return CommandLine(tmp_path, tmp_path / "cache")


def run(options: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-P", "-m", "weighin", "run", "--no-stacks", "--isolation", "process"),
        *("--out", "r", *options, "--", sys.executable, "program.py"),
    ]


def environment(weighin: CommandLine) -> dict[str, str]:
    harness = str(Path(__file__).parents[2] / "harness")
    return os.environ | {"PYTHONPATH": harness, "WEIGHIN_CACHE": str(weighin.cache)}


def on_a_terminal(command: Sequence[str], weighin: CommandLine) -> bytes:
    """Run a command on a pseudo-terminal, and return what it shows."""
    pid, main = pty.fork()
    if not pid:
        os.chdir(weighin.folder)
        os.execvpe(command[0], list(command), environment(weighin))
    shown = b""
    try:
        while data := os.read(main, 65536):
            shown += data
    except OSError:  # the end of a terminal
        pass
    os.waitpid(pid, 0)
    os.close(main)
    return shown


@pytest.mark.parametrize("options", MARKS, ids=["plain", "marked"])
def test_to_pipes_every_byte_is_the_command_s(weighin: CommandLine, options: list[str]) -> None:
    alone = subprocess.run(
        [sys.executable, "program.py"],
        cwd=weighin.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    here = subprocess.run(
        run(options),
        cwd=weighin.folder,
        env=environment(weighin),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    assert here.stdout == alone.stdout
    assert here.stderr.startswith(alone.stderr)  # weighin's own words follow
    assert b"terminals: False False False" in here.stdout


@pytest.mark.parametrize("options", MARKS, ids=["plain", "marked"])
def test_on_a_terminal_every_byte_is_the_command_s(
    weighin: CommandLine, options: list[str]
) -> None:
    alone = on_a_terminal([sys.executable, "program.py"], weighin)
    here = on_a_terminal(run(options), weighin)
    assert b"terminals: True True True" in here
    assert here.startswith(alone)
    (record,) = weighin.records("r")
    texts = [mark["text"] for mark in record["ran"]["marks"]]
    assert texts == [f"step {step}" for step in range(5) if options]


def test_a_mark_has_the_time_of_its_line_on_the_clock_of_the_samples(
    weighin: CommandLine,
) -> None:
    (weighin.folder / "program.py").write_text(
        "import time\n"
        "time.sleep(1); print('small', flush=True)\n"
        "held = bytearray(200 << 20); time.sleep(1); print('large', flush=True); time.sleep(1)"
    )
    subprocess.run(
        run(["--mark", "small|large"]),
        cwd=weighin.folder,
        env=environment(weighin),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    (record,) = weighin.records("r")
    small, large = record["ran"]["marks"]
    assert [small["text"], large["text"]] == ["small", "large"]
    head, *lines = (weighin.folder / "r" / record["samples_path"]).read_text().split()
    place = head.split(",")
    rows = [dict(zip(place, line.split(","), strict=True)) for line in lines]
    held = [(int(row["t_ns"]), int(row["anon_bytes"])) for row in rows]
    before = [size for t_ns, size in held if t_ns <= small["t_ns"]]
    at_large = [size for t_ns, size in held if abs(t_ns - large["t_ns"]) <= 900_000_000]
    assert max(before) < 100 << 20
    assert max(at_large) >= 200 << 20


@pytest.mark.parametrize("options", MARKS, ids=["plain", "marked"])
def test_a_command_whose_reader_leaves_ends_as_without_weighin(
    weighin: CommandLine, options: list[str]
) -> None:
    (weighin.folder / "program.py").write_text(
        "import signal\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\nwhile True: print('y')"
    )
    process = subprocess.Popen(
        run(options),
        cwd=weighin.folder,
        env=environment(weighin),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout
    process.stdout.read(1000)
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
