"""The verbs that read runs say on a terminal what they do; standard error that is none gets nothing."""

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from shutil import copytree

import pytest
from typed import ROOT


def errors_of(folder: Path, arguments: tuple[str, ...], *, on_terminal: bool) -> str:
    """Return what a command prints to standard error, which is a terminal or a pipe."""
    ours, its = pty.openpty() if on_terminal else os.pipe()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "harness"), "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "weighin", *arguments],
        cwd=folder,
        env=environment | {"TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=its,
    ) as process:
        os.close(its)
        said = b""
        with suppress(OSError):  # EIO: the end of a terminal
            while part := os.read(ours, 4096):
                said += part
        os.close(ours)
    assert process.returncode == 0
    return said.decode()


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (("report", "run"), ("reading run", "computing the table", "writing the report of run")),
        (
            ("check", "run", "--budget", "ready <= 60min"),
            ("reading run", "comparing the figures"),
        ),
        (("compare", "run", "run"), ("comparing the figures of 2 runs",)),
        (("history", "."), ("reading the runs in .",)),
    ],
)
def test_a_verb_shows_its_steps_on_a_terminal_alone(
    tmp_path: Path, arguments: tuple[str, ...], steps: tuple[str, ...]
) -> None:
    copytree(ROOT / "results/published/gpt2-xl-16GiB", tmp_path / "run")
    on_terminal = errors_of(tmp_path, arguments, on_terminal=True)
    assert [step for step in steps if step not in on_terminal] == []
    in_pipe = errors_of(tmp_path, arguments, on_terminal=False)
    assert [step for step in steps if step in in_pipe] == []
