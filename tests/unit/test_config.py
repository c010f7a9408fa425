"""Models and suites from YAML: what is read, and what is wrong is named with its file, its key and the way out."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from factories import make_cell, read_suite, refused
from snapshots import Compare, answered
from typed_here import typed

from weighin.cell import Job, decode_job, encode_job
from weighin.errors import ConfigError
from weighin.plan import start as plans
from weighin.plan.loads import plan_cell
from weighin.plan.start import resume, start
from weighin.plan.task import Run
from weighin.predict.client import predict
from weighin.settings.definition import (
    COMMANDS,
    DEFAULT_SAVING,
    DEFAULT_STRATEGIES,
    check_suite,
)
from weighin.settings.yaml_file import read_mapping
from weighin.suite.registry import read_strategy, strategy
from weighin.units import GIB, MIB

WRONG = Path(__file__).with_name("snapshots") / "wrong_settings.txt"
"""To add what is wrong, add a line ``$ KIND YAML``; ``pytest --rewrite`` writes what is said of it."""
READERS: dict[str, Callable[[Path], object]] = {
    "suite": read_suite,
    "commands": partial(read_suite, kind=COMMANDS),
    "strategy": read_strategy,
    "saving": partial(read_strategy, operation="save"),
    "options": lambda path: check_suite(yaml.safe_load(path.read_text())),
    "asked_for_thraeds": lambda path: read_strategy(path).check_options(["thraeds"]),
    "yaml": read_mapping,
}


def complaint(question: str) -> str:
    """What a user is told of this file, called FILE, or of these words and the pyproject.toml after ``|``."""
    kind, _, text = question.replace("\\n", "\n").partition(" ")
    if kind == "typed":
        words, _, toml = text.partition(" | ")
        Path("pyproject.toml").write_text(toml)
        code, said = typed(words)
        assert code == 2, said
        return said.rstrip()
    path = Path("x.yaml")
    path.write_text(text)
    return refused(READERS[kind], path).replace(str(path), "FILE")


def test_what_is_wrong_is_named_with_its_key_and_the_way_out(
    here: Path, same: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(plans, "start")  # no run starts
    same(WRONG.name, answered(WRONG, complaint))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"description: 2026-13-01", "month must be in 1..12"),
        (b"[" * 3000, "too many nested values"),
        (b"\xff\x00x", "not UTF-8: invalid start byte at byte 0"),
    ],
    ids=["a date", "nested", "no text"],
)
def test_a_value_that_is_no_fault_of_yaml(here: Path, text: bytes, what: str) -> None:
    (path := here / "x.yaml").write_bytes(text)
    assert refused(read_suite, path).startswith(f"{path}: {what}")


WHOLE = """
models: [a, b]
strategies: [x, {name: y, options: {threads: 4}}]
ram: [none, 8g, 6500m, 536870912, None]
device: cuda:1
isolation: docker
cache: warm
repeats: 3
timeout_s: 12.5
"""
ARENAS = {"MALLOC_ARENA_MAX": "2"}
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "a whole suite": (WHOLE, {
        "models": ["a", "b"], "strategies": [("x", {}), ("y", {"threads": 4})],
        "ram": [None, 8 * GIB, 6500 * MIB, 512 * MIB, None], "device": "cuda:1", "isolation": "docker",
        "cache": "warm", "repeats": 3, "timeout_s": 12.5}),
    "only models": ("models: gpt2-xl", {
        "models": ["gpt2-xl"], "strategies": [(name, {}) for name in DEFAULT_STRATEGIES], "ram": [None],
        "device": "cpu", "isolation": "auto", "cache": "cold", "repeats": 1, "timeout_s": 600}),
    "one value stands for a list": ("{models: a, strategies: x, ram: 8g}", {"models": ["a"], "strategies": [("x", {})], "ram": [8 * GIB]}),
    "one strategy": ("{models: a, strategies: {name: y}}", {"strategies": [("y", {})]}),
    "commas divide strategies, not models": ("{models: 'from:a,b.pt', strategies: 'x,y'}", {
        "models": ["from:a,b.pt"], "strategies": [("x", {}), ("y", {})]}),
    "saves have every way of saving": ("{models: a, operation: save}", {"strategies": [(name, {}) for name in DEFAULT_SAVING]}),
    "one environment": ("{models: a, environment: {MALLOC_ARENA_MAX: 2}}", {"environment": [ARENAS]}),
    "two environments": ("{models: a, environment: [{}, {MALLOC_ARENA_MAX: '2'}]}", {"environment": [{}, ARENAS]}),
    "an environment of two variables": ("{models: a, environment: {OMP_NUM_THREADS: 1, A: 'b c=d'}}", {
        "environment": [{"OMP_NUM_THREADS": "1", "A": "b c=d"}]}),
    "disks": ("{models: a, disk: [50MB/s, none], disk_latency: 20ms}", {"disk": [50_000_000, None], "disk_latency": [20_000_000]}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_a_suite_says(name: str, here: Path) -> None:
    text, wanted = READ[name]
    (path := here / "suite.yaml").write_text(text)
    suite = read_suite(path)
    shown = {
        "models": [one.source for one in suite.models],
        "strategies": [(one.name, one.options) for one in suite.strategies],
    }
    assert {key: shown.get(key, getattr(suite, key)) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [("disk", None, "50MB/s"), ("ranks", 1, 2), ("uses", "forward", "none")],
)
def test_a_save_takes_the_usual_value_however_often(name: str, value: Any, other: Any) -> None:
    save = {"models": "gpt2-xl", "operation": "save"}
    assert getattr(check_suite(save | {name: [value, value]}), name) == [value, value]
    with pytest.raises(ConfigError, match="save"):
        check_suite(save | {name: [value, other]})


def test_a_key_of_yaml_is_there_once_but_may_override_a_merged_one(here: Path) -> None:
    (path := here / "x.yaml").write_text("base: &base {x: 1}\nb:\n  <<: *base\n  c: 2\n")
    assert read_mapping(path)["b"] == {"x": 1, "c": 2}


def test_a_worker_is_told_the_environment_and_the_disk_of_its_cell() -> None:
    cell = make_cell(environment=ARENAS, disk_bytes_per_s=200_000_000, disk_latency_ns=5_000_000)
    assert decode_job(encode_job(job := Job(cell, "c", "m", "s"))) == job


@pytest.mark.parametrize(
    ("changes", "cannot"),
    [
        ({"environment": ARENAS}, "the effect of MALLOC_ARENA_MAX=2"),
        ({"options": {"key": "model"}}, "the load of a part of a training checkpoint"),
    ],
    ids=["environment", "part"],
)
def test_what_a_prediction_cannot_follow(changes: dict[str, Any], cannot: str) -> None:
    [found] = predict([plan_cell(make_cell("streaming", **changes), strategy("streaming"))])
    assert found.cannot == f"weighin cannot predict {cannot}"


TWO = """
commands:
  - {name: first, command: "sh -c 'echo a b'", cold: cold.bin, marks: [a]}
  - {name: second, command: ['true', 1], environment: {A: 1}}
repeats: 2
isolation: process
"""


@pytest.fixture
def two(here: Path) -> Run:
    """A run of two commands."""
    (here / "cold.bin").write_bytes(b"x")
    (here / "suite.yaml").write_text(TWO)
    suite = read_suite(here / "suite.yaml", COMMANDS)
    return start(suite.model_copy(update={"cwd": str(here)}), here / "run")[0]


def test_a_command_is_a_list_or_a_line_that_is_split_as_a_shell_does(two: Run) -> None:
    first, second = two.settings.commands
    assert (first.command, second.command) == (["sh", "-c", "echo a b"], ["true", "1"])
    assert (first.cold, first.marks, second.environment) == (["cold.bin"], ["a"], {"A": "1"})
    assert (second.cold, second.marks) == ([], [])


def test_a_resumed_suite_keeps_the_settings_of_each_command(two: Run) -> None:
    again = resume(two.folder, trusted=True)
    assert again.settings == two.settings
    assert [each.cell for each in again.planned] == [each.cell for each in two.planned]
    assert [one.cell.strategy for one in again.planned] == ["first", "second"] * 2
    plan = two.folder / "plan.json"
    plan.write_text(plan.read_text().replace("echo a b", "echo b"))
    assert "command sh -c 'echo b'" in refused(resume, two.folder)
