"""The help of the command line: what each verb does, examples to paste, and whole words."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from weighin import __version__
from weighin.cli import app
from weighin.cli._verb import Verb
from weighin.errors import CheckpointError
from weighin.settings.definition import COMMANDS, KEYS, MODELS


def _verbs() -> dict[tuple[str, ...], click.Command]:
    cache = app.app.commands["cache"]
    assert isinstance(cache, click.Group)
    single = {(name,): verb for name, verb in app.app.commands.items() if name != "cache"}
    return single | {("cache", name): verb for name, verb in cache.commands.items()}


VERBS = _verbs()
ORDER = "doctor list bench run floor report compare check history recommend predict inspect convert cache"
PANELS = ["Before a run", "Measure", "Read and compare", "Choose", "Checkpoints"]


def shown(*arguments: str, columns: int = 80) -> tuple[int, str]:
    """The exit code, and what a terminal of that width without colours shows."""
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    result = CliRunner().invoke(app.app, arguments, env=environment)
    return result.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", result.output)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_each_example_is_one_line_to_paste(verb: tuple[str, ...]) -> None:
    _, text = shown(*verb, "--help")
    command = VERBS[verb]
    assert isinstance(command, Verb)
    found = [line.strip() for line in text.splitlines() if line.startswith("    weighin ")]
    assert found == [*command.examples.values()]


def test_the_help_of_bench_fits_on_two_screens_of_44_lines() -> None:
    _, text = shown("bench", "--help", columns=100)
    assert len(text.splitlines()) <= 88
    headings = re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE)
    assert headings == [
        *("Examples", "Arguments", "What to load", "Limits", "How to measure", "Where to write"),
        "Options",
    ]


def test_the_help_of_suites_has_every_key() -> None:
    _, text = shown("help", "suite")
    keys = re.findall(r"^(\w+)  ", text, re.MULTILINE)
    assert {*keys} == {*KEYS[MODELS], *KEYS[COMMANDS]}


@pytest.mark.parametrize("verb", [(), *VERBS], ids=" ".join)
def test_no_word_of_the_help_is_broken_at_60_columns(verb: tuple[str, ...]) -> None:
    _, wide = shown(*verb, "--help", columns=300)
    _, narrow = shown(*verb, "--help", columns=60)
    # An example stands in one line, which the terminal wraps: so it can be pasted.
    lines = [line for line in narrow.splitlines() if not line.startswith("    weighin ")]
    assert max(map(len, lines)) <= 60
    assert narrow.split() == wide.split()


def test_the_verbs_stand_in_the_order_of_work_in_named_panels() -> None:
    _, text = shown("--help")
    headings = re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE)
    assert headings == ["Options", *PANELS]
    _, _, listed = text.partition(f"{PANELS[0]}:\n")
    assert re.findall(r"^  ([a-z]+)  ", listed, re.MULTILINE) == ORDER.split()


def test_every_verb_is_in_a_panel() -> None:
    assert list(app.app.commands) == ORDER.split()


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_writes_json_in_the_same_way(verb: tuple[str, ...]) -> None:
    words = " ".join(shown(*verb, "--help")[1].split())
    assert "--json FILE Write the result as JSON to this file; with -, print it" in words


@pytest.mark.parametrize("verb", [(), *VERBS], ids=" ".join)
def test_help_and_h_show_what_the_long_option_shows(verb: tuple[str, ...]) -> None:
    whole = shown(*verb, "--help")
    assert whole[0] == 0
    assert shown("help", *verb) == shown(*verb, "-h") == whole


def test_help_for_a_verb_that_does_not_exist() -> None:
    code, text = shown("help", "bnech")
    assert code == 2
    assert "No such command 'bnech'" in text
    assert "bench" in text


def test_the_version() -> None:
    assert shown("--version") == (0, f"weighin {__version__}\n")


def test_a_verb_that_does_not_exist() -> None:
    code, text = shown("bnech")
    assert code == 2
    assert "No such command 'bnech'" in text
    assert "bench" in text


def test_weighin_alone_shows_the_verbs() -> None:
    _, text = shown()
    assert all(f"  {verb[0]} " in text for verb in VERBS)


@pytest.mark.parametrize("verb", ["bench", "floor", "predict", "recommend", "inspect"])
def test_every_verb_of_a_model_takes_the_same_argument(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (argument,) = [one for one in app.app.commands[verb].params if one.name == "model"]
    assert isinstance(argument, click.Argument)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    for typed, message in (
        ("./gone.pt", "./gone.pt: no such file or folder"),
        ("from:gone.pt", "gone.pt: no such file or folder"),
        ("lora", "lora: an adapter, not a whole model"),
    ):
        for words in ([typed], ["--model", typed]):
            error = CliRunner().invoke(app.app, [verb, *words]).exception
            assert isinstance(error, CheckpointError)
            assert error.message == message
