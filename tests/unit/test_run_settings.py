"""The settings of a run, from the command line to its plan and back."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from factories import MODEL

from weighin.cell import ModelSpec
from weighin.formats.selection import Selection
from weighin.records.floor import Aim
from weighin.records.shard import Shard
from weighin.run.command_settings import CommandSettings
from weighin.run.settings import RunSettings

COMMAND = CommandSettings(
    "/work",
    cold=("/data",),
    marks=("^step", "^loss"),
    stacks=False,
    ready="up",
    ready_url="http://localhost/",
    grace_s=3.0,
    in_search=True,
    image="image:1",
    mounts=("/more",),
    own={"one": {"cold": ("/other",), "marks": ()}},
)
WHOLE = RunSettings(
    seed=7,
    checkpoint=Path("/weights.pt"),
    selection=Selection("model", "module."),
    timeout_s=5.0,
    steady=True,
    trace=True,
    base_image="base:1",
    strategy_paths={"mine": "/mine.py"},
    python_path=("/my", "/other"),
    mounts=("/a", "/b"),
    within=0.05,
    aim=Aim.SURVIVES,
    engine={"name": "local", "jobs": 2},
    shard=Shard(2, 3),
    command=COMMAND,
    checkpoints={"gpt2-xl": "/xl.pt"},
    use_paths={"mine": "/use.py"},
    storage=Path("/storage"),
)


def test_these_settings_differ_from_the_usual_ones_in_every_field() -> None:
    for whole, usual in ((WHOLE, RunSettings()), (COMMAND, CommandSettings("/"))):
        for one in fields(whole):
            assert getattr(whole, one.name) != getattr(usual, one.name), one.name


@pytest.mark.parametrize(
    "settings",
    [
        WHOLE,
        RunSettings(),
        replace(WHOLE, command=None),
        replace(WHOLE, within=None, aim=Aim.ENDS),
        RunSettings(within=0.01),
    ],
)
def test_a_plan_has_every_setting(settings: RunSettings) -> None:
    assert RunSettings.from_json(json.loads(json.dumps(settings.as_json()))) == settings


def test_a_setting_of_a_later_version_is_ignored() -> None:
    assert RunSettings.from_json({"seed": 3, "new": 1, "checkpoint": None}) == RunSettings(seed=3)


def test_a_plan_leaves_out_what_is_not_set() -> None:
    usual = RunSettings().as_json()
    optional = {
        "within",
        "aim",
        "engine",
        "shard",
        "command",
        "checkpoints",
        "storage",
        "use_paths",
    }
    assert not optional & usual.keys()
    assert (usual["checkpoint"], usual["key"], usual["strip_prefix"]) == (None, "", "")
    assert "selection" not in usual
    assert RunSettings(within=0.05).as_json()["aim"] == Aim.ENDS


@pytest.mark.parametrize(
    ("settings", "verb"),
    [
        (RunSettings(), "bench"),
        (RunSettings(command=COMMAND), "run"),
        (RunSettings(within=0.05), "floor"),
        (RunSettings(within=0.05, command=COMMAND), "floor"),
    ],
)
def test_each_run_has_its_verb(settings: RunSettings, verb: str) -> None:
    assert settings.verb == verb


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
    assert RunSettings(**changes).checkpoint_of(ModelSpec("gpt2-xl", "a:b")) == path


def test_a_command_may_have_settings_of_its_own() -> None:
    assert COMMAND.of("one") == replace(COMMAND, own={}, cold=("/other",), marks=())
    assert COMMAND.of("two") == replace(COMMAND, own={})
