"""The page of suite files has examples that are suites, and models of a suite are what they say."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from weighin.errors import ConfigError
from weighin.settings.definition import (
    COMMANDS,
    Settings,
    check_suite,
    read_suite,
)
from weighin.stream.pretrained_library import WHOLE, Selection
from weighin.suite.chosen_models import choose

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "suites.md"


def test_the_examples_are_suites(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    mine, commands = examples
    path = tmp_path / "suite.yaml"
    path.write_text(mine)
    assert len(read_suite(path).models) == 3
    path.write_text(commands)
    train, load = read_suite(path, COMMANDS).commands
    assert train.command == ["python", "train.py", "--epochs", "1"]
    assert train.marks == [r"epoch \d+"]
    assert (load.cold, load.environment) == (["weights.pt"], {"OMP_NUM_THREADS": "1"})


def suite(text: str) -> Settings:
    return check_suite(yaml.safe_load(text))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a builder and weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("def build(width=8): ...\n")
    torch.save({"weight": torch.zeros(2)}, "w.pt")
    return tmp_path


def test_models_of_a_suite_are_named_and_have_arguments_of_their_own(here: Path) -> None:
    asked = suite(
        "models:\n  - gpt2-tiny\n"
        "  - {name: narrow, builder: 'nets:build', kwargs: {width: 64}}\n"
        "  - {name: wide, builder: 'nets:build', kwargs: {width: 512}}\n"
    )
    chosen = choose(asked)
    tiny, *own = chosen.specs
    assert tiny.name == "gpt2-tiny"
    assert [(one.title, one.builder, one.kwargs) for one in own] == [
        ("narrow", "nets:build", {"width": 64}),
        ("wide", "nets:build", {"width": 512}),
    ]
    assert chosen.checkpoint is None


def test_weights_of_a_model_of_a_suite(here: Path) -> None:
    asked = suite("models: {name: mine, builder: 'nets:build', checkpoint: w.pt}")
    assert choose(asked).checkpoint == Path("w.pt")
    (here / "w.pt").rename(here / "x.pt")
    typed = choose(asked.model_copy(update={"checkpoint": Path("x.pt")}))
    assert typed.checkpoint == Path("x.pt")


NO_CHECKPOINT = (
    "key and strip_prefix select weights in your own checkpoint, but none is given\nadd --checkpoint"
    " PATH (checkpoint: PATH of a suite's model), or leave them out"
)
TRAINED = "name: mine, builder: 'nets:build', checkpoint: w.pt"


def test_a_model_of_a_suite_selects_the_weights_in_its_checkpoint(here: Path) -> None:
    entry = f"{{{TRAINED}, key: state.net, strip_prefix: module.}}"
    assert choose(suite(f"models: {entry}")).selection == Selection("state.net", "module.")
    whole = suite(f"models: {{{TRAINED}}}")
    for asked in (whole, suite(f"models: {entry}")):
        assert choose(asked.model_copy(update={"key": "ema"})).selection == Selection("ema")
    assert choose(whole).selection == WHOLE


@pytest.mark.parametrize(
    ("models", "typed", "text"),
    [
        (
            "{name: mine, builder: 'nets:build', key: model}",
            WHOLE,
            NO_CHECKPOINT,
        ),
        (
            "[gpt2-tiny, {name: mine, builder: 'nets:build', key: model}]",
            WHOLE,
            "the models of the suite select different parts of a checkpoint (key, strip_prefix), but a run reads one part of one checkpoint\n"
            "give all models the same key and strip_prefix, or write a suite file for each model",
        ),
        (
            "gpt2-tiny",
            Selection("ema"),
            NO_CHECKPOINT,
        ),
    ],
)
def test_a_selection_that_a_suite_cannot_make(
    here: Path, models: str, typed: Selection, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        typed_too = {"key": typed.key, "strip_prefix": typed.strip_prefix}
        choose(suite(f"models: {models}").model_copy(update=typed_too))
    assert str(caught.value) == text
