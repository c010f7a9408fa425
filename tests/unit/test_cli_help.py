"""What the verbs print: examples to paste, whole words in a narrow terminal, and data beside the tables.

Each verb is typed on small runs; nothing is measured or predicted.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from factories import ENVIRONMENT, make_cell, make_result, notebook_run, run_of
from ran_commands import make_ran, settings_of
from torch import save, zeros
from typed_here import typed

from weighin import doctor
from weighin.cell import Cell
from weighin.cli import app
from weighin.cli._verb import Verb
from weighin.plan.task import Run
from weighin.predict import client
from weighin.predict.prediction import Prediction, Work
from weighin.recommend import answer
from weighin.records import run_folder
from weighin.run import releases, runner
from weighin.settings.definition import COMMANDS, KEYS, MODELS
from weighin.units import GIB, MIB

FLOORS = Path(__file__).parents[2] / "results" / "published" / "gpt2-medium-floors"
VERBS = {
    name: shlex.split(line)
    for name, line in {
        "doctor": "doctor", "list": "list", "bench": "bench gpt2-tiny --isolation process --out new",
        "run": "run --resume commands --trust", "floor": "floor gpt2-tiny --isolation cgroup --out floors",
        "report": "report runs/a --format csv", "compare": "compare runs/a runs/b",
        "check": "check runs/a --budget 'peak_rss <= 2 x model' --all", "history": "history runs",
        "recommend": "recommend gpt2-tiny --ram 3g",
        "bisect": "bisect gpt2-tiny -s streaming --package torch --from 1.0 --isolation process --out tried",
        "predict": "predict gpt2-tiny --strategies streaming,safetensors_mmap", "inspect": "inspect model.pt",
        "convert": "convert model.pt new.safetensors", "cache list": "cache list", "cache clear": "cache clear --yes",
    }.items()
}  # fmt: skip
"""A whole command for each verb, in the folder that ``_prepared`` makes."""
TABLES = sorted(VERBS.keys() - {"bench", "run", "floor", "bisect", "convert", "cache clear"})
_BESIDE_WORDS = re.compile(r"[\s:─━]+")
_FIGURE = re.compile(r"\d+\.\d+")
NOT_IN_BLOCKS = {"strategy", "before", "mous", "quested", "cated", "served"}
"""Headings of a first column and of an empty one, and the ends of words that headings break."""


@pytest.fixture
def _prepared(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make two runs and a checkpoint, and replace what takes long."""
    for name, day in (("a", "01"), ("b", "02")):
        started = f"2026-11-{day}T10:00:00.000+00:00"
        for one in notebook_run():
            again = replace(one, started_at=started, environment=ENVIRONMENT)
            run_of(here / "runs" / name, again)
    cells = [Cell.of_command("true", ("true",), "process", repeat=repeat) for repeat in (0, 1)]
    settings = settings_of(*cells, cwd=str(here)).as_json()
    run_folder.write_plan(Path("commands"), cells, settings)
    save({"embedding.weight": zeros(10, 4), "head.weight": zeros(10, 4)}, "model.pt")
    found = (
        doctor.Capability("soft limit (ram_high)", "partly", "cgroup v1 has no memory.high"),
        doctor.Capability("isolation cgroup enforces a limit", "yes", "a probe was killed"),
    )
    monkeypatch.setattr(doctor, "examine", lambda: found)
    monkeypatch.setattr(runner, "run", _run)
    monkeypatch.setattr(runner, "search", _search)
    monkeypatch.setattr(releases, "between", lambda *_: ["1.0", "1.1"])
    for module in (client, answer):
        monkeypatch.setattr(module, "predict", _predict)


def _run(task: Run, _: Any) -> Any:
    results = [make_result(make_cell("streaming")), make_result(make_cell("safetensors_copy"))]
    if task.planned[0].cell.releases:
        results = [make_result(task.planned[0].cell)]
    if task.settings.commands:
        results = [make_ran(planned.cell) for planned in task.planned]
    run_of(task.folder, *results)
    return results


def _search(task: Run, _: Any) -> Any:
    """Find the floor that a published search found of one strategy."""
    found = [one for one in run_folder.read(FLOORS).results if one.cell.strategy == "mmap_assign"]
    return list(run_folder.read(run_of(task.folder, *found)).results)


def _predict(planned: Any, **_: Any) -> list[Prediction]:
    figures: dict[str, Any] = {
        "model_bytes": 2 * GIB, "baseline_anon_bytes": 100 * MIB, "host_anon_peak_bytes": 100 * MIB + 2 * GIB,
        "host_file_peak_bytes": 80 * MIB, "tensor_peak_bytes": 2 * GIB, "floor_bytes": 116 * MIB + 2 * GIB,
        "disk_read_bytes": 2 * GIB, "work": Work(fresh_bytes=2 * GIB),
    }  # fmt: skip
    return [Prediction(one.cell, **figures) for one in planned]


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


def output(name: str, columns: int) -> str:
    done = CliRunner().invoke(app.app, VERBS[name], env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    assert done.exit_code in (0, 1), done.exception
    return done.stdout  # notes on standard error are wrapped by the terminal


def words(text: str) -> set[str]:
    return {word for word in _BESIDE_WORDS.split(text) if word}


@pytest.mark.parametrize("name", TABLES)
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


def test_a_terminal_of_ascii_gets_a_mark_for_each_letter_that_it_lacks(tmp_path: Path) -> None:
    shutil.copytree(FLOORS, tmp_path / "run")
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "weighin", "report", "run", "--format", "csv"],
        cwd=tmp_path, env=os.environ | variables, capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "gpt2-medium" in ended.stdout
    assert "?" in ended.stdout
