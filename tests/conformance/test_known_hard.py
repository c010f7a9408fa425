"""Test each case that is known to be difficult, with a builder and with a built model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import check
from cells import FORMATS, CheckpointError
from checkpoints import make
from known import KNOWN

from weighin import load_streaming


@pytest.mark.parametrize("built", [False, True], ids=["builder", "built"])
@pytest.mark.parametrize("behaviour", KNOWN)
def test_it_loads_as_torch_does(behaviour: str, built: bool, disk: Path) -> None:
    check(replace(KNOWN[behaviour], built=built), disk)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("behaviour", ["position tables", "GRU", "two parameters over one memory"])
def test_it_loads_as_torch_does_from_every_format(fmt: str, behaviour: str, disk: Path) -> None:
    case = KNOWN[behaviour]
    check(replace(case, checkpoint=replace(case.checkpoint, fmt=fmt)), disk)


def test_batch_norm_needs_its_count_where_the_checkpoint_has_metadata(disk: Path) -> None:
    case = KNOWN["batch norm of an old checkpoint"]
    state: Any
    path, state = make(case.recipe, replace(case.checkpoint, damage=None), disk)
    metadata = state._metadata
    state = type(state)(item for item in state.items() if "num_batches" not in item[0])
    state._metadata = metadata
    torch.save(state, path)
    model = case.recipe.prepare()[0]()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(torch.load(path, weights_only=True))
    with pytest.raises(CheckpointError, match="num_batches_tracked"):
        load_streaming(model, path)


def test_a_lazy_model_without_one_of_its_keys_is_refused(disk: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    state = model.state_dict()
    del state["running_mean"]
    torch.save(state, disk / "part.pt")
    with pytest.raises(CheckpointError, match=r"1 key missing \(running_mean\)"):
        load_streaming(torch.nn.LazyBatchNorm1d(), disk / "part.pt")
