"""The settings of a run, from what was asked for to its plan and back."""

import json
from pathlib import Path
from typing import Any

import pytest
from factories import MODEL
from ran_commands import make_command, settings_of

from weighin.cell import ModelSpec
from weighin.errors import ConfigError
from weighin.records.floor import Aim
from weighin.records.run_folder import verb_of
from weighin.settings.definition import (
    Settings,
    SuiteCommand,
    SuiteModel,
    SuiteStrategy,
    check_suite,
    read_plan,
)

COMMAND = {
    "name": "one",
    "command": ["python", "x.py"],
    "cold": ["/data"],
    "marks": ["^step"],
    "environment": {"A": "1"},
}
UNUSUAL: dict[str, Any] = {
    "models": [{"name": "mine", "builder": "nets:build", "kwargs": {"width": 64}}],
    "commands": [COMMAND],
    "strategies": [{"name": "streaming", "options": {"threads": 2}}],
    "ram": ["8g", "none"],
    "vram": ["4g"],
    "device": "cuda:1",
    "isolation": "cgroup",
    "image": "image:1",
    "dtype": "bf16",
    "cache": "warm",
    "format": ["pt"],
    "uses": ["sgd", "forward"],
    "passes": 2,
    "ranks": [1, 2],
    "repeats": 3,
    "environment": [{"MALLOC_ARENA_MAX": 2}],
    "timeout_s": 5,
    "stacks": True,
    "steady": True,
    "description": "all",
    "kwargs": {"n": 1},
    "checkpoint": "/weights.pt",
    "key": "model",
    "strip_prefix": "module.",
    "variant": "fp16",
    "model_class": "AutoModel",
    "revision": "main",
    "trust_remote_code": True,
    "adapter": "/lora",
    "seed": 7,
    "storage": "/storage",
    "mounts": ["/a", "/b"],
    "cwd": "/work",
    "ready": "up",
    "grace_s": 3.0,
    "within": 0.05,
    "aim": "survives",
    "engine": {"name": "local", "jobs": 2},
    "shard": "2/3",
    "checkpoints": {"gpt2-xl": "/xl.pt"},
    "strategy_paths": {"mine": "/mine.py"},
    "use_paths": {"mine": "/use.py"},
    "python_path": ["/my", "/other"],
}
SLOW = {
    "ready_url": "http://localhost/",
    "models": ["gpt2-xl"],
    "disk": ["200MB/s", "none"],
    "disk_latency": ["5ms"],
}
SAVE = {"models": ["gpt2-xl"], "operation": "save"}


def kept(settings: Settings) -> Settings:
    """Return the settings after they were in a plan."""
    content = settings.as_json()
    return read_plan(json.loads(json.dumps(content)), [], Path("plan.json"))


def test_all_settings_are_tried_here_and_described() -> None:
    not_kept = {name for name, field in Settings.model_fields.items() if field.exclude}
    assert {*UNUSUAL, *SLOW, *SAVE} == {*Settings.model_fields} - not_kept
    for kind in (Settings, SuiteModel, SuiteStrategy, SuiteCommand):
        for name, field in kind.model_fields.items():
            assert field.description and len(field.description.split()) > 3, name


@pytest.mark.parametrize("options", [UNUSUAL, SLOW, SAVE, {}])
def test_a_plan_has_every_setting(options: dict[str, Any]) -> None:
    settings = check_suite(options)
    unusual = settings.as_json()
    assert set(options) <= set(unusual)
    assert kept(settings) == settings


def test_a_setting_of_a_later_version_is_ignored() -> None:
    found = read_plan(
        {
            "seed": 3,
            "new": 1,
            "checkpoint": None,
            "commands": [COMMAND | {"later": 1}],
            "strategies": [{"name": "streaming", "later": 1}],
        },
        [],
        Path("plan.json"),
    )
    assert found == check_suite(
        {"seed": 3, "commands": [COMMAND], "strategies": ["streaming"], "timeout_s": 0}
    )


def test_a_damaged_setting_is_named_with_its_plan() -> None:
    with pytest.raises(ConfigError, match=r"run/plan.json: seed: input should be a valid integer"):
        read_plan({"seed": "x"}, [], Path("run/plan.json"))


@pytest.mark.parametrize("number", [float("inf"), float("nan"), -1, 1e300, 2_073_601])
@pytest.mark.parametrize("name", ["timeout_s", "grace_s", "within"])
def test_an_impossible_number_in_a_plan_is_named(name: str, number: float) -> None:
    with pytest.raises(ConfigError, match=rf"^run/plan.json: {name}: "):
        read_plan({name: number}, [], Path("run/plan.json"))


def test_a_plan_leaves_out_what_is_not_set() -> None:
    usual = check_suite({"models": ["gpt2-xl"]}).as_json()
    assert usual == {"models": [{"name": "gpt2-xl"}]}
    assert Settings(within=0.05).as_json()["within"] == 0.05


def test_a_plan_keeps_what_only_a_command_line_may_set() -> None:
    """Any variable, and names that are not UTF-8."""
    cell = make_command("a", command=("x\udcff",), environment={"PYTHONPATH": "/x"})
    settings = settings_of(cell, cwd="/\udcff")
    assert kept(settings) == settings


def test_a_plan_keeps_a_variable_that_weighin_has_set_itself_only_since() -> None:
    found = read_plan({"environment": [{"HOME": "/x"}]}, [], Path("plan.json"))
    assert found.environment == [{"HOME": "/x"}]


OLD: dict[str, Any] = {
    "seed": 0,
    "checkpoint": None,
    "timeout_s": 0.0,
    "mounts": [],
    "within": 0.01,
    "aim": "survives",
    "shard": "1/2",
    "command": {
        "folder": "/work",
        "cold": ["/data"],
        "marks": [],
        "stacks": True,
        "ready": "up",
        "grace_s": 5.0,
        "in_search": True,
        "image": "image:1",
        "mounts": ["/m"],
        "own": {},
    },
    "key": "",
}


def test_settings_of_commands_of_an_older_weighin() -> None:
    cells = [make_command("one"), make_command("two"), make_command("one", repeat=1)]
    found = read_plan(OLD, cells, Path("plan.json"))
    assert [(one.name, one.cold, one.marks) for one in found.commands] == [
        ("one", ["/data"], []),
        ("two", ["/data"], []),
    ]
    assert tuple(found.command("two").command) == cells[1].command
    assert (found.cwd, found.mounts, found.image) == ("/work", ("/m",), "image:1")
    assert (found.stacks, found.ready, found.grace_s, found.timeout_s) == (True, "up", 5.0, 0.0)
    assert (found.within, found.aim, found.shard) == (0.01, Aim.SURVIVES, "1/2")
    assert kept(found) == found


@pytest.mark.parametrize(
    ("options", "verb"),
    [
        ({}, "bench"),
        ({"commands": [COMMAND]}, "run"),
        ({"within": 0.05}, "floor"),
        ({"within": 0.05, "commands": [COMMAND]}, "floor"),
    ],
)
def test_each_run_has_its_verb(options: dict[str, Any], verb: str) -> None:
    assert verb_of(vars(check_suite(options))) == verb


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, None),
        ({"checkpoint": Path("/one.pt")}, Path("/one.pt")),
        ({"checkpoints": {MODEL.title: "/xl.pt"}, "checkpoint": Path("/one.pt")}, Path("/xl.pt")),
        ({"checkpoints": {"another": "/xl.pt"}}, None),
    ],
)
def test_each_model_has_its_own_checkpoint(changes: dict[str, Any], path: Path | None) -> None:
    assert Settings(**changes).checkpoint_of(ModelSpec("gpt2-xl", "a:b")) == path
