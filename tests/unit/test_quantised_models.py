"""Small models with quantised weights and scales, as published: no strategy converts their tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import planned
from worker_jobs import checked_load

from weighin.cell import ModelSpec
from weighin.checkpoint import truth
from weighin.checkpoint.manifest import Manifest
from weighin.predict.client import predict
from weighin.stream import formats
from weighin.suite import registry


def model(name: str, tensors: dict[str, list[Any]]) -> ModelSpec:
    table = {"dtype": "bfloat16", "tensors": tensors}
    return ModelSpec(name, "weighin.models.synthesised:from_table", table)


GPT_OSS = model("small-gpt-oss", {
    "model.embed_tokens.weight": [50, 64],
    "model.layers.{0..1}.self_attn.{q,k,v}_proj.weight": [32, 64],
    "model.layers.{0..1}.self_attn.sinks": [4],
    "model.layers.{0..1}.mlp.experts.{gate_up,down}_proj_blocks": ["uint8", 3, 64, 3, 16],
    "model.layers.{0..1}.mlp.experts.{gate_up,down}_proj_scales": ["uint8", 3, 64, 3],
    "model.layers.{0..1}.mlp.experts.{gate_up,down}_proj_bias": [3, 64],
    "{model.norm,lm_head}.weight": [50, 64],
})  # fmt: skip
DEEPSEEK = model("small-deepseek", {
    "model.embed_tokens.weight": [50, 160],
    "model.layers.{0..1}.mlp.experts.{0..1}.down_proj.weight": ["float8_e4m3fn", 160, 96],
    "model.layers.{0..1}.mlp.experts.{0..1}.down_proj.weight_scale_inv": ["float32", 2, 1],
    "model.layers.{0..1}.mlp.gate.weight": [2, 160],
    "model.layers.{0..1}.mlp.gate.e_score_correction_bias": ["float32", 2],
    "{model.norm,lm_head}.weight": [50, 160],
})  # fmt: skip
KEPT = {
    GPT_OSS.name: {"model.layers.1.mlp.experts.down_proj_blocks": torch.uint8, "model.layers.1.mlp.experts.down_proj_scales": torch.uint8},
    DEEPSEEK.name: {
        "model.layers.1.mlp.experts.1.down_proj.weight": torch.float8_e4m3fn,
        "model.layers.1.mlp.experts.1.down_proj.weight_scale_inv": torch.float32,
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.float32,
    },
}  # fmt: skip
"""Tensors of each model that keep their dtype in every load."""

pytestmark = pytest.mark.usefixtures("torch_threads_restored")
both = pytest.mark.parametrize("spec", [GPT_OSS, DEEPSEEK], ids=lambda spec: spec.name)


def made(spec: ModelSpec, folder: Path, fmt: str) -> Manifest:
    (folder / fmt).mkdir()
    return truth.make(spec, seed=0, fmt=fmt, folder=folder / fmt)


@both
def test_a_checkpoint_of_ones_own_is_verified_in_the_same_dtypes(
    tmp_path: Path, spec: ModelSpec
) -> None:
    generated = made(spec, tmp_path, "pt")
    own = formats.checkpoint_in(tmp_path / "pt", "pt")
    for fmt in ("pt", "safetensors"):
        (folder := tmp_path / f"own-{fmt}").mkdir()
        found = truth.index(spec, checkpoint=own, fmt=fmt, folder=folder)
        assert found.tensors == generated.tensors
    path = formats.checkpoint_in(tmp_path / "own-safetensors", "safetensors")
    tensors = checked_load(spec, path, generated, torch.bfloat16, "streaming")
    assert {key: tensors[key].dtype for key in KEPT[spec.name]} == KEPT[spec.name]
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    first = tensors[next(iter(KEPT[spec.name]))].view(torch.uint8)
    assert len(first.unique()) > 50  # random: a wrong offset would be seen
    sizes = {id(tensor): tensor.nbytes for tensor in tensors.values()}
    assert generated.model_bytes("bfloat16") == sum(sizes.values())


def test_the_bytes_follow_from_the_seed_and_the_name(tmp_path: Path) -> None:
    first = {one.name: one.checksums for one in made(GPT_OSS, tmp_path, "pt").tensors}
    second = made(GPT_OSS, tmp_path, "per_param").tensors
    assert first == {one.name: one.checksums for one in second}
    scales = {value["uint8"] for name, value in first.items() if name.endswith("_scales")}
    assert len(scales) == 4


@both
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
