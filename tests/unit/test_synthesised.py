"""A model without code, which has the tensors of a checkpoint."""

import base64
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from weighin.errors import CheckpointError, ConfigError
from weighin.models.synthesised import from_table, from_tensors
from weighin.stream.pretrained_library import Selection
from weighin.suite import registry


def model_of(folder: Path, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    torch.save(state, folder / "weights.pt")
    spec = registry.model(f"from:{folder}/weights.pt")
    assert (spec.title, spec.builder) == ("weights.pt", "weighin.models.synthesised:from_tensors")
    model = from_tensors(**spec.kwargs)
    assert set(model.state_dict()) == set(state)
    model.load_state_dict(state)
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)
    return model


def test_every_key_is_a_parameter_or_a_buffer_of_its_shape_and_dtype(tmp_path: Path) -> None:
    whole = torch.randn(6)
    state = {
        "blocks.0.weight": torch.randn(3, 5),
        "blocks.0.scale": torch.randn(5).to(torch.bfloat16),
        **{"blocks.whole": whole, "blocks.head": whole[:2], "blocks.empty": whole[:0]},
        "steps": torch.tensor(7),
        "deep.down.mask": torch.ones(2, 2, dtype=torch.bool),
    }
    model = model_of(tmp_path, state)
    assert set(dict(model.named_parameters())) == {name for name in state if name[0] == "b"}
    for name, tensor in model.state_dict().items():
        assert (tensor.shape, tensor.dtype) == (state[name].shape, state[name].dtype)
    names = ("type", "a.half.weight", "a.half", "training.forward", "_modules.x", "__class__.w")
    model_of(tmp_path, {name: torch.randn(2) for name in names})  # names that a module uses itself


def test_keys_at_one_place_are_tied(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    state = {"first.weight": weight, "last.weight": weight, "other.weight": weight.clone()}
    model = model_of(tmp_path, state)
    assert model.get_parameter("first.weight") is model.get_parameter("last.weight")
    assert model.get_parameter("first.weight") is not model.get_parameter("other.weight")


def test_a_part_of_a_training_checkpoint_is_a_model(tmp_path: Path) -> None:
    torch.save({"net": {"module.w": torch.zeros(3)}, "step": 4}, tmp_path / "train.pt")
    spec = registry.model(f"from:{tmp_path}/train.pt", None, Selection("net", "module."))
    assert [*from_tensors(**spec.kwargs).state_dict()] == ["w"]


def test_the_structure_of_a_large_model_is_short(tmp_path: Path) -> None:
    state = {
        f"model.layers.{n}.{part}.weight": torch.empty(1).expand(2, 3)
        for n in range(80)
        for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    }
    torch.save(state, tmp_path / "w.pt")
    assert len(registry.model(f"from:{tmp_path}/w.pt").kwargs["tensors"]) < 4096


@pytest.mark.parametrize(
    "text",
    ["", "no", "e30=", base64.b64encode(zlib.compress(b'[["a"],[0],[0],[["os",1]]]')).decode()],
)
def test_another_string_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a list of a checkpoint's tensors"):
        from_tensors(tensors=text)


def test_a_file_that_is_no_checkpoint_or_has_no_tensor_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "no.pt").write_text("no")
    torch.save({}, tmp_path / "empty.pt")
    for name in ("no", "empty", "gone"):
        with pytest.raises(CheckpointError):
            registry.model(f"from:{tmp_path}/{name}.pt")


def test_a_table_names_tensors_as_a_shell_does() -> None:
    table: dict[str, list[Any]] = {
        "layers.{0..1}.{k,v}.weight": [3, 2],
        "layers.1.codes": ["uint8", 4],
    }
    model = from_table(dtype="bfloat16", tensors=table)
    found = {name: (tuple(one.shape), one.dtype) for name, one in model.named_parameters()}
    weights = [f"layers.{number}.{name}.weight" for number in (0, 1) for name in "kv"]
    wanted = dict.fromkeys(weights, ((3, 2), torch.float32))
    assert found == wanted | {"layers.1.codes": ((4,), torch.uint8)}
    assert not model.training
