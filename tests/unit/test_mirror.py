"""A model that is nothing but a checkpoint's keys."""

from pathlib import Path

import pytest
import torch

from weighin.errors import CheckpointError
from weighin.models.mirror import mirror


def saved(folder: Path, state: dict[str, torch.Tensor]) -> str:
    path = folder / "weights.pt"
    torch.save(state, path)
    return str(path)


def test_every_key_is_a_parameter_or_a_buffer_of_its_shape_and_dtype(tmp_path: Path) -> None:
    state = {
        "blocks.0.weight": torch.randn(3, 5),
        "blocks.0.scale": torch.randn(5).to(torch.bfloat16),
        "blocks.1.weight": torch.randn(2),
        "steps": torch.tensor(7),
        "deep.down.mask": torch.ones(2, 2, dtype=torch.bool),
    }
    model = mirror(checkpoint=saved(tmp_path, state))
    assert set(dict(model.named_parameters())) == {name for name in state if name[0] == "b"}
    found = model.state_dict()
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (one.shape, one.dtype) for name, one in state.items()
    }
    model.load_state_dict(state)
    assert torch.equal(model.get_parameter("blocks.0.weight"), state["blocks.0.weight"])


def test_keys_that_share_a_storage_are_tied(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    state = {"first.weight": weight, "last.weight": weight, "other.weight": weight.clone()}
    model = mirror(checkpoint=saved(tmp_path, state))
    assert model.get_parameter("first.weight") is model.get_parameter("last.weight")
    assert model.get_parameter("first.weight") is not model.get_parameter("other.weight")


def test_views_of_one_storage_have_their_own_shapes(tmp_path: Path) -> None:
    whole = torch.randn(6)
    model = mirror(checkpoint=saved(tmp_path, {"whole": whole, "part": whole[:2]}))
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == {
        "whole": (6,),
        "part": (2,),
    }


def test_a_file_that_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_text("no")
    with pytest.raises(CheckpointError):
        mirror(checkpoint=str(path))
