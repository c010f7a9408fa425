"""Read which quantisation the configuration of a Hugging Face folder names.

``quantization_config`` in ``config.json`` describes the quantisation. Some quantising libraries
write the description under another key or into another file, where transformers does not look.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weighin.files import object_in
from weighin.formats.pretrained_folder import CONFIG
from weighin.text import one_line

_QUANTISATION: Final = "quantization_config"
OF_TEXT: Final = ("text_config", "decoder", "generator")
_UNREAD: Final = ("compression_config", "quantization")
_OF_MODELOPT: Final = "hf_quant_config.json"
_NO_CONFIG: Final = "no config.json"
_METHOD: Final = "quant_method"
_BITS: Final = ("bits", "w_bit", "num_bits", "nbits")
_MOST_BITS: Final = 16
_QUANTO: Final = {"int2": 2, "int4": 4, "int8": 8, "float8": 8}
_MOST_LETTERS: Final = 80

_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "aqlm": ("accelerate", "aqlm"),
    "auto-round": ("auto-round>=0.5",),
    "awq": ("accelerate", "gptqmodel"),
    "bitnet": ("accelerate",),
    "bitsandbytes_4bit": ("accelerate", "bitsandbytes>=0.46.1"),
    "bitsandbytes_8bit": ("accelerate", "bitsandbytes>=0.46.1"),
    "compressed-tensors": ("compressed-tensors>=0.15.0",),
    "eetq": ("accelerate", "kernels"),
    "fbgemm_fp8": ("accelerate", "fbgemm-gpu"),
    "fouroversix": ("fouroversix",),
    "fp8": ("accelerate",),
    "fp_quant": ("fp-quant",),
    "gemma": (),
    "gptq": ("optimum", "gptqmodel"),
    "higgs": ("accelerate", "flute-kernel>=0.3.0", "fast_hadamard_transform"),
    "hqq": ("hqq>=0.2.1",),
    "metal": (),
    "mxfp4": ("accelerate",),
    "mxfp8": ("accelerate",),
    "nvfp4": ("kernels",),
    "quanto": ("accelerate", "optimum-quanto"),
    "quark": ("amd-quark",),
    "sinq": ("sinq",),
    "spqr": ("accelerate", "spqr_quant"),
    "torchao": ("torchao",),
    "vptq": ("accelerate", "vptq>=0.0.4"),
}
"""Maps each quantisation method of transformers 5 (``quantizers/auto.py``) to the packages that its
``validate_environment`` requires on a CPU. Some methods need a GPU, too; the error of
from_pretrained then says so."""

_DEQUANTISED: Final[Mapping[str, tuple[str | None, ...]]] = {
    "fp8": (None,),
    "mxfp4": (None,),
    "mxfp8": (None,),
    "compressed-tensors": (
        "float-quantized",
        "int-quantized",
        "naive-quantized",
        "pack-quantized",
    ),
}
"""Maps each method that transformers dequantises to the formats of codes that it dequantises.
The format None stands for a configuration that names no format."""


@dataclass(frozen=True, slots=True)
class NamedMethod:
    """The quantisation that a configuration names.

    Attributes:
        name: the method's name and variant, for messages; empty if no method is named.
        is_read: whether from_pretrained reads the configuration and knows the method.
        bits: the bits of one weight; None if the configuration names no number or several.
        packages: the packages that from_pretrained needs in addition to transformers.
        obstacle: the reason why from_pretrained does not dequantise the codes; empty if it does.
        repair: what the user can do about the obstacle.
        dequantised: whether transformers dequantises the codes.
    """

    name: str
    is_read: bool
    bits: int | None
    packages: tuple[str, ...]
    obstacle: str
    repair: str
    dequantised: bool


def named_in(folder: Path, config: Mapping[str, Any]) -> NamedMethod:
    """Return the quantisation that a folder names; ``config`` is the folder's ``config.json``."""
    described, place = _described(folder, config)
    method = _method(described)
    obstacle, repair = _obstacle(method, place)
    return NamedMethod(
        _shown(method, described),
        place == _QUANTISATION and method in _NEEDED,
        _bits(described),
        _NEEDED.get(method or "", ()),
        obstacle,
        repair,
        described.get("format") in _DEQUANTISED.get(method or "", ()),
    )


def description_in(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` that from_pretrained reads; None if there is none."""
    for part in (config, *(config.get(name) for name in OF_TEXT)):
        if isinstance(part, Mapping) and isinstance(found := part.get(_QUANTISATION), Mapping):
            return found
    return None


def to_dequantise(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a configuration, with ``dequantize`` set to true."""
    found = description_in(config)
    return {} if found is None else {**found, "dequantize": True}


def dequantising(folder: Path) -> dict[str, Any]:
    """Return the ``quantization_config`` with which from_pretrained dequantises on every device.

    The result is empty if the folder is not quantised, or from_pretrained cannot dequantise it.
    """
    config = object_in(folder / CONFIG)
    named = named_in(folder, config)
    return to_dequantise(config) if named.dequantised else {}


def _described(folder: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the description of the quantisation, and the key or file that has the description.

    The second value is "quantization_config" only if from_pretrained reads the description. Without
    a description, the first value is empty, and the second is "" or "no config.json".
    """
    if (found := description_in(config)) is not None:
        return found, _QUANTISATION
    for name, part in config.items():
        if name in _UNREAD and isinstance(part, Mapping):
            return part, f"{name} in {CONFIG}"
        if isinstance(part, Mapping) and isinstance(found := part.get(_QUANTISATION), Mapping):
            return found, f"{_QUANTISATION} of {name} in {CONFIG}"
    of_modelopt = object_in(folder / _OF_MODELOPT).get("quantization")
    if isinstance(of_modelopt, Mapping):
        return {_METHOD: "modelopt", **of_modelopt}, _OF_MODELOPT
    return {}, "" if config else _NO_CONFIG


def _method(named: Mapping[str, Any]) -> str | None:
    """Return transformers' name of the quantisation method; None if none is named."""
    for bits in ("4bit", "8bit"):
        if named.get(f"load_in_{bits}") is True:
            return f"bitsandbytes_{bits}"
    method = named.get(_METHOD)
    if method == "bitsandbytes":
        return "bitsandbytes_8bit"
    return method if isinstance(method, str) else None


def _shown(method: str | None, named: Mapping[str, Any]) -> str:
    name = (method or "").replace("_4bit", " 4-bit").replace("_8bit", " 8-bit")
    details = [named.get(key) for key in ("format", "quant_algo", "bnb_4bit_quant_type")]
    if bits := named.get("bits"):
        details.append(f"{bits} bits")
    shown = [one for one in details if isinstance(one, str)]
    return one_line(f"{name} ({', '.join(shown)})" if name and shown else name, _MOST_LETTERS)


def _obstacle(method: str | None, place: str) -> tuple[str, str]:
    """Return why from_pretrained does not dequantise, and the repair; ("", "") if it does."""
    library = "load the model with the library that quantised it"
    alike = "from_pretrained takes the codes for weights, too"
    if place == _NO_CONFIG:
        return f"{place} beside it describes the quantisation", (
            "give the Hugging Face folder that it belongs to, whose config.json has quantization_config"
            f"; or {library}"
        )
    if not place:
        return f"{CONFIG} has no {_QUANTISATION}: {alike}", (
            f"copy {_QUANTISATION} from the config.json that the quantising library wrote beside the weights; or {library}"
        )
    if place != _QUANTISATION:
        return f"transformers does not read {place}: {alike}", (
            f"if transformers has the method, write it as {_QUANTISATION} into {CONFIG}; or {library}"
        )
    if method is None:
        return f"{_QUANTISATION} in {CONFIG} has no {_METHOD}: from_pretrained fails, too", library
    if method not in _NEEDED:
        return f"transformers has no such method: {alike}", library
    return "", ""


def _bits(named: Mapping[str, Any]) -> int | None:
    """Return the bits of one weight; None if the description names no number or several."""
    groups = named.get("config_groups")
    parts: list[Any] = [named, named.get("weight_quant_params"), named.get("quant_config")]
    if isinstance(groups, Mapping):
        parts = [one.get("weights") for one in groups.values() if isinstance(one, Mapping)]
    for part in list(parts):
        if isinstance(part, Mapping):
            parts.append(part.get("weight_quant_params"))
    found = {
        part[key]
        for part in parts
        if isinstance(part, Mapping)
        for key in _BITS
        if type(part.get(key)) is int and 0 < part[key] <= _MOST_BITS
    }
    if str(named.get("weights", "")) in _QUANTO:
        found.add(_QUANTO[str(named["weights"])])
    return found.pop() if len(found) == 1 else None
