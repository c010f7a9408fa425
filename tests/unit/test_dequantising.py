"""Quantised folders: weighin's weights equal those of from_pretrained(dequantize=True), bit by bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from model_differences import differences
from quantised_folders import State, write_folder
from safetensors.torch import load_file, save_file

from weighin import load_pretrained
from weighin.models.pretrained import arguments_to_dequantise, pretrained_class

pytestmark = pytest.mark.filterwarnings("ignore")  # of from_pretrained, about the configuration


def is_equal(folder: Path) -> dict[str, torch.Tensor]:
    """Compare both loads in every tensor, and return weighin's."""
    config = json.loads((folder / "config.json").read_text())
    arguments = arguments_to_dequantise(folder / "model.safetensors")
    assert arguments["quantization_config"].dequantize
    kind = pretrained_class(config["architectures"][0])
    wanted, found = kind.from_pretrained(folder, dtype="auto", **arguments), load_pretrained(folder)
    assert found.config.to_dict() == wanted.config.to_dict()
    assert not hasattr(found, "hf_quantizer")
    assert found.is_quantized is False
    assert differences(found, wanted, tensors_only=True) == []
    return dict(found.state_dict())


def write(folder: Path, kind: str, settings: dict[str, Any], scales: str = "blocks") -> Path:
    """Write the folder of a random model, whose matrices of projections are codes."""
    made = pretrained_class(kind)
    torch.manual_seed(0)
    model = made(made.config_class(**settings)).to(torch.bfloat16)
    model.save_pretrained(folder)
    state: State = {}
    for name, value in load_file(folder / "model.safetensors").items():
        packs = name.endswith("_proj.weight")
        state |= (
            fp8(name.removesuffix(".weight"), value.float(), scales) if packs else {name: value}
        )
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [kind], "quantization_config": FP8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fp8(name: str, matrix: torch.Tensor, of: str) -> State:
    """Return codes of fp8, with random scales of blocks of 128 x 128, of channels, or of the whole matrix."""
    rows, columns = matrix.shape
    shape = {"blocks": (-(-rows // 128), -(-columns // 128)), "channels": (rows, 1), "one": (1, 1)}
    codes = (matrix * 4000).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(shape[of]) * 1e-3 + 1e-4
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QWEN: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 101, "tie_word_embeddings": True,
}  # fmt: skip
MIXTURE = {
    "moe_intermediate_size": 128, "num_experts": 5, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}  # fmt: skip


# Each method in other dtypes and sizes, also with a smaller last block, is drawn by tests/checkpoints/conversions.py.


@pytest.mark.parametrize("kind", ["Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("scales", ["blocks", "channels", "one"])
def test_fp8_is_equal_with_ties_biases_and_experts(scales: str, kind: str, tmp_path: Path) -> None:
    state = is_equal(write(tmp_path, kind, QWEN | MIXTURE, scales))
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    if kind == "Qwen2ForCausalLM":
        assert "model.layers.0.self_attn.q_proj.bias" in state
    else:
        assert state["model.layers.0.mlp.experts.gate_up_proj"].shape == (5, 256, 256)


def test_weights_that_are_no_codes_keep_the_dtypes_of_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen2ForCausalLM", QWEN)
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"].float()
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].half()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    found = is_equal(folder)
    assert found["model.norm.weight"].dtype is torch.float32
    assert found["lm_head.weight"].dtype is torch.float16


def test_codes_without_their_scales_beside_them_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "compressed fp8")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": FP8}
    (folder / "config.json").write_text(json.dumps(config))
    assert "mean nothing without this scale" in refused(load_pretrained, folder)
