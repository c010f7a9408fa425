"""Dequantise codes of bitsandbytes, GPTQ and AWQ without the packages of these methods.

transformers does not dequantise these codes, but loads them into modules of the packages. The class
``Dequantiser`` replaces transformers' quantiser, and dequantises in transformers' conversions.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import torch

from weighin.errors import CheckpointError
from weighin.formats.quantisation_config import AWQ, BITSANDBYTES, GPTQ, layout_of
from weighin.models import code_values
from weighin.text import one_line, plain

Parts = Mapping[str, torch.Tensor]
"""The tensors of one module in the file, by the last part of their names, such as "qweight"."""

WEIGHT: Final = "weight"
_REPAIR: Final = "load the model with the library that quantised it"
_STATES: Final = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


@contextmanager
def fitting(name: str) -> Iterator[None]:
    """Turn the errors that a damaged file or an unknown layout of codes causes into CheckpointErrors."""
    try:
        yield
    except (ArithmeticError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"the codes of {plain(name)} do not fit the other tensors of their module:"
            f" {one_line(str(error))}",
            _REPAIR,
        ) from error


class Operation:
    """Dequantises the weights of modules; a weight that is not quantised keeps its values.

    A dequantised weight has the shape of the weight of ``torch.nn.Linear``.
    """

    names: ClassVar[tuple[str, ...]]
    """The last parts of the tensors' names in the file, such as "qweight"."""

    casts: ClassVar[bool] = True
    """Whether a weight that is not quantised gets the model's dtype, as with ``from_pretrained``."""

    def __init__(self, quantiser: "Dequantiser") -> None:
        self.hf_quantizer = quantiser

    def convert(
        self,
        collected: dict[str, Any],
        *,
        full_layer_name: str,
        model: Any,
        **_: object,
    ) -> dict[str, Any]:
        """Return the weights by their name patterns, as transformers' ``ConversionOps`` do."""
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        groups: dict[str, dict[str, list[torch.Tensor]]] = {}
        for pattern, tensors in collected.items():
            end = max((name for name in self.names if _ends(pattern, name)), key=len)
            groups.setdefault(pattern.removesuffix(end), {})[end] = (
                tensors if isinstance(tensors, list) else [tensors]
            )
        made = {
            f"{beginning}{WEIGHT}": self._weights(group, dtype, full_layer_name)
            for beginning, group in groups.items()
        }
        return {full_layer_name: made[WEIGHT]} if made.keys() == {WEIGHT} else made

    def _weights(
        self, group: Mapping[str, list[torch.Tensor]], dtype: torch.dtype, name: str
    ) -> list[torch.Tensor]:
        with fitting(name):
            modules = [
                dict(zip(group, tensors, strict=True))
                for tensors in zip(*group.values(), strict=True)
            ]
            return [self._one(parts, dtype) for parts in modules]

    def _one(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        if parts.keys() == {WEIGHT}:
            alone = parts[WEIGHT]
            if not alone.is_floating_point():
                raise ValueError(f"{alone.dtype} without scales")
            return alone.to(dtype) if self.casts else alone
        return self.weight(parts, dtype)

    def weight(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError


class DequantiseInt8(Operation):
    """Dequantises LLM.int8 of bitsandbytes: int8 codes, and the largest magnitude of each row."""

    names = (WEIGHT, "SCB", "weight_format")
    casts = False

    def weight(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        layout = parts.get("weight_format")
        if layout is not None and int(layout):
            raise ValueError(f"weight_format is {int(layout)}, a layout for old GPUs, instead of 0")
        return code_values.int8_rows(parts[WEIGHT], parts["SCB"]).to(dtype)


class DequantiseFourBits(Operation):
    """Dequantises nf4 and fp4 of bitsandbytes: a table of 16 values, and a scale for each block."""

    names = (
        WEIGHT,
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        *_STATES,
    )
    casts = False

    def weight(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        state = state_of(parts)
        codes = parts[WEIGHT].contiguous().view(torch.uint8)
        values = code_values.four_bits(
            codes, parts["weight.quant_map"], scales_of(parts, state), state["blocksize"]
        )
        shape = torch.Size(state["shape"])
        of_file: torch.dtype = getattr(torch, state["dtype"])
        return values[: shape.numel()].view(shape).to(of_file).to(dtype)


def state_of(parts: Parts) -> dict[str, Any]:
    """Return the JSON object in which bitsandbytes stores a weight's block size, shape and dtype."""
    (text,) = [parts[name] for name in _STATES if name in parts]
    state: dict[str, Any] = json.loads(bytes(text.tolist()))
    return state


def scales_of(parts: Parts, state: Mapping[str, Any]) -> torch.Tensor:
    scales = parts["weight.absmax"]
    if "weight.nested_absmax" not in parts:
        return scales.float()
    return code_values.nested_scales(
        scales,
        parts["weight.nested_quant_map"],
        parts["weight.nested_absmax"],
        state["nested_blocksize"],
        state["nested_offset"],
    )


class DequantiseGptq(Operation):
    """Dequantises GPTQ: a word holds codes of several inputs; each group of inputs has scales."""

    names = ("qweight", "qzeros", "scales", "g_idx", WEIGHT)

    def weight(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        words, zeros, scales = (parts[name] for name in ("qweight", "qzeros", "scales"))
        if {words.dtype, zeros.dtype} != {torch.int32}:
            raise ValueError(f"the codes in qweight have the dtype {words.dtype}, not torch.int32")
        settings = self.hf_quantizer.settings
        bits = bits_of(zeros.shape[1], scales.shape[1], settings.get("bits", 4))
        groups = parts.get("g_idx")
        if groups is None:
            groups = even_groups(words.shape[0] * 32 // bits, len(scales))
        less = int(layout_of(GPTQ, settings) == "gptq")
        values = code_values.gptq(words, zeros, scales, groups, bits, less)
        return values.to(dtype).t()


def bits_of(words: int, outputs: int, named: int) -> int:
    """Return the number of bits of a code: the first of ``named``, 2, 3, 4, 8 that fits ``words``.

    Args:
        words: the number of 32-bit words that hold one zero point for each of ``outputs``.

    Raises:
        ValueError: none of these numbers of bits fits.
    """
    for bits in (named, 2, 3, 4, 8):
        if -(-outputs * bits // 32) == words:
            return bits
    raise ValueError(f"{words} words cannot hold zero points of {outputs} outputs")


def even_groups(inputs: int, count: int) -> torch.Tensor:
    """Return the group number of each input, if the inputs form ``count`` groups of equal size."""
    if inputs % count:
        raise ValueError(f"{inputs} inputs cannot be divided into {count} groups of equal size")
    return torch.arange(inputs, dtype=torch.int32) // (inputs // count)


class DequantiseAwq(Operation):
    """Dequantises AWQ: a word holds codes of eight outputs; each group of inputs has scales."""

    names = ("qweight", "qzeros", "scales", "g_idx", WEIGHT)

    def weight(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        words, zeros, scales = (parts[name] for name in ("qweight", "qzeros", "scales"))
        if words.shape[1] * 8 != scales.shape[1]:
            raise ValueError(
                f"{words.shape[1]} words cannot hold {scales.shape[1]} outputs of 4 bits"
            )
        groups = parts.get("g_idx")
        if groups is None:
            groups = even_groups(len(words), len(scales))
        return code_values.awq(words, zeros, scales, groups).to(dtype).t()


_OPERATIONS: Final[Mapping[str, type[Operation]]] = {
    f"{BITSANDBYTES}_8bit": DequantiseInt8,
    f"{BITSANDBYTES}_4bit": DequantiseFourBits,
    GPTQ: DequantiseGptq,
    AWQ: DequantiseAwq,
}


class Dequantiser:
    """A quantiser with transformers' interface; it adds an ``Operation`` to the conversions."""

    pre_quantized = True

    def __init__(self, method: str, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.operation = _OPERATIONS[method]
        self.serialized_names = {WEIGHT: list(self.operation.names)}
        self.quantization_config = SimpleNamespace(dequantize=True)

    def get_load_operations(self) -> dict[str, type[Operation]]:
        return {"dequantize": self.operation}

    def update_weight_conversions(self, conversions: Sequence[Any], model: Any) -> list[Any]:
        updated: list[Any] = _quantisers().update_weight_conversions(self, conversions, model)
        return updated

    def get_weight_conversions(self) -> list[Any]:
        made: list[Any] = _quantisers().get_weight_conversions(self)
        return made

    def postprocess_model(self, model: Any) -> None:
        _quantisers().remove_quantization_config(self, model)


def _quantisers() -> Any:
    return import_module("transformers.quantizers.base").HfQuantizer


def _ends(pattern: str, name: str) -> bool:
    return pattern == name or pattern.endswith(f".{name}")
