"""Quantised folders: weighin's weights equal those of from_pretrained(dequantize=True), bit by bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_folders import State, write_folder
from safetensors.torch import load_file, save_file

from weighin import load_pretrained
from weighin.errors import CheckpointError
from weighin.models.pretrained import arguments_to_dequantise, pretrained_class

pytestmark = pytest.mark.filterwarnings("ignore")  # of from_pretrained, about the configuration

COMPRESSED = ("compressed fp8", "compressed int8", "compressed int4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_equal(folder: Path, dtype: torch.dtype | str = "auto") -> dict[str, torch.Tensor]:
    """Compare both loads in every tensor, and return weighin's."""
    config = json.loads((folder / "config.json").read_text())
    arguments = arguments_to_dequantise(folder / "model.safetensors")
    assert arguments["quantization_config"].dequantize
    kind = pretrained_class(config["architectures"][0])
    wanted = kind.from_pretrained(folder, dtype=dtype, **arguments)
    found = load_pretrained(folder, dtype=dtype)
    assert found.config.to_dict() == wanted.config.to_dict()
    assert not hasattr(found, "hf_quantizer")
    assert found.is_quantized is False
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name].float(), value.float()), name
        assert torch.isfinite(value.float()).all(), name
    return dict(ours)


def write(
    folder: Path, kind: str, settings: dict[str, Any], pack: Callable[[str, torch.Tensor], State],
    quantization: dict[str, Any],
) -> Path:  # fmt: skip
    """Write the folder of a random model, whose matrices of projections are codes."""
    made = pretrained_class(kind)
    torch.manual_seed(0)
    model = made(made.config_class(**settings)).to(torch.bfloat16)
    model.save_pretrained(folder)
    state: State = {}
    for name, value in load_file(folder / "model.safetensors").items():
        packs = name.endswith("_proj.weight")
        state |= pack(name.removesuffix(".weight"), value.float()) if packs else {name: value}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [kind], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fp8(shape: Callable[[int, int], tuple[int, ...]]) -> Callable[[str, torch.Tensor], State]:
    """Return the function that writes codes of fp8, with random scales of this shape."""

    def pack(name: str, matrix: torch.Tensor) -> State:
        scales = torch.rand(shape(*matrix.shape)) * 1e-3 + 1e-4
        codes = (matrix * 4000).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}

    return pack


def blocks(rows: int, columns: int) -> tuple[int, ...]:
    return -(-rows // 128), -(-columns // 128)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QWEN: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 101, "tie_word_embeddings": True,
}  # fmt: skip
SCALES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "blocks": blocks,
    "channels": lambda rows, _: (rows, 1),
    "one": lambda *_: (1, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_small_folders_are_equal_in_each_dtype(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    is_equal(write_folder(tmp_path / "folder", name), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_are_equal_where_their_package_is(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    is_equal(write_folder(tmp_path / "folder", name), dtype)


@pytest.mark.parametrize("scales", SCALES)
def test_fp8_is_equal_with_tied_embeddings_and_biases(scales: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen2ForCausalLM", QWEN, fp8(SCALES[scales]), FP8)
    state = is_equal(folder)
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert "model.layers.0.self_attn.q_proj.bias" in state


def test_matrices_smaller_than_a_block_are_equal(tmp_path: Path) -> None:
    odd = {"hidden_size": 96, "intermediate_size": 56, "head_dim": 20}
    is_equal(write(tmp_path, "Qwen2ForCausalLM", QWEN | odd, fp8(blocks), FP8))


def test_a_large_block_is_converted_in_several_steps(tmp_path: Path) -> None:
    large = {"hidden_size": 1024, "num_hidden_layers": 1, "intermediate_size": 640}
    is_equal(write(tmp_path, "Qwen2ForCausalLM", QWEN | large, fp8(blocks), FP8))


def test_weights_that_are_no_codes_keep_the_dtypes_of_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen2ForCausalLM", QWEN, fp8(blocks), FP8)
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"].float()
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].half()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    found = is_equal(folder)
    assert found["model.norm.weight"].dtype is torch.float32
    assert found["lm_head.weight"].dtype is torch.float16


MIXTURE = {
    "moe_intermediate_size": 128, "num_experts": 5, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize("scales", SCALES)
def test_experts_are_dequantised_and_stacked(scales: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3MoeForCausalLM", QWEN | MIXTURE, fp8(SCALES[scales]), FP8)
    names = load_file(folder / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.4.up_proj.weight_scale_inv" in names
    state = is_equal(folder)
    assert state["model.layers.0.mlp.experts.gate_up_proj"].shape == (5, 256, 256)


@pytest.mark.parametrize("kind", ["Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_codes_of_a_smaller_last_block_have_their_own_scale(kind: str, tmp_path: Path) -> None:
    odd = {"hidden_size": 288, "intermediate_size": 192, "moe_intermediate_size": 150}
    folder = write(tmp_path / "codes", kind, QWEN | MIXTURE | odd, fp8(blocks), FP8)
    state, plain = load_file(folder / "model.safetensors"), {}
    for name, value in state.items():
        if name.endswith("_scale_inv"):
            continue
        scales = state.get(f"{name}_scale_inv")
        plain[name] = (
            value if scales is None else (value.float() * in_full(scales, value)).bfloat16()
        )
    wanted = pretrained_class(kind).from_pretrained(_plain(folder, plain)).state_dict()
    found = load_pretrained(folder).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(one, found[name]) for name, one in wanted.items())


def in_full(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the scale of each code, in blocks of 128 x 128."""
    wide = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return wide[: codes.shape[0], : codes.shape[1]]


def _plain(folder: Path, state: State) -> Path:
    """Write the weights of a quantised folder as those of a folder that is not quantised."""
    made = folder.parent / "plain"
    made.mkdir()
    save_file(state, made / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_codes_without_their_scales_beside_them_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "compressed fp8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FP8
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="mean nothing without this scale"):
        load_pretrained(folder)
