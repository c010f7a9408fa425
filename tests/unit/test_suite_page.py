"""The models of a suite: their names, arguments, weights, and the part of a checkpoint that they select."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from factories import refused
from torch import save, zeros

from weighin.settings.definition import Settings, check_suite
from weighin.stream.pretrained_library import WHOLE, Selection
from weighin.suite.chosen_models import choose

OF_SUITE = "{name: mine, builder: 'nets:build', checkpoint: w.pt%s}"


def suite(models: str, **typed: Any) -> Settings:
    return check_suite({"models": yaml.safe_load(models)}).model_copy(update=typed)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a builder and weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("def build(width=8): ...\n")
    save({"weight": zeros(2)}, "w.pt")
    return tmp_path


def test_models_of_a_suite_are_named_and_have_arguments_of_their_own() -> None:
    wide = "{name: wide, builder: 'nets:build', kwargs: {width: 512}}"
    chosen = choose(suite(f"[gpt2-tiny, {wide}, {wide.replace('wide', 'narrow', 1)}]"))
    assert [(one.title, one.builder) for one in chosen.specs[1:]] == [
        ("wide", "nets:build"),
        ("narrow", "nets:build"),
    ]
    assert (chosen.specs[0].name, chosen.specs[1].kwargs) == ("gpt2-tiny", {"width": 512})
    assert chosen.checkpoint is None


def test_weights_of_a_model_of_a_suite(here: Path) -> None:
    assert choose(suite(OF_SUITE % "")).checkpoint == Path("w.pt")
    (here / "w.pt").rename(here / "x.pt")
    typed = suite(OF_SUITE % "", checkpoint=Path("x.pt"))
    assert choose(typed).checkpoint == Path("x.pt")


def test_a_model_of_a_suite_selects_the_weights_in_its_checkpoint() -> None:
    part = OF_SUITE % ", key: state.net, strip_prefix: module."
    assert choose(suite(part)).selection == Selection("state.net", "module.")
    for models in (OF_SUITE % "", part):
        assert choose(suite(models, key="ema")).selection == Selection("ema")
    assert choose(suite(OF_SUITE % "")).selection == WHOLE


KEYED = "{name: mine, builder: 'nets:build', key: model}"


@pytest.mark.parametrize(
    ("models", "typed", "said"),
    [
        (KEYED, {}, "key and strip_prefix select weights in your own checkpoint, but none is given\n"),
        ("gpt2-tiny", {"key": "ema"}, "key and strip_prefix select weights in your own checkpoint, but none is given\n"),
        (f"[gpt2-tiny, {KEYED}]", {}, "the models of the suite select different parts of a checkpoint (key, strip_prefix)"),
    ],
    ids=["no checkpoint", "typed without one", "two parts"],
)  # fmt: skip
def test_a_selection_that_a_suite_cannot_make(
    models: str, typed: dict[str, Any], said: str
) -> None:
    assert refused(choose, suite(models, **typed)).startswith(said)
