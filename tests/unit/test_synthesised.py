"""A model without code, which has the tensors of a checkpoint."""

import base64
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import planned
from model_differences import state_differences
from worker_jobs import checked_load

from weighin.cell import ModelSpec
from weighin.checkpoint import generate
from weighin.checkpoint.manifest import Manifest
from weighin.errors import CheckpointError, ConfigError
from weighin.models.synthesised import from_table, from_tensors
from weighin.predict.client import predict
from weighin.stream import formats
from weighin.stream.pretrained_library import Selection
from weighin.suite import registry

pytestmark = pytest.mark.usefixtures("torch_threads_restored")


def model_of(folder: Path, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    torch.save(state, folder / "weights.pt")
    spec = registry.model(f"from:{folder}/weights.pt")
    assert (spec.title, spec.builder) == ("weights.pt", "weighin.models.synthesised:from_tensors")
    model = from_tensors(**spec.kwargs)
    model.load_state_dict(state)
    assert state_differences(model.state_dict(), state) == []
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
    with pytest.raises(ConfigError, match="does not describe the tensors of a checkpoint"):
        from_tensors(tensors=text)


def test_a_file_without_a_tensor_is_an_error(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "empty.pt")
    with pytest.raises(CheckpointError):
        registry.model(f"from:{tmp_path}/empty.pt")


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


# Quantised weights and scales, as published: no strategy converts them

GPT_OSS = {
    "model.embed_tokens.weight": [50, 64],
    "model.layers.{0..1}.self_attn.{q,k,v}_proj.weight": [32, 64],
    "model.layers.{0..1}.self_attn.sinks": [4],
    "model.layers.{0..1}.mlp.experts.{gate_up,down}_proj_blocks": ["uint8", 3, 64, 3, 16],
    "model.layers.{0..1}.mlp.experts.{gate_up,down}_proj_scales": ["uint8", 3, 64, 3],
    "model.layers.{0..1}.mlp.experts.{gate_up,down}_proj_bias": [3, 64],
    "{model.norm,lm_head}.weight": [50, 64],
}
DEEPSEEK = {
    "model.embed_tokens.weight": [50, 160],
    "model.layers.{0..1}.mlp.experts.{0..1}.down_proj.weight": ["float8_e4m3fn", 160, 96],
    "model.layers.{0..1}.mlp.experts.{0..1}.down_proj.weight_scale_inv": ["float32", 2, 1],
    "model.layers.{0..1}.mlp.gate.weight": [2, 160],
    "model.layers.{0..1}.mlp.gate.e_score_correction_bias": ["float32", 2],
    "{model.norm,lm_head}.weight": [50, 160],
}
KEPT = {
    "gpt-oss": {"experts.down_proj_blocks": torch.uint8, "experts.down_proj_scales": torch.uint8},
    "deepseek": {
        "experts.1.down_proj.weight": torch.float8_e4m3fn,
        "experts.1.down_proj.weight_scale_inv": torch.float32,
        "gate.e_score_correction_bias": torch.float32,
    },
}
"""Tensors in the MLP of the last layer of each model that keep their dtype in every load."""


@pytest.fixture(params=KEPT)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    tensors = {"gpt-oss": GPT_OSS, "deepseek": DEEPSEEK}[request.param]
    table = {"dtype": "bfloat16", "tensors": tensors}
    return ModelSpec(request.param, "weighin.models.synthesised:from_table", table)


def made(spec: ModelSpec, folder: Path, fmt: str) -> Manifest:
    (folder / fmt).mkdir()
    return generate.make(spec, seed=0, fmt=fmt, folder=folder / fmt)


def test_a_checkpoint_of_ones_own_is_verified_in_the_same_dtypes(
    tmp_path: Path, spec: ModelSpec
) -> None:
    generated = made(spec, tmp_path, "pt")
    own = formats.checkpoint_in(tmp_path / "pt", "pt")
    for fmt in ("pt", "safetensors"):
        (folder := tmp_path / f"own-{fmt}").mkdir()
        found = generate.index(spec, checkpoint=own, fmt=fmt, folder=folder)
        assert found.tensors == generated.tensors
    path = formats.checkpoint_in(tmp_path / "own-safetensors", "safetensors")
    tensors = checked_load(spec, path, generated, torch.bfloat16, "streaming")
    kept = {f"model.layers.1.mlp.{name}": dtype for name, dtype in KEPT[spec.name].items()}
    assert {key: tensors[key].dtype for key in kept} == kept
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    first = tensors[next(iter(kept))].view(torch.uint8)
    assert len(first.unique()) > 50  # random: a wrong offset would be seen
    sizes = {id(tensor): tensor.nbytes for tensor in tensors.values()}
    assert generated.model_bytes("bfloat16") == sum(sizes.values())


def test_the_bytes_follow_from_the_seed_and_the_name_alone(tmp_path: Path, spec: ModelSpec) -> None:
    first = {one.name: one.checksums for one in made(spec, tmp_path, "pt").tensors}
    assert first == {one.name: one.checksums for one in made(spec, tmp_path, "per_param").tensors}
    codes = {str(one) for name, one in first.items() if name.endswith(("_scales", "_scale_inv"))}
    assert len(codes) == 4  # two for each layer


def test_a_prediction_has_the_size_of_the_files(tmp_path: Path, spec: ModelSpec) -> None:
    manifest = made(spec, tmp_path, "safetensors")
    size_bytes = sum(one.bytes for one in manifest.tensors if one.shared_with is None)
    pairs = [
        (registry.strategy(name), dict[str, Any]()) for name in ("streaming", "safetensors_copy")
    ]
    cells = planned((spec,), pairs, dtypes={spec.title: "bfloat16"}, format=["safetensors"])
    for one in predict(cells):
        assert one.cannot == ""
        assert one.model_bytes == size_bytes
        assert one.disk_read_bytes == pytest.approx(size_bytes, abs=2 * 4096)  # in whole pages
