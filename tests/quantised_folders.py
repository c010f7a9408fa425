"""Hugging Face folders of a small model whose matrices are codes, named as the libraries name them.

The codes of the methods that weighin dequantises are real. Those of other libraries have the right names,
shapes and dtypes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

State = dict[str, torch.Tensor]
Pack = Callable[[str, torch.Tensor], State]
"""Returns the tensors that a library writes for the matrix of a module of this name."""

LLAMA: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "num_local_experts": 4,
    "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
GROUP_SIZE = 32
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip
"""bitsandbytes' table of nf4, in every file of such codes."""


def _fp8(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (matrix / scale).to(torch.float8_e4m3fn)


def _int8(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (matrix / scale).round().to(torch.int8)


def _of_rows(matrix: torch.Tensor, largest: int) -> torch.Tensor:
    return matrix.abs().amax(1, keepdim=True) / largest


def fp8_blocks(name: str, matrix: torch.Tensor) -> State:
    scale = matrix.abs().amax() / 448
    blocks = tuple(-(-size // 128) for size in matrix.shape)
    scales = scale * (1 + torch.rand(blocks))  # so that no two blocks can be exchanged unseen
    return {f"{name}.weight": _fp8(matrix, scale), f"{name}.weight_scale_inv": scales}


def fp8_channels(name: str, matrix: torch.Tensor) -> State:
    scale = _of_rows(matrix, 448)
    return {f"{name}.weight": _fp8(matrix, scale), f"{name}.weight_scale": scale.bfloat16()}


def int8_channels(name: str, matrix: torch.Tensor) -> State:
    scale = _of_rows(matrix, 127)
    return {f"{name}.weight": _int8(matrix, scale), f"{name}.weight_scale": scale.bfloat16()}


def int4_packed(name: str, matrix: torch.Tensor) -> State:
    grouped = matrix.reshape(matrix.shape[0], -1, GROUP_SIZE)
    scale = grouped.abs().amax(2) / 7
    codes = (grouped / scale[..., None]).round().clamp(-8, 7).reshape(matrix.shape).int() + 8
    packed = torch.zeros(matrix.shape[0], matrix.shape[1] // 8, dtype=torch.int32)
    for place in range(8):
        packed |= codes[:, place::8] << (4 * place)
    return {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": scale.to(torch.bfloat16),
        f"{name}.weight_shape": torch.tensor(matrix.shape),
    }


def bitsandbytes_int8(name: str, matrix: torch.Tensor) -> State:
    largest = matrix.abs().amax(1)
    return {
        f"{name}.weight": (matrix / largest[:, None] * 127).round().to(torch.int8),
        f"{name}.SCB": largest,
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def bitsandbytes_nf4(name: str, matrix: torch.Tensor) -> State:
    blocks = -(-matrix.numel() // 64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(matrix.shape)}
    return {
        f"{name}.weight": torch.randint(0, 256, (-(-matrix.numel() // 2), 1), dtype=torch.uint8),
        f"{name}.weight.absmax": torch.rand(blocks) / 50,
        f"{name}.weight.quant_map": NF4.clone(),
        f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }  # fmt: skip


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return words of 32 bits that hold the values of each column one after the other, lowest bits first."""
    stream = (values[:, None].long() >> torch.arange(bits).view(1, -1, 1)) & 1
    stream = stream.reshape(-1, 32, values.shape[1]) << torch.arange(32).view(1, -1, 1)
    return stream.sum(1).to(torch.int32)  # keeps the lowest 32 bits


def gptq(name: str, matrix: torch.Tensor, bits: int = 4, *, in_order: bool = True) -> State:
    rows, columns = matrix.shape
    groups = torch.arange(columns) // GROUP_SIZE
    count = int(groups[-1]) + 1
    zeros = torch.randint(0, 2**bits, (count, rows))
    return {
        f"{name}.qweight": packed(torch.randint(0, 2**bits, (columns, rows)), bits),
        f"{name}.qzeros": packed(zeros.t(), bits).t().contiguous(),
        f"{name}.scales": (torch.rand(count, rows) / 50).half(),
        f"{name}.g_idx": (groups if in_order else groups[torch.randperm(columns)]).int(),
    }


def awq(name: str, matrix: torch.Tensor) -> State:
    rows, columns = matrix.shape
    groups = columns // GROUP_SIZE

    def words(values: torch.Tensor) -> torch.Tensor:
        mixed = values.view(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
        return packed(mixed.t(), 4).t().contiguous()

    return {
        f"{name}.qweight": words(torch.randint(0, 16, (columns, rows))),
        f"{name}.qzeros": words(torch.randint(0, 16, (groups, rows))),
        f"{name}.scales": (torch.rand(groups, rows) / 50).half(),
    }


def nvfp4(name: str, matrix: torch.Tensor) -> State:
    rows, columns = matrix.shape
    return {
        f"{name}.weight": torch.zeros(rows, columns // 2, dtype=torch.uint8),
        f"{name}.weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
        f"{name}.weight_scale_2": torch.ones(()),
        f"{name}.input_scale": torch.ones(()),
    }


def quanto_int8(name: str, matrix: torch.Tensor) -> State:
    scale = _of_rows(matrix, 127)
    return {
        f"{name}.weight._data": _int8(matrix, scale), f"{name}.weight._scale": scale,
        f"{name}.input_scale": torch.ones(()), f"{name}.output_scale": torch.ones(()),
    }  # fmt: skip


def mlx(name: str, matrix: torch.Tensor) -> State:
    rows, columns = matrix.shape
    return {
        f"{name}.weight": torch.zeros(rows, columns // 8, dtype=torch.int32).view(torch.uint32),
        f"{name}.scales": torch.ones(rows, columns // GROUP_SIZE, dtype=torch.float16),
        f"{name}.biases": torch.zeros(rows, columns // GROUP_SIZE, dtype=torch.float16),
    }


def scaled_fp8(name: str, matrix: torch.Tensor) -> State:
    scale = matrix.abs().amax() / 448
    return {f"{name}.weight": _fp8(matrix, scale), f"{name}.scale_weight": scale.reshape(1)}


def hqq(name: str, matrix: torch.Tensor) -> State:
    groups = matrix.numel() // 64
    return {
        f"{name}.W_q": torch.zeros(matrix.numel() // 128, 64, dtype=torch.uint8),
        f"{name}.scale": torch.ones(groups, 1, dtype=torch.float16),
        f"{name}.zero": torch.zeros(groups, 1, dtype=torch.float16),
        f"{name}.shape": torch.tensor(matrix.shape),
    }


def mxfp4(name: str, stacked: torch.Tensor) -> State:
    experts, inputs, outputs = stacked.shape
    shape = (experts, outputs, inputs // 32)
    return {
        f"{name}_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8),
        f"{name}_scales": torch.full(shape, 120, dtype=torch.uint8),
    }


def _compressed(kind: str, layout: str, bits: int, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False,
        "group_size": None, "observer": "minmax", "observer_kwargs": {}, "block_structure": None,
        "actorder": None,
    }  # fmt: skip
    inputs = weights | {"strategy": "token", "dynamic": True, "observer": None}
    group = {
        "targets": ["Linear"], "weights": weights | more,
        "input_activations": None if more else inputs, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group}, "kv_cache_scheme": None,
    }  # fmt: skip


_FOUR_BITS = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
_MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}


@dataclass(frozen=True, slots=True)
class Layout:
    """A quantised folder.

    Attributes:
        pack: the function that writes codes for a matrix.
        config: the keys to add to ``config.json``.
        method: the method, as weighin names it.
        beside: the content of files to write beside the weights.
    """

    pack: Pack
    config: dict[str, Any]
    method: str
    beside: Mapping[str, Any] | None = None


def _named(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **more}}


LAYOUTS: Mapping[str, Layout] = {
    "fp8": Layout(fp8_blocks, _named("fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128]), "fp8"),
    "mxfp4": Layout(mxfp4, _named("mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"]), "mxfp4"),
    "compressed fp8": Layout(fp8_channels, {"quantization_config": _compressed("float", "float-quantized", 8)}, "compressed-tensors (float-quantized)"),
    "compressed int8": Layout(int8_channels, {"quantization_config": _compressed("int", "int-quantized", 8)}, "compressed-tensors (int-quantized)"),
    "compressed int4": Layout(int4_packed, {"quantization_config": _compressed("int", "pack-quantized", 4, strategy="group", group_size=GROUP_SIZE)}, "compressed-tensors (pack-quantized)"),
    "bitsandbytes int8": Layout(bitsandbytes_int8, _named("bitsandbytes", load_in_8bit=True), "bitsandbytes 8-bit"),
    "bitsandbytes nf4": Layout(bitsandbytes_nf4, _named("bitsandbytes", **_FOUR_BITS), "bitsandbytes 4-bit (nf4)"),
    "gptq": Layout(gptq, _named("gptq", bits=4, group_size=GROUP_SIZE), "gptq (4 bits)"),
    "awq": Layout(awq, _named("awq", bits=4, group_size=GROUP_SIZE), "awq (4 bits)"),
    "quanto": Layout(quanto_int8, _named("quanto", weights="int8"), "quanto"),
    "hqq": Layout(hqq, _named("hqq", quant_config={"weight_quant_params": {"nbits": 4, "group_size": 64}}), "hqq"),
    "modelopt": Layout(nvfp4, {}, "modelopt (NVFP4)", {"hf_quant_config.json": _MODELOPT}),
    "compression_config": Layout(int8_channels, {"compression_config": _compressed("int", "int-quantized", 8)}, "compressed-tensors (int-quantized)"),
    "mlx": Layout(mlx, {name: {"group_size": GROUP_SIZE, "bits": 4} for name in ("quantization", "quantization_config")}, "mlx"),
    "scaled fp8": Layout(scaled_fp8, {}, "scaled fp8"),
}  # fmt: skip
"""Folders by name: first those that from_pretrained loads on a CPU, with packages of their own."""

DEQUANTISED = ("fp8", "mxfp4")
OURS = (*DEQUANTISED, "compressed fp8", "compressed int8", "compressed int4")
"""What weighin dequantises; the package compressed-tensors is in the extra dev alone."""

UNREAD: Mapping[str, str] = {
    "modelopt": "transformers does not read hf_quant_config.json",
    "compression_config": "transformers does not read compression_config in config.json",
    "mlx": "quantization_config in config.json has no quant_method",
    "scaled fp8": "config.json has no quantization_config",
}
"""Why from_pretrained does not give the weights, either."""


def plain_model(name: str, sizes: Mapping[str, Any] | None = None) -> Any:
    """Return the model, in bfloat16, whose matrices are codes in the folder of this name.

    ``sizes`` replace settings of the small model.
    """
    is_oss = name == "mxfp4"
    kind, settings = ("GptOssForCausalLM", GPT_OSS) if is_oss else ("LlamaForCausalLM", LLAMA)
    made: Any = getattr(import_module("transformers"), kind)
    torch.manual_seed(0)
    return made(made.config_class(**{**settings, **(sizes or {})})).to(torch.bfloat16)


def quantised_state(name: str, model: Any = None) -> State:
    """Return the tensors in the folder of this name, or those of another model's folder."""
    state: State = {}
    for key, value in (model or plain_model(name)).state_dict().items():
        module = key.removesuffix(".weight")
        is_packed = value.ndim == 3 if name == "mxfp4" else "_proj" in key
        state |= LAYOUTS[name].pack(module, value.float()) if is_packed else {key: value}
    return {key: value.clone().contiguous() for key, value in state.items()}


def write_folder(folder: Path, name: str, sizes: Mapping[str, Any] | None = None) -> Path:
    """Write the folder of this name, and return it; ``sizes`` are those of ``plain_model``."""
    layout, model = LAYOUTS[name], plain_model(name, sizes)
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    save_file(quantised_state(name, model), folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"} | layout.config
    (folder / "config.json").write_text(json.dumps(config))
    for file, content in (layout.beside or {}).items():
        (folder / file).write_text(json.dumps(content))
    return folder
