"""The plan of a run of a command."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ran_commands import make_command

from weighin.errors import ConfigError, HarnessError
from weighin.isolation.cgroup import CgroupIsolation
from weighin.isolation.process import ProcessIsolation
from weighin.probes import environment
from weighin.records import run_folder
from weighin.records.shard import Shard
from weighin.run.command_request import (
    CommandRequest,
    foreign,
    label_of,
    restore,
    start,
)
from weighin.run.command_settings import CommandSettings
from weighin.run.settings import RunSettings
from weighin.units import GIB


@pytest.mark.parametrize(
    ("command", "label"),
    [
        ("train.py", "train.py"),
        ("./bin/vllm serve model", "vllm"),
        ("python train.py --epochs 3", "train.py"),
        ("/usr/bin/python3.11 -u scripts/train.py", "train.py"),
        ("python -W ignore -X dev train.py", "train.py"),
        ("python -Wignore train.py", "train.py"),
        ("python -m pytest tests", "pytest"),
        ("python -um pytest tests", "pytest"),
        ("python -mpytest tests", "pytest"),
        ("python -c CODE", "python"),
        ("python -uc CODE", "python"),
        ("python -IcCODE argument", "python"),
        ("python -m", "python"),
        ("python - argument", "python"),
        ("python", "python"),
        ("bash -euo pipefail script.sh", "script.sh"),
        ("bash -lc LINE", "bash"),
        ("sh -ec LINE", "sh"),
        ("perl -ne CODE file", "perl"),
        ("ruby -r json script.rb", "script.rb"),
        ("node --no-warnings script.js", "script.js"),
        ("node -p CODE", "node"),
        ("node --eval CODE", "node"),
    ],
)
def test_the_label_is_the_script_or_the_program_and_never_code(command: str, label: str) -> None:
    assert label_of(command.split()) == label


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: 16 * GIB)
    return tmp_path


def asked(*command: str, how: dict[str, Any] | None = None, **changes: Any) -> CommandRequest:
    settings = CommandSettings("/", **(how or {}))
    request = CommandRequest(
        command or ("sh", "x"), settings, isolation="process", folder=Path("run")
    )
    return replace(request, **changes)


def complaint(request: CommandRequest) -> str:
    with pytest.raises(HarnessError) as caught:
        start([request])
    assert not Path("run").exists()
    return str(caught.value)


def test_a_request_becomes_a_plan_of_one_cell_for_each_repeat_and_limit() -> None:
    request = asked("sh", "x", repeats=2, environment={"A": "1"})
    run, note = start([request])
    assert note == ""
    cells = [planned.cell for planned in run.planned]
    assert [(cell.repeat, cell.ram_limit_bytes) for cell in cells] == [(0, None), (1, None)]
    assert {(cell.strategy, cell.command, cell.cache) for cell in cells} == {
        ("x", ("sh", "x"), "as found")
    }
    assert cells[0].environment == {"A": "1"}
    assert isinstance(run.isolation, ProcessIsolation)
    assert (run.folder, run.is_new) == (Path("run"), True)
    assert run.settings.command == request.how
    assert run_folder.read_plan(Path("run")).cells == tuple(cells)


def test_a_label_and_what_was_dropped_are_of_the_cell(here: Path) -> None:
    (here / "data").touch()
    run, _ = start([asked(label="mine", how={"cold": ("data",)})])
    (planned,) = run.planned
    assert (planned.cell.strategy, planned.cell.cache) == ("mine", "cold")


def test_a_folder_without_a_name_is_named_after_the_labels() -> None:
    first, second = asked(label="a" * 50, folder=None), asked(label="b" * 50)
    run, _ = start([first, second])
    assert run.folder.parent == Path("results")
    assert run.folder.name.partition("-")[2] == f"{'a' * 50}-{'b' * 9}"
    assert [planned.cell.strategy for planned in run.planned] == ["a" * 50, "b" * 50]


def test_commands_of_a_suite_keep_their_own_marks_and_files(here: Path) -> None:
    (here / "data").touch()
    first = asked(label="one", how={"cold": ("data",)}, repeats=2)
    second = asked(label="two", how={"marks": ("^step",)}, repeats=2)
    run, _ = start([first, second])
    assert [(p.cell.strategy, p.cell.repeat) for p in run.planned] == [
        ("one", 0), ("two", 0), ("one", 1), ("two", 1),
    ]  # fmt: skip
    how = run.settings.command
    assert how and (how.cold, how.marks) == ((), ())
    assert (how.of("one").cold, how.of("two").cold) == (("data",), ())
    assert (how.of("one").marks, how.of("two").marks) == ((), ("^step",))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asked("no-such-program"), "no-such-program"),
        (asked("sh", environment={"PATH": "/none"}), "sh"),
        (asked(how={"cold": ("none",)}), "--cold none: there is no such file or folder"),
        (asked(how={"marks": ("(",)}), "--mark '(' is not a regular expression"),
        (asked(how={"ready": "("}), "--ready '(' is not a regular expression"),
        (
            asked(how={"ready": "a", "ready_url": "http://x/"}),
            "--ready and --ready-url cannot be combined",
        ),
        (
            asked(how={"image": "a:b"}),
            "--image a:b needs --isolation docker, but the command line has --isolation process",
        ),
        (asked(limits=(None, 17 * GIB)), "--ram 17GiB is more than this machine has (16.000 GiB)"),
        (asked(limits=(GIB,)), "--isolation process cannot enforce a RAM limit"),
        (
            asked(settings=RunSettings(within=0.05)),
            "--isolation process cannot enforce a RAM limit",
        ),
        (asked(limits=(1,)), "--ram 1"),
    ],
)
def test_a_request_that_cannot_start_plans_nothing(
    monkeypatch: pytest.MonkeyPatch, request_: CommandRequest, message: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    monkeypatch.setattr(CgroupIsolation, "check", lambda _: None)
    assert message in complaint(request_)


def test_a_request_without_a_command_says_how_to_write_one() -> None:
    assert complaint(replace(asked(), command=())) == (
        "no command was given\nwrite the command after --: weighin run --ram 4g -- python x.py"
    )


def test_a_planned_command_is_restored_only_if_it_is_trusted() -> None:
    cells = [make_command(repeat=repeat) for repeat in range(3)]
    cells = [replace(cell, isolation="process") for cell in cells]
    settings = RunSettings(command=CommandSettings("/work"), shard=Shard(2, 2))
    with pytest.raises(ConfigError) as caught:
        restore(Path("run"), cells, settings, trusted=False)
    assert "command python train.py --epochs 1 in /work" in caught.value.message
    assert "weighin run --resume run --trust" in caught.value.repair
    run = restore(Path("run"), cells, settings, trusted=True)
    assert [planned.cell for planned in run.planned] == [cells[1]]
    whole = restore(Path("run"), cells, replace(settings, shard=None), trusted=True)
    assert [planned.cell for planned in whole.planned] == cells
    assert isinstance(whole.isolation, ProcessIsolation)
    assert not whole.is_new


def test_what_a_plan_would_run_is_listed_once() -> None:
    cells = [make_command(repeat=0), make_command(repeat=1), make_command(command=("a b",))]
    how = CommandSettings("/work", image="img:1", mounts=("/data",))
    assert foreign(cells, how) == [
        "command python train.py --epochs 1 in /work, image img:1",
        "command 'a b' in /work, image img:1",
        "mount /data",
    ]
    assert foreign(cells[:1], replace(how, image="", mounts=())) == [
        "command python train.py --epochs 1 in /work"
    ]


def test_two_labels_of_interpreters_with_values() -> None:
    assert label_of(["python", "-X"]) == "python"
    assert label_of(["bash", "-o", "pipefail", "s.sh"]) == "s.sh"
    assert label_of(["perl", "-M5", "-E", "CODE"]) == "perl"
    assert label_of(["pypy3.10", "-m", "tool"]) == "tool"
