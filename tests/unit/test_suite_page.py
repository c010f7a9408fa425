"""The models of a suite: their names, arguments, weights, and the part of a checkpoint that they select."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import save, zeros

from weighin.settings.definition import Settings, check_suite
from weighin.stream.pretrained_library import WHOLE, Selection
from weighin.suite.chosen_models import choose

OF_SUITE = "{name: mine, builder: 'nets:build', checkpoint: w.pt%s}"


def suite(models: str, **typed: Any) -> Settings:
    return check_suite({"models": yaml.safe_load(models)}).model_copy(update=typed)


@pytest.fixture(autouse=True)
def _builder_and_weights(here: Path) -> None:
    (here / "nets.py").write_text("def build(width=8): ...\n")
    save({"weight": zeros(2)}, "w.pt")


def test_models_of_a_suite_are_named_and_have_arguments_of_their_own() -> None:
    wide = "{name: wide, builder: 'nets:build', kwargs: {width: 512}}"
    chosen = choose(suite(f"[gpt2-tiny, {wide}, {wide.replace('wide', 'narrow', 1)}]"))
    titled = [(one.title, one.builder) for one in chosen.specs[1:]]
    assert titled == [("wide", "nets:build"), ("narrow", "nets:build")]
    assert (chosen.specs[0].name, chosen.specs[1].kwargs) == ("gpt2-tiny", {"width": 512})
    assert chosen.checkpoint is None


def test_weights_of_a_model_of_a_suite(here: Path) -> None:
    assert choose(suite(OF_SUITE % "")).checkpoint == Path("w.pt")
    (here / "w.pt").rename(here / "x.pt")
    assert choose(suite(OF_SUITE % "", checkpoint=Path("x.pt"))).checkpoint == Path("x.pt")


def test_a_model_of_a_suite_selects_the_weights_in_its_checkpoint() -> None:
    part = OF_SUITE % ", key: state.net, strip_prefix: module."
    assert choose(suite(part)).selection == Selection("state.net", "module.")
    for models in (OF_SUITE % "", part):
        assert choose(suite(models, key="ema")).selection == Selection("ema")
    assert choose(suite(OF_SUITE % "")).selection == WHOLE
