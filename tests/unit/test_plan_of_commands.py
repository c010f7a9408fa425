"""The plan of a run of commands."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import refused
from ran_commands import make_command, settings_of
from snapshots import Compare, answered

from weighin.isolation.process import ProcessIsolation
from weighin.plan.start import foreign, label_of, resume, start
from weighin.probes import environment
from weighin.records import run_folder
from weighin.settings.definition import Settings, check_suite
from weighin.units import GIB

LABELS = Path(__file__).with_name("snapshots") / "labels.txt"


def test_the_label_is_the_script_or_the_program_and_never_code(same: Compare) -> None:
    same(LABELS.name, answered(LABELS, lambda command: label_of(command.split())))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: 16 * GIB)
    return tmp_path


def asked(*command: str, name: str = "x", **options: Any) -> Settings:
    """Return the settings of one command; an option of the command itself is in ``own``."""
    own = {"name": name, "command": list(command or ("sh", "x"))} | options.pop("own", {})
    return check_suite({"commands": [own], "isolation": "process", "cwd": "/"} | options)


def test_a_command_becomes_a_plan_of_one_cell_for_each_repeat_and_limit() -> None:
    settings = asked("sh", "x", repeats=2, own={"environment": {"A": "1"}})
    run, note = start(settings, Path("run"))
    assert note == ""
    cells = [planned.cell for planned in run.planned]
    assert [(cell.repeat, cell.ram_limit_bytes) for cell in cells] == [(0, None), (1, None)]
    assert {(cell.strategy, cell.command, cell.cache) for cell in cells} == {
        ("x", ("sh", "x"), "as found")
    }
    assert cells[0].environment == {"A": "1"}
    assert isinstance(run.isolation, ProcessIsolation)
    assert (run.folder, run.is_new) == (Path("run"), True)
    assert run.settings == settings
    assert run_folder.read_plan(Path("run")).cells == tuple(cells)


def test_a_label_and_what_was_dropped_are_of_the_cell(here: Path) -> None:
    (here / "data").touch()
    run, _ = start(asked(name="mine", own={"cold": ["data"]}), Path("run"))
    (planned,) = run.planned
    assert (planned.cell.strategy, planned.cell.cache) == ("mine", "cold")


@pytest.mark.parametrize(
    ("was", "wrong", "name"),
    [
        ('"strategy": "mine"', '"strategy": "other"', "other"),
        ('"operation": "command"', '"operation": "load"', "mine"),  # no load passes for a command
    ],
)
def test_a_plan_that_lacks_the_command_of_a_cell_is_not_resumed(
    was: str, wrong: str, name: str
) -> None:
    start(asked(name="mine"), Path("run"))
    text = (path := Path("run/plan.json")).read_text()
    assert was in text
    path.write_text(text.replace(was, wrong))
    assert refused(resume, Path("run")) == (
        f"run/plan.json lacks the strategy or command {name!r}\nstart a new run"
    )


def test_a_folder_without_a_name_is_named_after_the_labels() -> None:
    commands = [{"name": letter * 50, "command": "true"} for letter in "ab"]
    run, _ = start(check_suite({"commands": commands, "isolation": "process"}))
    assert run.folder.parent == Path("results")
    assert run.folder.name.partition("-")[2] == f"{'a' * 50}-{'b' * 9}"
    assert [planned.cell.strategy for planned in run.planned] == ["a" * 50, "b" * 50]


def test_a_planned_command_is_restored_only_if_it_is_trusted() -> None:
    cells = [make_command(repeat=repeat, command=("sh", "x y")) for repeat in range(3)]
    settings = settings_of(cells[0], cwd="/work").as_json()
    planned = [replace(cell, isolation="process") for cell in cells]
    for more, repeats in (({"shard": "2/2"}, [1]), ({}, [0, 1, 2])):
        run_folder.write_plan(Path("run"), planned, settings | more)
        assert "command sh 'x y'" in refused(resume, Path("run"))
        run = resume(Path("run"), trusted=True)
        assert [planned.cell.repeat for planned in run.planned] == repeats
        assert isinstance(run.isolation, ProcessIsolation)
        assert not run.is_new


def test_what_a_plan_would_run_is_listed_once() -> None:
    cells = [make_command(repeat=0), make_command(repeat=1), make_command(command=("a b",))]
    settings = settings_of(*cells, cwd="/work", image="img:1", mounts=("/data",))
    assert foreign(cells, settings) == [
        "image img:1",
        "command python train.py --epochs 1",
        "command 'a b'",
    ]
