"""Suites of commands: how their files are read, and the plan that is made of them."""

from pathlib import Path
from typing import Any

import pytest

from weighin.errors import ConfigError
from weighin.plan.start import resume, start
from weighin.plan.task import Run
from weighin.records import run_folder
from weighin.settings.definition import COMMANDS, MODELS, Settings, read_suite

TWO = """
commands:
  - {name: first, command: "sh -c 'echo a b'", cold: cold.bin, marks: [a]}
  - {name: second, command: [true, 1], environment: {A: 1}}
ram: [none, 100m]
repeats: 2
isolation: process
"""


def suite(folder: Path, text: str) -> Settings:
    path = folder / "suite.yaml"
    path.write_text(text)
    return read_suite(path, COMMANDS)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cold.bin").write_bytes(b"x")
    return tmp_path


def planned(folder: Path, text: str, **changes: Any) -> Run:
    settings = suite(folder, text).model_copy(update={"cwd": str(folder)} | changes)
    return start(settings, folder / "run")[0]


def test_a_command_is_a_list_or_a_line_that_is_split_as_a_shell_does(tmp_path: Path) -> None:
    first, second = suite(tmp_path, TWO.replace("[true, 1]", "['true', 1]")).commands
    assert first.command == ["sh", "-c", "echo a b"]
    assert second.command == ["true", "1"]
    assert (first.cold, first.marks, second.environment) == (["cold.bin"], ["a"], {"A": "1"})


def test_each_verb_names_the_other_one(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    for kind, text, message in (
        (
            MODELS,
            "commands: {name: a, command: x}",
            "is a suite of commands\nmeasure it with weighin run",
        ),
        (COMMANDS, "models: gpt2-tiny", "is a suite of models\nmeasure it with weighin bench"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_suite(path, kind)
        assert str(caught.value) == (
            f"{path} {message} --suite {path}; a suite has models or commands, not both"
        )


def test_the_plan_has_every_command_under_every_limit(here: Path) -> None:
    text = TWO.replace("[true, 1]", "['true', 1]").replace("ram: [none, 100m]", "ram: none")
    task = planned(here, text)
    cells = [each.cell for each in task.planned]
    assert [(cell.strategy, cell.command[0], cell.cache, cell.repeat) for cell in cells] == [
        ("first", "sh", "cold", 0),
        ("second", "true", "as found", 0),
        ("first", "sh", "cold", 1),
        ("second", "true", "as found", 1),
    ]
    assert cells[1].environment == {"A": "1"}
    first, second = task.settings.commands
    assert (first.cold, first.marks) == (["cold.bin"], ["a"])
    assert (second.cold, second.marks) == ([], [])


def test_a_resumed_suite_keeps_the_settings_of_each_command(here: Path) -> None:
    text = TWO.replace("[true, 1]", "['true', 1]").replace("ram: [none, 100m]", "ram: none")
    task = planned(here, text)
    again = resume(task.folder, trusted=True)
    assert again.settings == task.settings
    assert [each.cell for each in again.planned] == [each.cell for each in task.planned]
    plan = task.folder / "plan.json"
    plan.write_text(plan.read_text().replace("echo a b", "echo b"))
    with pytest.raises(ConfigError, match="command sh -c 'echo b'"):
        resume(task.folder)


def test_a_shard_of_commands(here: Path) -> None:
    text = TWO.replace("[true, 1]", "['true', 1]").replace("ram: [none, 100m]", "ram: none")
    task = planned(here, text, shard="2/2")
    assert [each.cell.strategy for each in task.planned] == ["second", "second"]
    assert len(run_folder.read_plan(task.folder).cells) == 4
    with pytest.raises(ConfigError, match="the plan has only 4 cells"):
        planned(here / "..", text.replace("cold.bin", str(here / "cold.bin")), shard="5/5")


def test_a_missing_program_of_a_suite_is_named(here: Path) -> None:
    with pytest.raises(ConfigError, match="there is no program 'nosuchprogram'"):
        planned(here, "commands: {name: a, command: nosuchprogram}")
