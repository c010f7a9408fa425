"""The settings of a run, from what was asked for to its plan and back."""

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from factories import MODEL, refused
from ran_commands import make_command, settings_of

from weighin.cell import Cell, ModelSpec
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

COMMAND: dict[str, Any] = {
    "name": "one", "command": ["python", "x.py"], "cold": ["/data"], "marks": ["^step"], "environment": {"A": "1"},
}  # fmt: skip
UNUSUAL: dict[str, Any] = {
    "models": [{"name": "mine", "builder": "nets:build", "kwargs": {"width": 64}}], "commands": [COMMAND],
    "strategies": [{"name": "streaming", "options": {"threads": 2}}], "ram": ["8g", "none"], "vram": ["4g"],
    "device": "cuda:1", "isolation": "cgroup", "image": "image:1", "dtype": "bf16", "cache": "warm",
    "format": ["pt"], "uses": ["sgd", "forward"], "passes": 2, "ranks": [1, 2], "repeats": 3,
    "environment": [{"MALLOC_ARENA_MAX": 2}], "timeout_s": 5, "stacks": True, "steady": True,
    "description": "all", "kwargs": {"n": 1}, "checkpoint": "/weights.pt", "key": "model",
    "strip_prefix": "module.", "variant": "fp16", "model_class": "AutoModel", "revision": "main",
    "trust_remote_code": True, "adapter": "/lora", "seed": 7, "storage": "/storage", "mounts": ["/a", "/b"],
    "with": ["transformers==4.57.1"],
    "cwd": "/work", "ready": "up", "grace_s": 3.0, "within": 0.05, "aim": "survives",
    "engine": {"name": "local", "jobs": 2}, "shard": "2/3", "checkpoints": {"gpt2-xl": "/xl.pt"},
    "strategy_paths": {"mine": "/mine.py"}, "use_paths": {"mine": "/use.py"}, "python_path": ["/my", "/other"],
}  # fmt: skip
SLOW = {"ready_url": "http://localhost/", "models": ["gpt2-xl"], "disk": ["200MB/s", "none"], "disk_latency": ["5ms"]}  # fmt: skip
SAVE = {"models": ["gpt2-xl"], "operation": "save"}


def key_of(name: str) -> str:
    """Return how a suite writes a setting: ``with`` is no name of a field in Python."""
    return Settings.model_fields[name].alias or name


def kept(settings: Settings) -> Settings:
    """Return the settings after they were in a plan."""
    return plan_of(json.loads(json.dumps(settings.as_json())))


def test_all_settings_are_tried_here_and_described() -> None:
    not_kept = {name for name, field in Settings.model_fields.items() if field.exclude}
    assert {*UNUSUAL, *SLOW, *SAVE} == {*map(key_of, Settings.model_fields)} - not_kept
    for kind in (Settings, SuiteModel, SuiteStrategy, SuiteCommand):
        for name, field in kind.model_fields.items():
            assert field.description and len(field.description.split()) > 3, name


@pytest.mark.parametrize("options", [UNUSUAL, SLOW, SAVE, {}])
def test_a_plan_has_every_setting(options: dict[str, Any]) -> None:
    settings = check_suite(options)
    assert set(options) <= {*map(key_of, settings.as_json())}
    assert kept(settings) == settings


def plan_of(content: dict[str, Any], *cells: Cell) -> Settings:
    return read_plan(content, cells, Path("run/plan.json"))


def test_a_setting_of_a_later_version_is_ignored() -> None:
    later = {"seed": 3, "new": 1, "checkpoint": None, "commands": [COMMAND | {"later": 1}],
             "strategies": [{"name": "streaming", "later": 1}]}  # fmt: skip
    known = {"seed": 3, "commands": [COMMAND], "strategies": ["streaming"], "timeout_s": 0}
    assert plan_of(later) == check_suite(known)


IMPOSSIBLE = [(name, number) for name in ("timeout_s", "grace_s", "within") for number in (inf, nan, -1, 1e300, 2_073_601)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [("seed", "x"), *IMPOSSIBLE])
def test_a_damaged_setting_is_named_with_its_plan(name: str, value: Any) -> None:
    said = refused(plan_of, {name: value})
    assert said.startswith(f"run/plan.json: {name}: input should be ")


def test_a_plan_leaves_out_what_is_not_set() -> None:
    usual = check_suite({"models": ["gpt2-xl"]}).as_json()
    assert usual == {"models": [{"name": "gpt2-xl"}]}
    assert Settings(within=0.05).as_json()["within"] == 0.05


def test_a_plan_keeps_what_only_a_command_line_or_an_older_weighin_may_set() -> None:
    """Any variable, and names that are not UTF-8."""
    cell = make_command("a", command=("x\udcff",), environment={"PYTHONPATH": "/x"})
    settings = settings_of(cell, cwd="/\udcff")
    assert kept(settings) == settings
    assert plan_of({"environment": [{"HOME": "/x"}]}).environment == [{"HOME": "/x"}]


OLD: dict[str, Any] = {
    "seed": 0, "checkpoint": None, "timeout_s": 0.0, "mounts": [], "within": 0.01, "aim": "survives",
    "shard": "1/2", "key": "",
    "command": {
        "folder": "/work", "cold": ["/data"], "marks": [], "stacks": True, "ready": "up", "grace_s": 5.0,
        "in_search": True, "image": "image:1", "mounts": ["/m"], "own": {},
    },
}  # fmt: skip


def test_settings_of_commands_of_an_older_weighin() -> None:
    cells = [make_command("one"), make_command("two"), make_command("one", repeat=1)]
    found = plan_of(OLD, *cells)
    commands = [(one.name, one.cold, one.marks) for one in found.commands]
    assert commands == [("one", ["/data"], []), ("two", ["/data"], [])]
    assert tuple(found.command("two").command) == cells[1].command
    assert (found.cwd, found.mounts, found.image) == ("/work", ("/m",), "image:1")
    assert (found.stacks, found.ready, found.grace_s, found.timeout_s) == (True, "up", 5.0, 0.0)
    assert (found.within, found.aim, found.shard) == (0.01, Aim.SURVIVES, "1/2")
    assert kept(found) == found


def test_each_run_has_its_verb() -> None:
    for commands, verb in (({}, "bench"), ({"commands": [COMMAND]}, "run")):
        assert verb_of(vars(check_suite(commands))) == verb
        assert verb_of(vars(check_suite(commands | {"within": 0.05}))) == "floor"


def test_each_model_has_its_own_checkpoint() -> None:
    one, xl = Path("/one.pt"), {MODEL.title: "/xl.pt"}
    spec = ModelSpec("gpt2-xl", "a:b")
    assert Settings().checkpoint_of(spec) is None
    assert Settings(checkpoint=one).checkpoint_of(spec) == one
    assert Settings(checkpoint=one, checkpoints=xl).checkpoint_of(spec) == Path("/xl.pt")
    assert Settings(checkpoints={"another": "/xl.pt"}).checkpoint_of(spec) is None
