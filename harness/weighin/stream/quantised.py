"""Tell whether the tensors of a checkpoint are quantised codes, and who turns them into weights.

``quantization_config`` in ``config.json`` describes the quantisation; some libraries write the description
to where transformers does not look. Without it, the names and dtypes suffice: the codes of a weight
and their scales have names that differ in their suffixes. A loader that takes codes for weights gets wrong
values without any error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.errors import CheckpointError, ConfigError
from weighin.files import object_in
from weighin.stream.pretrained_folder import BUILDER, CONFIG, folder_of
from weighin.stream.slices import Slice
from weighin.text import one_line

_FLOAT8: Final = frozenset(
    {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
_BYTES: Final = frozenset({"int8", "uint8"})
_WORDS: Final = frozenset({"int32", "uint32", "int64"})
_ANY: Final = _FLOAT8 | _BYTES | _WORDS | {"bfloat16", "float16", "float32", "int16"}
_PAIRS: Final = (
    ("bitsandbytes (nf4)", "", ".quant_state.bitsandbytes__nf4", _ANY),
    ("bitsandbytes (fp4)", "", ".quant_state.bitsandbytes__fp4", _ANY),
    ("bitsandbytes (int8)", ".weight", ".SCB", _BYTES),
    ("mxfp4", "_blocks", "_scales", _BYTES),
    ("gptq or awq", ".qweight", ".scales", _WORDS),
    ("compressed-tensors", "_packed", "_scale", _WORDS | _BYTES),
    ("torchao", "_qdata", "_scale", _ANY),
    ("aqlm", ".codes", ".codebooks", _ANY),
    ("hqq", ".W_q", ".scale", _ANY),
    ("quanto", "._data", "._scale", _FLOAT8 | _BYTES),
    ("eetq", ".weight", ".weight_scales", _BYTES),
    ("mlx", ".weight", ".scales", _WORDS),
    ("vptq", ".indices", ".centroids.weight", _ANY),
    ("scaled fp8", ".weight", ".scale_weight", _FLOAT8),
    ("fp8 in blocks", "", "_scale_inv", _FLOAT8 | _BYTES),
    ("codes of 8 or fewer bits", "", "_scale", _FLOAT8 | _BYTES),
)
"""A method, the suffixes that it gives to codes and to their scales, and the dtypes of its codes. The
first row that fits applies; several libraries write codes as in the last row."""

_QUANTISATION: Final = "quantization_config"
_OF_TEXT: Final = ("text_config", "decoder", "generator")
_UNREAD: Final = ("compression_config", "quantization")
_OF_MODELOPT: Final = "hf_quant_config.json"
_METHOD: Final = "quant_method"
_METHODS: Final = frozenset({
    "aqlm", "auto-round", "awq", "bitnet", "bitsandbytes_4bit", "bitsandbytes_8bit",
    "compressed-tensors", "eetq", "fbgemm_fp8", "fouroversix", "fp8", "fp_quant", "gemma", "gptq",
    "higgs", "hqq", "metal", "mxfp4", "mxfp8", "nvfp4", "quanto", "quark", "sinq", "spqr",
    "torchao", "vptq",
})  # fmt: skip
"""The methods of transformers 5 (``quantizers/auto.py``)."""
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
"""The methods that transformers dequantises, and the formats of their codes that it dequantises; None is
a configuration that names no format."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """How a checkpoint is quantised.

    Attributes:
        method: the method's name and variant: "compressed-tensors (pack-quantized)".
        weights: the number of tensors that hold codes; 0 if only ``config.json`` names the method.
        stored_bytes: the size of all tensors in the files.
        obstacle, repair: why from_pretrained does not dequantise the codes, if it does not.
        dequantises: whether transformers dequantises the codes.
    """

    method: str
    weights: int
    stored_bytes: int
    obstacle: str = ""
    repair: str = ""
    dequantises: bool = False

    @property
    def summary(self) -> str:
        """A part of a message: the method, the number of tensors of codes, and their size."""
        from weighin.units import format_bytes  # imports decimal, which few loads need

        if not self.weights:
            return f"quantised with {self.method}, as the configuration says"
        count = f"{self.weights:,} tensors are" if self.weights > 1 else "1 tensor is"
        return (
            f"quantised with {self.method}: {count} codes that mean something only with their scales"
            f" ({format_bytes(self.stored_bytes)} as stored)"
        )

    def error(self, path: Path) -> CheckpointError:
        """Return the error for a loader that would take the codes for weights."""
        what, folder = f"{path}: {self.summary}", quote(str(folder_of(path)))
        bench = f"to measure this load: weighin bench {folder} --strategies"
        if self.obstacle:
            return CheckpointError(f"{what}; {self.obstacle}", self.repair)
        if self.dequantises:
            return CheckpointError(
                f"{what}; only the model of this folder takes them, dequantised",
                "load it with load_pretrained, or write the weights: weighin convert"
                f" {folder} NEW.safetensors --keys model; {bench} streaming,transformers",
            )
        return CheckpointError(
            f"{what}; weighin does not dequantise them",
            f"load it with from_pretrained, which names the packages that it needs; {bench} transformers",
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"summary": self.summary}


def of_model(model: ModelSpec) -> Quantised | None:
    told = model.kwargs.get("quantised") if model.builder == BUILDER else None
    if told is None:
        return None
    try:  # a plan may be of an earlier version, with more fields
        return Quantised(**{one.name: told[one.name] for one in fields(Quantised)})
    except (TypeError, KeyError):
        raise ConfigError(
            f"the plan is damaged: the argument `quantised` of the model {model.name} is not a"
            " description of quantised weights",
            "start a new run",
        ) from None


def find_codes(slices: Sequence[Slice]) -> dict[str, tuple[str, str]]:
    """Return the names of all tensors of codes, each with the method and the name of its scales."""
    dtypes = {one.name: one.dtype_name for one in slices}
    pairs = [pair for pair in _PAIRS if any(name.endswith(pair[2]) for name in dtypes)]
    found: dict[str, tuple[str, str]] = {}
    for name, dtype in dtypes.items() if pairs else ():
        for method, of_codes, of_scales, its_dtypes in pairs:
            scales = name.removesuffix(of_codes) + of_scales
            if name.endswith(of_codes) and dtype in its_dtypes and scales in dtypes:
                found[name] = method, scales
                break
    return found


def of_folder(folder: Path, config: Mapping[str, Any], slices: Sequence[Slice]) -> Quantised | None:
    """Return how the weights of a Hugging Face folder are quantised, or None. In a folder without codes, a method
    that ``config.json`` names counts only if transformers has it, because it ignores any other.
    """
    described, place = _described(folder, config)
    method, codes = _method(described), find_codes(slices)
    if not (codes or (place == _QUANTISATION and method in _METHODS)):
        return None
    obstacle, repair = _obstacle(method, place)
    stored = {(one.file, one.offset, one.shape): one.nbytes for one in slices}
    return Quantised(
        method=_shown(described) or next(iter(codes.values()))[0],
        weights=len(codes),
        stored_bytes=sum(stored.values()),
        obstacle=obstacle,
        repair=repair,
        dequantises=_is_dequantised(described) and not obstacle,
    )


def in_checkpoint(path: Path, slices: Sequence[Slice]) -> Quantised | None:
    """Return how a file or folder is quantised; None if it has no codes."""
    folder = folder_of(path)
    found = of_folder(folder, object_in(folder / CONFIG), slices)
    return found if found and found.weights else None


def refuse_codes(path: Path, slices: Sequence[Slice], names: Iterable[str]) -> None:
    """Raise CheckpointError if a model with tensors of these ``names`` would take quantised codes for weights,
    unless it has tensors for the scales, such as the built-in gpt-oss-20b.
    """
    if not (codes := find_codes(slices)):
        return
    places = {name.rpartition(".")[2] for name in names}
    if any(scales.rpartition(".")[2] not in places for _, scales in codes.values()) and (
        found := in_checkpoint(path, slices)
    ):
        raise found.error(path)


def dequantising(folder: Path) -> dict[str, Any]:
    """Return the ``quantization_config`` with which from_pretrained dequantises on every device, or {}."""
    described, place = _described(folder, object_in(folder / CONFIG))
    if place != _QUANTISATION or not _is_dequantised(described):
        return {}
    return {**described, "dequantize": True}


def method_of(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the method and variant that a folder names, for messages; empty if it names none."""
    return _shown(_described(folder, config)[0])


def _described(folder: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the description of the quantisation, and the key or file that has it: "quantization_config" only
    if from_pretrained reads it. Without a description, {} and "" or "no config.json".
    """
    for part in (config, *(config.get(name) for name in _OF_TEXT)):
        if isinstance(part, Mapping) and isinstance(found := part.get(_QUANTISATION), Mapping):
            return found, _QUANTISATION
    for name, part in config.items():
        if name in _UNREAD and isinstance(part, Mapping):
            return part, f"{name} in {CONFIG}"
        if isinstance(part, Mapping) and isinstance(found := part.get(_QUANTISATION), Mapping):
            return found, f"{_QUANTISATION} of {name} in {CONFIG}"
    of_modelopt = object_in(folder / _OF_MODELOPT).get("quantization")
    if isinstance(of_modelopt, Mapping):
        return {_METHOD: "modelopt", **of_modelopt}, _OF_MODELOPT
    return {}, "" if config else f"no {CONFIG}"


def _method(named: Mapping[str, Any]) -> str | None:
    for bits in ("4bit", "8bit"):
        if named.get(f"load_in_{bits}") is True:
            return f"bitsandbytes_{bits}"
    method = named.get(_METHOD)
    if method == "bitsandbytes":
        return "bitsandbytes_8bit"
    return method if isinstance(method, str) else None


def _is_dequantised(named: Mapping[str, Any]) -> bool:
    return named.get("format") in _DEQUANTISED.get(_method(named) or "", ())


def _shown(named: Mapping[str, Any]) -> str:
    name = (_method(named) or "").replace("_4bit", " 4-bit").replace("_8bit", " 8-bit")
    details = [named.get(key) for key in ("format", "quant_algo", "bnb_4bit_quant_type")]
    if bits := named.get("bits"):
        details.append(f"{bits} bits")
    shown = [one for one in details if isinstance(one, str)]
    return one_line(f"{name} ({', '.join(shown)})" if name and shown else name, 80)


def _obstacle(method: str | None, place: str) -> tuple[str, str]:
    """Return why from_pretrained does not dequantise, and the repair; ("", "") if it does."""
    library = "load the model with the library that quantised it"
    alike = "from_pretrained takes the codes for weights, too"
    if place == f"no {CONFIG}":
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
    if method not in _METHODS:
        return f"transformers has no such method: {alike}", library
    return "", ""
