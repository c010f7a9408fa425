"""Defaults from [tool.weighin] of pyproject.toml; what is typed wins over them. Wrong ones: see test_config."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typed_here import typed

from weighin.plan import start as plans
from weighin.settings.definition import Settings

Measured = Callable[[str], tuple[Settings, Path | None]]


class Started(Exception):
    """A run would start now."""


@pytest.fixture
def asked(here: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Type a command, and return the settings and the folder that its run would have started with."""
    started: list[tuple[Settings, Path | None]] = []

    def start(settings: Settings, folder: Path | None, *_: object) -> Any:
        started.append((settings, folder))
        raise Started

    def asked(line: str) -> tuple[Settings, Path | None]:
        with pytest.raises(Started):
            typed(line)
        return started.pop()

    monkeypatch.setattr(plans, "start", start)
    return asked


def write(text: str, folder: Path = Path()) -> None:
    (folder / "pyproject.toml").write_text(text)


SHARED = """
[tool.weighin]
isolation = "process"
ram = ["none", "8g"]
out = "results/mine"
strategies = ["baseline", "streaming"]
timeout = 5
steady = true
"""
MINE = Path("results/mine")
OF_FLOOR = '[tool.weighin]\ntimeout = 5\ndtype = "bf16"\n[tool.weighin.floor]\ntimeout = 9\n'
OWN = '[tool.weighin]\nmodel = "my.nets:build"\nkwargs = {width = 64}\ncheckpoint = "w.pt"\n'
SAVING = '[tool.weighin]\nsuite = "saving"\nrepeats = 9\n'
SUITE = "models: gpt2-xl\nram: [8g, none]\nseed: 3\nstrategies: dcp\n"

READ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "the file sets defaults": (SHARED, "bench", {
        "isolation": "process", "ram": [None, 8 * 2**30], "strategies": ["baseline", "streaming"],
        "timeout_s": 5, "steady": True, "folder": MINE}),
    "of floor, which has no --ram": (SHARED, "floor", {"isolation": "process", "folder": MINE}),
    "what is typed wins": (SHARED, "bench --isolation cgroup --ram 1g -s dcp --out other --timeout 7", {
        "isolation": "cgroup", "ram": [2**30], "strategies": ["dcp"], "folder": Path("other"), "timeout_s": 7}),
    "the table of another verb": (OF_FLOOR, "bench", {"timeout_s": 5}),
    "a table of one verb wins": (OF_FLOOR, "floor", {"timeout_s": 9, "dtype": "bfloat16"}),
    "a model with its arguments": (OWN, "bench", {"models": ["my.nets:build"], "kwargs": {"width": 64}, "checkpoint": Path("w.pt")}),
    "arguments and weights are of the file's model": (OWN, "bench gpt2-tiny", {"models": ["gpt2-tiny"], "kwargs": {}, "checkpoint": None}),
    "a suite overrides the file": (SAVING, "bench --out x", {"operation": "save", "repeats": 3}),
    "typed options override the suite": (SAVING, "bench gpt2-tiny --repeats 2", {
        "operation": "save", "models": ["gpt2-tiny"], "repeats": 2}),
    "typed options and keys override a suite": ("", "bench --suite own.yaml --ram 4g --set kwargs.n=64", {
        "models": ["gpt2-xl"], "ram": [4 * 2**30], "seed": 3, "strategies": ["dcp"], "kwargs": {"n": 64}}),
    "a typed model overrides a suite's": ("", "bench gpt2-tiny --suite own.yaml --set environment.A=01", {
        "models": ["gpt2-tiny"], "environment": [{"A": "01"}]}),
    "without a table nothing is set": ('[project]\nname = "weighin-user"\n', "bench", {"isolation": "auto"}),
    "what another verb ignores does not fail there": ("[tool.weighin]\npasses = 2\n", "floor gpt2-tiny --use none", {"passes": 1}),
    "an option counts beside its key": ("", "bench gpt2-tiny --set ram=8g --ram 4g", {"ram": [4 * 2**30]}),
    "typed stacks are read in repeats too": ("", "run --repeats 2 --stacks -- true", {"stacks": True}),
    "stacks are not read in repeats": ("", "run --repeats 2 -- true", {"stacks": False}),
    "a command's variables may have any name": ("", "run --env my.var=1 --env BASH_FUNC_f%%=1 -- true", {
        "variables": [{"my.var": "1", "BASH_FUNC_f%%": "1"}]}),
    "a time-out does not end a command whose floor is searched": ("[tool.weighin]\ntimeout = 60\n", "floor -- true", {"timeout_s": 0}),
    "two models to set are two models": ("", "bench --set models=gpt2-tiny,tied-tiny", {"models": ["gpt2-tiny", "tied-tiny"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_a_run_would_start_with(name: str, asked: Measured) -> None:
    toml, line, wanted = READ[name]
    write(toml)
    Path("own.yaml").write_text(SUITE)
    settings, folder = asked(line)
    shown = {
        "folder": folder,
        "models": [one.source for one in settings.models],
        "strategies": [one.name for one in settings.strategies],
        "variables": [one.environment for one in settings.commands],
    }
    found = {key: shown[key] if key in shown else getattr(settings, key) for key in wanted}
    assert found == wanted


def test_the_nearest_file_with_a_table_counts_and_its_paths_are_its_own(
    asked: Measured, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write('[tool.weighin]\nstrategies = ["./mine.py", "dcp"]\ncheckpoint = "w.pt"\n')
    inner = here / "inner" / "deep"
    inner.mkdir(parents=True)
    write('[project]\nname = "weighin-user"\n', here / "inner")
    monkeypatch.chdir(inner)
    bench, _ = asked("bench")
    assert [one.name for one in bench.strategies] == ["../../mine.py", "dcp"]
    assert bench.checkpoint == Path("../../w.pt")


@pytest.mark.parametrize(
    ("model", "located"),
    [
        ("nets.py:build", "../nets.py:build"), ("from:w.pt", "from:../w.pt"), ("w.pt", "../w.pt"),
        ("/models/mine", "/models/mine"), ("inner/mine", "mine"), ("Some/Model", "Some/Model"),
        ("my.nets:build", "my.nets:build"),
    ],
)  # fmt: skip
def test_a_model_in_a_file_is_relative_to_the_settings(
    asked: Measured, here: Path, monkeypatch: pytest.MonkeyPatch, model: str, located: str
) -> None:
    write(f'[tool.weighin]\nmodel = "{model}"\n')
    (here / "inner" / "mine").mkdir(parents=True)
    monkeypatch.chdir(here / "inner")
    (found,) = asked("bench")[0].models
    assert found.source == located or Path(found.source).resolve() == Path(located)


@pytest.mark.root
def test_a_file_of_a_stranger_sets_nothing(
    asked: Measured, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /tmp/pyproject.toml, which any user can write, for a run in /tmp or in /tmp/mine."""
    write('[tool.weighin]\nstrategies = ["./evil.py"]\n')
    os.chown("pyproject.toml", 65534, 65534)
    assert "./evil.py" not in [one.name for one in asked("bench")[0].strategies]
    (here / "mine").mkdir()
    monkeypatch.chdir(here / "mine")
    assert "../evil.py" not in [one.name for one in asked("bench")[0].strategies]
    os.chown(".", 65534, 65534)  # the folder of the same user: a project of theirs
    assert [one.name for one in asked("bench")[0].strategies] == ["../evil.py"]
