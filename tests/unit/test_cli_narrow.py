"""In a terminal of 60 columns no table breaks a word, and none is wider than the terminal."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from typed_verbs import VERBS, prepare

from weighin.cli import app

_BESIDE_WORDS = re.compile(r"[\s:─━]+")
_FIGURE = re.compile(r"\d+\.\d+")
NOT_IN_BLOCKS = {"strategy", "before", "mous", "quested", "cated", "served"}
"""Headings of a first column and of an empty one, and the ends of words that headings break."""


@pytest.fixture(autouse=True)
def _prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    prepare(tmp_path, monkeypatch)


def output(verb: str, columns: int) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app.app, VERBS[verb])
    assert result.exit_code in (0, 1), result.exception
    return result.stdout


def words(text: str) -> set[str]:
    return {word for word in _BESIDE_WORDS.split(text) if word}


@pytest.mark.parametrize("verb", ["doctor", "list", "report", "compare", "check", "history", "recommend", "predict", "inspect", "cache list"])  # fmt: skip
def test_no_word_is_broken_at_60_columns(verb: str) -> None:
    wide, narrow = output(verb, 400), output(verb, 60)
    code = narrow.find("\nUse ")  # of recommend: code is printed as it is
    lines = narrow[: code if code >= 0 else None].splitlines()
    # These print paths, and a model's arguments, whole.
    assert max(map(len, lines)) <= 60 or verb in ("inspect", "cache list", "list")
    hyphens = {word for word in words(wide) if word.endswith("-")}  # "anony-" above "mous"
    lost = words(wide) - hyphens - words(narrow) - NOT_IN_BLOCKS
    if verb == "report":  # its table leaves columns out, and names them
        assert "Left out at 60 columns: import, cgroup peak." in narrow
        lost = {word for word in lost if not _FIGURE.fullmatch(word)}
    assert not lost


def test_the_bench_and_the_floor_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for verb, whole in (("bench", "safetensors_copy"), ("floor", "mmap_assign")):
        text = output(verb, 60)
        assert whole in words(text)
        assert max(map(len, text.splitlines())) <= 60


def test_a_terminal_of_ascii_gets_a_mark_for_each_letter_that_it_lacks(tmp_path: Path) -> None:
    published = Path(__file__).parents[2] / "results" / "published" / "gpt2-medium-floors"
    shutil.copytree(published, tmp_path / "run")
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-P", "-m", "weighin", "report", "run", "--format", "csv"]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        check=False,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "gpt2-medium" in ended.stdout
    assert "?" in ended.stdout
