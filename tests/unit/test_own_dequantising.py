"""bitsandbytes, GPTQ and AWQ: weighin's weights equal a plain dequantisation, and the packages' own."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from plain_dequantisation import (
    Dequantise,
    expected,
    plain_awq,
    plain_gptq,
    plain_int8,
    plain_nf4,
)
from quantised_folders import (
    GROUP_SIZE,
    State,
    awq,
    bitsandbytes_int8,
    bitsandbytes_nested,
    bitsandbytes_nf4,
    gptq,
)
from safetensors.torch import load_file, save_file

from weighin import load_pretrained
from weighin.cli.app import app
from weighin.errors import CheckpointError
from weighin.models.pretrained import pretrained_class

Pack = Callable[[str, torch.Tensor], State]

QWEN: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 101, "tie_word_embeddings": True,
}  # fmt: skip
GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 37, "n_positions": 8}
MIXTURE: dict[str, Any] = QWEN | {
    "moe_intermediate_size": 64, "num_experts": 3, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def gptq_config(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP_SIZE, **more}


EIGHT_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}
FOUR_BITS = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm"}
METHODS: dict[str, tuple[Pack, dict[str, Any], Dequantise]] = {
    "int8": (bitsandbytes_int8, EIGHT_BITS, plain_int8),
    "nf4": (bitsandbytes_nf4, FOUR_BITS, plain_nf4),
    "nf4, nested": (bitsandbytes_nested, FOUR_BITS, plain_nf4),
    "awq": (awq, AWQ, plain_awq),
    "gptq": (gptq, gptq_config(), plain_gptq(4, 1)),
    "gptq, in the order of activations": (
        lambda name, matrix: gptq(name, matrix, in_order=False),
        gptq_config(desc_act=True),
        plain_gptq(4, 1),
    ),
} | {
    f"gptq_v2, {bits} bits": (
        lambda name, matrix, bits=bits: gptq(name, matrix, bits),  # type: ignore[misc]
        gptq_config(bits, checkpoint_format="gptq_v2"),
        plain_gptq(bits, 0),
    )
    for bits in (2, 3, 4, 8)
}


def write(
    folder: Path,
    kind: str,
    settings: dict[str, Any],
    pack: Pack,
    quantization: dict[str, Any],
    chosen: Callable[[str], bool] = lambda name: name.endswith("_proj.weight"),
) -> Path:
    """Write the folder of a random model in bfloat16; its chosen matrices are codes."""
    made = pretrained_class(kind)
    torch.manual_seed(0)
    model = made(made.config_class(**settings)).to(torch.bfloat16)
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value)
    model.save_pretrained(folder)
    state: State = {}
    for name, value in load_file(folder / "model.safetensors").items():
        matrix = (
            value.float().t().contiguous()
            if kind == "GPT2LMHeadModel" and value.ndim == 2
            else value.float()
        )
        coded = pack(name.removesuffix(".weight"), matrix) if chosen(name) else {name: value}
        state |= coded
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [kind], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in METHODS),
        *((name, torch.float32) for name in ("int8", "nf4", "awq", "gptq")),
    ],
)
def test_weights_equal_a_plain_dequantisation(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pack, quantization, plain = METHODS[name]
    folder = write(tmp_path, "Qwen2ForCausalLM", QWEN, pack, quantization)
    model = load_pretrained(folder, dtype=dtype)
    state, wanted = model.state_dict(), expected(folder, plain, dtype)
    assert len(wanted) == 14
    for key, value in wanted.items():
        assert state[key].dtype == dtype, key
        assert torch.equal(state[key], value), key
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    stored = load_file(folder / "model.safetensors")
    for key in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.bias"):
        assert torch.equal(state[key].float(), stored[key].to(state[key].dtype).float()), key
    assert not hasattr(model, "hf_quantizer")
    assert model.is_quantized is False
    assert "quantization_config" not in model.config.to_dict()


@pytest.mark.parametrize("name", ["int8", "nf4, nested", "gptq", "awq"])
def test_large_matrices_are_equal_though_they_are_converted_in_steps(
    name: str, tmp_path: Path
) -> None:
    pack, quantization, plain = METHODS[name]
    large = QWEN | {"hidden_size": 512, "intermediate_size": 1056, "num_hidden_layers": 1}
    folder = write(tmp_path, "Qwen2ForCausalLM", large, pack, quantization)
    state = load_pretrained(folder).state_dict()
    for key, value in expected(folder, plain, torch.bfloat16).items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("width", [30, 96])
def test_blocks_of_nf4_that_end_inside_a_row_are_equal(width: int, tmp_path: Path) -> None:
    odd = QWEN | {"intermediate_size": width}
    folder = write(tmp_path, "Qwen2ForCausalLM", odd, bitsandbytes_nested, FOUR_BITS)
    state = load_pretrained(folder).state_dict()
    for key, value in expected(folder, plain_nf4, torch.bfloat16).items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("name", ["int8", "nf4", "gptq", "awq"])
def test_the_transposed_matrices_of_gpt2_are_equal(name: str, tmp_path: Path) -> None:
    pack, quantization, plain = METHODS[name]

    def chosen(key: str) -> bool:
        return key.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))

    folder = write(tmp_path, "GPT2LMHeadModel", GPT2, pack, quantization, chosen)
    state = load_pretrained(folder).state_dict()
    wanted = expected(folder, plain, torch.bfloat16)
    assert len(wanted) == 4
    for key, value in wanted.items():
        assert torch.equal(state[key], value.t()), key


@pytest.mark.parametrize("name", ["int8", "nf4, nested", "gptq", "awq"])
def test_experts_are_dequantised_and_stacked(name: str, tmp_path: Path) -> None:
    pack, quantization, plain = METHODS[name]
    folder = write(tmp_path, "Qwen3MoeForCausalLM", MIXTURE, pack, quantization)
    state, wanted = load_pretrained(folder).state_dict(), expected(folder, plain, torch.bfloat16)
    experts = "model.layers.1.mlp.experts"
    for number in range(3):
        parts = [wanted[f"{experts}.{number}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(state[f"{experts}.gate_up_proj"][number], torch.cat(parts))
        down = wanted[f"{experts}.{number}.down_proj.weight"]
        assert torch.equal(state[f"{experts}.down_proj"][number], down)


@pytest.mark.parametrize("name", ["nf4", "gptq"])
def test_a_conversion_to_the_keys_of_the_model_writes_the_weights(
    name: str, tmp_path: Path
) -> None:
    pack, quantization, _ = METHODS[name]
    folder = write(tmp_path / "folder", "Qwen2ForCausalLM", QWEN, pack, quantization)
    target = tmp_path / "weights.safetensors"
    options = ["--keys", "model", "--verify"]
    result = CliRunner().invoke(app, ["convert", str(folder), str(target), *options])
    assert result.exit_code == 0, result.output
    written, wanted = load_file(target), load_pretrained(folder).state_dict()
    assert wanted.keys() - written.keys() == {"lm_head.weight"}  # tied
    assert all(torch.equal(value, wanted[key]) for key, value in written.items())


@pytest.mark.parametrize(
    "quantization",
    [
        AWQ | {"version": "gemv"},
        AWQ | {"backend": "llm-awq"},
        AWQ | {"bits": 8},
        gptq_config(checkpoint_format="marlin"),
        gptq_config(5),
    ],
)
def test_other_layouts_are_refused_by_name(quantization: dict[str, Any], tmp_path: Path) -> None:
    method = quantization["quant_method"]
    pack = awq if method == "awq" else gptq
    folder = write(tmp_path, "Qwen2ForCausalLM", QWEN, pack, quantization)
    with pytest.raises(CheckpointError, match=rf"quantised with {method} .*does not dequantise"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "end", "broken"),
    [
        ("gptq", "g_idx", lambda value: value + 99),
        ("gptq", "qzeros", lambda value: value[:, :1]),
        ("awq", "scales", lambda value: value[:, :8]),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda value: value[:-3]),
        ("nf4", "weight.absmax", lambda value: value[:1]),
        ("int8", "SCB", lambda value: value[:3]),
        ("int8", "weight_format", lambda value: value + 2),
    ],
)
def test_damaged_tables_are_refused(
    name: str, end: str, broken: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    pack, quantization, _ = METHODS[name]
    folder = write(tmp_path, "Qwen2ForCausalLM", QWEN, pack, quantization)
    state = load_file(folder / "model.safetensors")
    key = f"model.layers.0.mlp.up_proj.{end}"
    save_file(state | {key: broken(state[key]).contiguous()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the codes of model\.layers\.0\.mlp\.up_proj"):
        load_pretrained(folder)


@pytest.mark.filterwarnings("ignore")  # of from_pretrained, about the modules
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "nf4", "nf4, nested"])
def test_weights_equal_those_of_bitsandbytes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pack, quantization, _ = METHODS[name]
    folder = write(tmp_path, "Qwen2ForCausalLM", QWEN, pack, quantization)
    kind = pretrained_class("Qwen2ForCausalLM")
    wanted = kind.from_pretrained(folder, dtype=dtype).dequantize()
    found = load_pretrained(folder, dtype=dtype)
    assert found.config.to_dict() == wanted.config.to_dict()
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype, key
        assert torch.equal(ours[key], value), key


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in METHODS if name.startswith(("gptq", "awq"))])
def test_weights_equal_those_of_gptqmodel(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    awq_values: Any = import_module("gptqmodel.quantization.awq.utils.packing_utils")
    gptq_values: Any = import_module("gptqmodel.utils.model_dequant")

    pack, quantization, _ = METHODS[name]
    folder = write(tmp_path, "Qwen2ForCausalLM", QWEN, pack, quantization)
    file = folder / "model.safetensors"
    for dtype in DTYPES if name != "awq" else (torch.float16,):
        state = load_pretrained(folder, dtype=dtype).state_dict()
        if name == "awq":
            stored = load_file(file)
            wanted = {}
            for key in stored:
                if key.endswith(".qweight"):
                    at = key.removesuffix("qweight")
                    tables = (stored[f"{at}{end}"] for end in ("qweight", "qzeros", "scales"))
                    wanted[f"{at}weight"] = awq_values.dequantize_gemm(*tables, 4, GROUP_SIZE).t()
        else:
            wanted = gptq_values.convert_gptq_file(file, dtype, quantization, "cpu")
        assert all(torch.equal(state[key], value) for key, value in wanted.items())
