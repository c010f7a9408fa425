"""Dequantise bitsandbytes, GPTQ and AWQ as their formats are published, whole tensors at a time."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from quantised_folders import GROUP_SIZE
from safetensors.torch import load_file

Dequantise = Callable[[dict[str, torch.Tensor], torch.dtype], torch.Tensor]
_BESIDE = ("qweight", "SCB", "weight.absmax")


def stream(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values that lie one after the other in the words of each column, bit by bit."""
    single = (words.long()[:, None] >> torch.arange(32).view(1, -1, 1)) & 1
    values = single.reshape(-1, bits, words.shape[1]) << torch.arange(bits).view(1, -1, 1)
    summed: torch.Tensor = values.sum(1)
    return summed


def plain_gptq(bits: int, less: int) -> Dequantise:
    def weight(parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        groups = parts["g_idx"].long()
        zeros = (stream(parts["qzeros"].t(), bits).t() + less) % 2**bits
        codes = stream(parts["qweight"], bits)
        values: torch.Tensor = (codes - zeros[groups]).float() * parts["scales"][groups].float()
        return values.t().to(dtype)

    return weight


def plain_awq(parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    def values(words: torch.Tensor) -> torch.Tensor:
        mixed = stream(words.t(), 4).t().reshape(len(words), -1, 8)
        plain = torch.empty_like(mixed)
        plain[:, :, [0, 2, 4, 6, 1, 3, 5, 7]] = mixed
        return plain.flatten(1)

    groups = torch.arange(len(parts["qweight"])) // GROUP_SIZE
    codes, zeros = values(parts["qweight"]), values(parts["qzeros"])
    return ((codes - zeros[groups]).float() * parts["scales"][groups].float()).t().to(dtype)


def plain_int8(parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return (parts["weight"].float() * parts["SCB"][:, None] * 7.874015718698502e-3).to(dtype)


def plain_nf4(parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    state = json.loads(bytes(parts["weight.quant_state.bitsandbytes__nf4"].tolist()))
    scales = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        number = torch.arange(len(scales)) // state["nested_blocksize"]
        table = parts["weight.nested_quant_map"][scales.long()]
        scales = table * parts["weight.nested_absmax"][number] + state["nested_offset"]
    halves = torch.stack([parts["weight"] >> 4, parts["weight"] & 15], -1).flatten().long()
    number = torch.arange(len(halves)) // state["blocksize"]
    values = parts["weight.quant_map"][halves] * scales[number]
    return values[: torch.Size(state["shape"]).numel()].view(state["shape"]).bfloat16().to(dtype)


def expected(folder: Path, plain: Dequantise, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights of the coded matrices, by the names that they have before the quantisation."""
    state = load_file(folder / "model.safetensors")
    return {
        f"{module}.weight": plain(
            {
                name.removeprefix(f"{module}."): value
                for name, value in state.items()
                if name.startswith(f"{module}.")
            },
            dtype,
        )
        for module in _coded(state)
    }


def plain_state(folder: Path, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the state dict of a folder of ``quantised_folders``, with weights in the place of codes."""
    state = load_file(folder / "model.safetensors")
    coded = _coded(state)
    kept = {
        key: value.to(dtype)
        for key, value in state.items()
        if not any(key.startswith(f"{module}.") for module in coded)
    }
    return kept | expected(folder, PLAIN[name], dtype)


def _coded(state: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the modules whose weights are codes."""
    return {name.removesuffix(f".{end}") for name in state for end in _BESIDE if name.endswith(end)}


PLAIN: dict[str, Dequantise] = {
    "bitsandbytes int8": plain_int8,
    "bitsandbytes nf4": plain_nf4,
    "gptq": plain_gptq(4, 1),
    "awq": plain_awq,
}
"""The formula of each method, by the names of ``quantised_folders``."""
