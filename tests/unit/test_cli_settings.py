"""Defaults from [tool.weighin] of pyproject.toml, and that what is typed wins over them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from weighin.cli import app
from weighin.errors import ConfigError, HarnessError
from weighin.plan import start as plans
from weighin.settings.definition import Settings


class Started(Exception):
    """A run would start now."""


Measured = Callable[..., tuple[Settings, Path | None]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked(here: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Type a command, and return the settings and the folder that its run would have started with."""
    started: list[tuple[Settings, Path | None]] = []

    def start(settings: Settings, folder: Path | None, *_: object) -> Any:
        started.append((settings, folder))
        raise Started

    monkeypatch.setattr(plans, "start", start)

    def asked(*arguments: str) -> tuple[Settings, Path | None]:
        result = CliRunner().invoke(app.app, arguments)
        assert isinstance(result.exception, Started), (result.output, result.exception)
        return started.pop()

    return asked


def write(text: str, folder: Path = Path()) -> None:
    (folder / "pyproject.toml").write_text(text)


def models(settings: Settings) -> list[str]:
    return [model.source for model in settings.models]


def refused(*arguments: str) -> str:
    """Type a command that ends in an error of ours, and return that error."""
    result = CliRunner().invoke(app.app, arguments)
    assert isinstance(result.exception, HarnessError), result.output
    return str(result.exception)


SHARED = """
[tool.weighin]
isolation = "process"
ram = ["none", "8g"]
out = "results/mine"
strategies = ["baseline", "streaming"]
timeout = 5
steady = true
"""


def test_the_file_sets_defaults_of_the_verbs_that_measure(asked: Measured) -> None:
    write(SHARED)
    bench, folder = asked("bench")
    assert bench.isolation == "process"
    assert bench.ram == [None, 8 * 2**30]
    assert [one.name for one in bench.strategies] == ["baseline", "streaming"]
    assert (folder, bench.timeout_s) == (Path("results/mine"), 5)
    assert bench.steady is True
    floor, folder = asked("floor")  # it has no --ram
    assert (floor.isolation, folder) == ("process", Path("results/mine"))


def test_what_is_typed_wins(asked: Measured) -> None:
    write(SHARED)
    bench, folder = asked(
        *("bench", "--isolation", "cgroup", "--ram", "1g", "-s", "dcp"),
        *("--out", "other", "--timeout", "7"),
    )
    assert (bench.isolation, bench.ram) == ("cgroup", [2**30])
    assert [one.name for one in bench.strategies] == ["dcp"]
    assert (folder, bench.timeout_s) == (Path("other"), 7)


def test_a_table_of_one_verb_wins_over_the_shared_one(asked: Measured) -> None:
    write('[tool.weighin]\ntimeout = 5\ndtype = "bf16"\n[tool.weighin.floor]\ntimeout = 9\n')
    assert asked("bench")[0].timeout_s == 5
    assert asked("floor")[0].timeout_s == 9
    assert asked("floor")[0].dtype == "bfloat16"


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


def test_a_model_with_its_arguments(asked: Measured) -> None:
    write('[tool.weighin]\nmodel = "my.nets:build"\nkwargs = {width = 64}\ncheckpoint = "w.pt"\n')
    bench, _ = asked("bench")
    assert (models(bench), bench.kwargs) == (["my.nets:build"], {"width": 64})
    other, _ = asked("bench", "gpt2-tiny")  # the arguments and the weights are of the file's model
    assert (models(other), other.kwargs, other.checkpoint) == (
        ["gpt2-tiny"],
        {},
        None,
    )


@pytest.mark.parametrize(
    ("model", "located"),
    [
        ("nets.py:build", "../nets.py:build"),
        ("from:w.pt", "from:../w.pt"),
        ("w.pt", "../w.pt"),
        ("/models/mine", "/models/mine"),
        ("inner/mine", "mine"),
        ("Some/Model", "Some/Model"),
        ("my.nets:build", "my.nets:build"),
    ],
)
def test_a_model_in_a_file_is_relative_to_the_settings(
    asked: Measured, here: Path, monkeypatch: pytest.MonkeyPatch, model: str, located: str
) -> None:
    write(f'[tool.weighin]\nmodel = "{model}"\n')
    (here / "inner" / "mine").mkdir(parents=True)
    monkeypatch.chdir(here / "inner")
    (source,) = models(asked("bench")[0])
    assert source == located or Path(source).resolve() == Path(located)


def test_a_suite_overrides_the_file_and_the_command_line_overrides_the_suite(
    asked: Measured,
) -> None:
    write('[tool.weighin]\nsuite = "saving"\nrepeats = 9\n')
    suite = asked("bench", "--out", "x")[0]
    assert (suite.operation, suite.repeats) == ("save", 3)
    own = asked("bench", "gpt2-tiny", "--repeats", "2")[0]
    assert (own.operation, models(own), own.repeats) == ("save", ["gpt2-tiny"], 2)


def test_typed_options_and_keys_override_a_suite(asked: Measured, here: Path) -> None:
    (here / "own.yaml").write_text("models: gpt2-xl\nram: [8g, none]\nseed: 3\nstrategies: dcp\n")
    suite, _ = asked("bench", "--suite", "own.yaml", "--ram", "4g", "--set", "kwargs.n=64")
    assert (models(suite), suite.ram, suite.seed) == (["gpt2-xl"], [4 * 2**30], 3)
    assert (suite.strategies[0].name, suite.kwargs) == ("dcp", {"n": 64})
    other, _ = asked("bench", "gpt2-tiny", "--suite", "own.yaml", "--set", "environment.A=01")
    assert (models(other), other.environment) == (["gpt2-tiny"], [{"A": "01"}])


def test_without_a_table_nothing_is_set(asked: Measured) -> None:
    write('[project]\nname = "weighin-user"\n')
    assert asked("bench")[0].isolation == "auto"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            '[tool.weighin]\nisolaton = "process"\n',
            "pyproject.toml: tool.weighin.isolaton: unknown key\ndid you mean 'isolation'? known: ",
        ),
        (
            '[tool.weighin.bench]\nwithin = "2%"\n',
            "pyproject.toml: tool.weighin.bench.within: unknown key\ndid you mean 'wait'? known: ",
        ),
        (
            "[tool.weighin.bnech]\nrepeats = 2\n",
            "pyproject.toml: tool.weighin.bnech: unknown key\ndid you mean 'bench'? known: ",
        ),
        (
            "[tool.weighin]\ntrust = true\n",
            "pyproject.toml: tool.weighin.trust: unknown key\n",
        ),
        ("[tool]\nweighin = 3\n", "pyproject.toml: tool.weighin is not a TOML table\n"),
        ("[tool.weighin\n", "pyproject.toml: not TOML: "),
    ],
)
def test_a_file_that_is_wrong_is_named_with_the_key(here: Path, text: str, complaint: str) -> None:
    write(text)
    assert refused("list").startswith(complaint)


@pytest.mark.parametrize("value", ["{small = 1}", "[[1]]", "true"])
def test_a_value_of_a_wrong_kind_names_the_file(here: Path, value: str) -> None:
    write(f"[tool.weighin]\nram = {value}\n")
    assert refused("bench").startswith("pyproject.toml: tool.weighin.ram: ")


def test_a_wrong_value_names_the_file(here: Path) -> None:
    write('[tool.weighin]\nram = "8GB"\n')
    assert refused("bench", "--isolation", "process") == (
        "pyproject.toml: tool.weighin.ram: '8GB' is ambiguous: GB is 1000-based for some tools and"
        " 1024-based for others\nwrite 8GiB (1024-based), or the number of bytes"
    )
    with pytest.raises(ConfigError, match=r"number of bytes$"):  # typed: no file is to blame
        CliRunner().invoke(app.app, ["bench", "--ram", "8GB"], catch_exceptions=False)


def test_a_suite_names_its_models_itself(here: Path) -> None:
    result = CliRunner().invoke(app.app, ["predict", "--suite", "no-such-suite"])
    assert (isinstance(result.exception, HarnessError), result.stderr) == (True, "")


def test_a_setting_that_another_verb_ignores_does_not_fail_there(asked: Measured) -> None:
    write("[tool.weighin]\npasses = 2\n")
    settings, _ = asked("floor", "gpt2-tiny", "--use", "none")
    assert settings.passes == 1


def test_an_option_counts_beside_its_key(asked: Measured) -> None:
    settings, _ = asked("bench", "gpt2-tiny", "--set", "ram=8g", "--ram", "4g")
    assert settings.ram == [4 * 1024**3]


@pytest.mark.parametrize("name", ["my.var", "BASH_FUNC_f%%"])
def test_a_command_may_have_a_variable_of_any_name(asked: Measured, name: str) -> None:
    settings, _ = asked("run", "--env", f"{name}=1", "--", "true")
    assert settings.commands[0].environment == {name: "1"}


@pytest.mark.parametrize(("typed", "stacks"), [(["--stacks"], True), ([], False)])
def test_typed_stacks_are_read_in_repeats_too(
    asked: Measured, typed: list[str], *, stacks: bool
) -> None:
    settings, _ = asked("run", "--repeats", "2", *typed, "--", "true")
    assert settings.stacks is stacks


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["inspect", "gpt2-tiny", "--set", "ram=8g"], "--set ram"),
        (["convert", "m.pt", "m.safetensors", "--set", "dtype=bf16"], "--set dtype"),
        (["convert", "m.pt", "m.safetensors", "--set", "kwargs.a=1"], "--set kwargs"),
        (["predict", "gpt2-tiny", "--set", "timeout_s=5"], "--set timeout_s"),
        (["recommend", "gpt2-tiny", "--set", "strategies=baseline"], "--set strategies"),
        (["floor", "gpt2-tiny", "--set", "passes=2"], "--set passes"),
    ],
)
def test_a_key_without_an_effect_on_the_verb_is_refused(
    here: Path, words: list[str], key: str
) -> None:
    assert f"{key}: it has no effect on weighin {words[0]}" in refused(*words)


def test_a_key_of_the_other_kind_of_suite_is_an_error_in_a_file(here: Path) -> None:
    (here / "suite.yaml").write_text("models: [gpt2-tiny]\nstacks: true\n")
    assert "it has no effect on a model" in refused("predict", "--suite", "suite.yaml")


def test_an_unknown_option_may_be_a_key_to_set(here: Path) -> None:
    said = refused("bench", "--passes", "2")
    assert said.startswith("No such option '--passes'.")
    assert said.endswith("\nif it is a key of a suite: --set KEY=VALUE (weighin help suite)")


def test_keys_to_set_are_keys_in_the_file_too(asked: Measured) -> None:
    write("[tool.weighin]\nset = ['seed=7']\n")
    assert "unknown key" in refused("bench", "gpt2-tiny")
    write("[tool.weighin.bench]\nenv = ['A=1']\n")
    assert "tool.weighin.bench.env: unknown key" in refused("bench", "gpt2-tiny")


def test_a_time_out_in_the_file_does_not_end_a_command_whose_floor_is_searched(
    asked: Measured,
) -> None:
    before, _ = asked("floor", "--", "true")
    write("[tool.weighin]\ntimeout = 60\n")
    assert asked("floor", "--", "true")[0].timeout_s == before.timeout_s


def test_two_models_to_set_are_two_models(asked: Measured) -> None:
    assert models(asked("bench", "--set", "models=gpt2-tiny,tied-tiny")[0]) == [
        "gpt2-tiny",
        "tied-tiny",
    ]


def test_a_wrong_value_in_the_table_of_a_verb_names_this_table(here: Path) -> None:
    write('[tool.weighin.predict]\ndtype = "x"\n')
    place = "pyproject.toml: tool.weighin.predict.dtype: "
    assert refused("predict", "gpt2-tiny").startswith(place)
    write("[tool.weighin]\nseed = 1\n[tool.weighin.predict]\nseed = 'x'\n")
    assert refused("predict", "gpt2-tiny").startswith("pyproject.toml: tool.weighin.predict.seed: ")


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        (
            '[tool.weighin.run]\nenv = {A = "x=1"}',
            "run.env",
            "not a text, a number, or a list of them, but",
        ),
        (
            "[tool.weighin.recommend]\nall = 3",
            "recommend.all",
            "not true or false, but 3\nwrite true or false",
        ),
        (
            "[tool.weighin.recommend]\nallow = true",
            "recommend.allow",
            "not a text, a number, or a list",
        ),
        (
            "[tool.weighin.run]\nname = [[1]]",
            "run.name",
            "not a text, a number, or a list of them, but",
        ),
    ],
)
def test_a_wrong_kind_of_value_of_any_option_names_the_file(
    here: Path, text: str, key: str, why: str
) -> None:
    write(text)
    assert refused("list").startswith(f"pyproject.toml: tool.weighin.{key}: {why}")
