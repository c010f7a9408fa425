"""What the verbs print: examples to paste, whole words in a narrow terminal, and data beside the tables."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from typed_here import typed
from typed_verbs import ROOT, VERBS, prepare

from weighin.cli import app
from weighin.cli._verb import Verb
from weighin.settings.definition import COMMANDS, KEYS, MODELS

_BESIDE_WORDS = re.compile(r"[\s:─━]+")
_FIGURE = re.compile(r"\d+\.\d+")
NOT_IN_BLOCKS = {"strategy", "before", "mous", "quested", "cated", "served"}
"""Headings of a first column and of an empty one, and the ends of words that headings break."""
TABLES = [*VERBS.keys() - {"bench", "run", "floor", "convert", "cache clear"}]


def found(line: str) -> click.Command:
    verb: click.Command = app.app
    for word in line.split():
        assert isinstance(verb, click.Group)
        verb = verb.commands[word]
    return verb


def test_every_verb_is_here() -> None:
    groups = {name for name, verb in app.app.commands.items() if isinstance(verb, click.Group)}
    assert {name.split()[0] for name in VERBS} == {*app.app.commands}
    assert {f"cache {name}" for name in ("list", "clear")} <= {*VERBS} and groups == {"cache"}


@pytest.mark.parametrize("name", VERBS)
def test_each_example_is_one_line_to_paste(name: str) -> None:
    _, text = whole = typed(f"{name} --help")
    assert typed(f"{name} -h") == typed(f"help {name}") == whole
    assert "--json FILE Write the result as JSON to this file; with -, print it" in " ".join(text.split())  # fmt: skip
    verb = found(name)
    assert isinstance(verb, Verb)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    weighin ")]
    assert lines == [*verb.examples.values()]


def headings(text: str) -> list[str]:
    return re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE)


def test_the_verbs_and_the_options_of_bench_stand_under_headings_in_the_order_of_work() -> None:
    _, text = typed("--help")
    first, *panels = headings(text)[1:]
    assert panels == ["Measure", "Read and compare", "Choose", "Checkpoints"]
    listed = re.findall(r"^  ([a-z]+)  ", text.partition(f"{first}:\n")[2], re.MULTILINE)
    assert (first, listed) == ("Before a run", [*app.app.commands])
    assert headings(typed("bench --help")[1]) == [
        "Examples", "Arguments", "What to load", "Limits", "How to measure", "Where to write", "Options",
    ]  # fmt: skip


def test_the_help_of_suites_has_every_key() -> None:
    keys = re.findall(r"^(\w+)  ", typed("help suite")[1], re.MULTILINE)
    assert {*keys} == {*KEYS[MODELS], *KEYS[COMMANDS]}


@pytest.mark.parametrize("name", ["", *VERBS])
def test_no_word_of_the_help_is_broken_at_60_columns(name: str) -> None:
    _, wide = typed(f"{name} --help", columns=300)
    _, narrow = typed(f"{name} --help", columns=60)
    # An example stands in one line, which the terminal wraps: so it can be pasted.
    lines = [line for line in narrow.splitlines() if not line.startswith("    weighin ")]
    assert max(map(len, lines)) <= 60
    assert narrow.split() == wide.split()


@pytest.fixture
def _prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)


def output(name: str, columns: int) -> str:
    done = CliRunner().invoke(app.app, VERBS[name], env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    assert done.exit_code in (0, 1), done.exception
    return done.stdout  # notes on standard error are wrapped by the terminal


def words(text: str) -> set[str]:
    return {word for word in _BESIDE_WORDS.split(text) if word}


@pytest.mark.parametrize("name", sorted(TABLES))
@pytest.mark.usefixtures("_prepared")
def test_no_word_of_a_table_is_broken_at_60_columns(name: str) -> None:
    wide, narrow = output(name, 400), output(name, 60)
    code = narrow.find("\nUse ")  # of recommend: code is printed as it is
    lines = narrow[: code if code >= 0 else None].splitlines()
    # These print paths, and a model's arguments, whole.
    assert max(map(len, lines)) <= 60 or name in ("inspect", "cache list", "list")
    hyphens = {word for word in words(wide) if word.endswith("-")}  # "anony-" above "mous"
    lost = words(wide) - hyphens - words(narrow) - NOT_IN_BLOCKS
    if name == "report":  # its table leaves columns out, and names them
        assert "Left out at 60 columns: import, cgroup peak." in narrow
        lost = {word for word in lost if not _FIGURE.fullmatch(word)}
    assert not lost


@pytest.mark.parametrize(("name", "whole"), [("bench", "safetensors_copy"), ("floor", "mmap_assign")])  # fmt: skip
@pytest.mark.usefixtures("_prepared")
def test_the_bench_and_the_floor_too(name: str, whole: str) -> None:
    text = output(name, 60)
    assert whole in words(text)
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.usefixtures("_prepared")
def test_a_file_gets_the_document_and_standard_output_the_usual_text(name: str) -> None:
    _, text = typed(*VERBS[name], "--json", "data/out.json")
    assert json.loads(Path("data/out.json").read_text())["schema"] == 1
    assert text
    with pytest.raises(ValueError, match=r"Expecting value|Extra data"):
        json.loads(text)


@pytest.mark.parametrize("name", ["report", "list", "inspect"])
@pytest.mark.usefixtures("_prepared")
def test_a_file_that_cannot_be_written_is_an_error(name: str) -> None:
    code, text = typed(*VERBS[name], "--json", "/proc/out.json")
    assert code == 2 and "cannot write /proc/out.json: " in text


def test_a_terminal_of_ascii_gets_a_mark_for_each_letter_that_it_lacks(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "results" / "published" / "gpt2-medium-floors", tmp_path / "run")
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "weighin", "report", "run", "--format", "csv"],
        cwd=tmp_path, env=os.environ | variables, capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "gpt2-medium" in ended.stdout
    assert "?" in ended.stdout
