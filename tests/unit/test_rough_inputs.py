"""What a hand or a stranger gives that is neither refused by a table of contract/ nor allowed to hang."""

import os
from pathlib import Path

import pytest
from factories import refused

from weighin.cli import _console
from weighin.run.output import Relay
from weighin.suite.registry import read_strategy


def test_a_strategy_that_is_no_file_or_too_deep_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    said = refused(read_strategy, tmp_path / "fifo.py")
    assert said == f"cannot read the strategy {tmp_path}/fifo.py: not a regular file"
    (deep := tmp_path / "deep.py").write_text(f"def load(job): pass\nx = {'-' * 200_000}1\n")
    assert "deep.py is not Python: " in refused(read_strategy, deep)


@pytest.mark.parametrize(
    "line", ["def load(job)", "def load(job, x=1)", "def load(*jobs)", "def load(job, *, x=1)"]
)
def test_what_can_be_called_with_a_job_is_a_strategy(tmp_path: Path, line: str) -> None:
    (path := tmp_path / "mine.py").write_text(f"{line}: pass\n")
    assert read_strategy(path).name == "mine"


def test_a_pattern_that_would_take_forever_is_given_up() -> None:
    relay = Relay((1, 2), [r"(?:a|aa|aaa|aaaa)+$|^(\w+\s?)*\$"])
    relay._note("\n".join(["a" * 5_000 + "!", "word " * 5_000 + "!", "aaaa"]), 1, 1)
    relay.close()
    assert [mark.text for mark in relay.marks] == ["aaaa"]


def test_no_color_means_no_bold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    _console.show("[bold]text[/bold]")
    _console.error("text")
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "text" in captured.out
