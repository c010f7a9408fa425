"""Tell whether the tensors of a checkpoint are quantised values (codes), and who turns them into weights.

``quantization_config`` in ``config.json`` describes the quantisation, or a place where transformers does
not look. Without it, names and dtypes suffice: the codes of a weight and their scales differ in their
names' suffixes. A loader that takes codes for weights gets wrong values without any error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.errors import CheckpointError
from weighin.files import object_in
from weighin.stream.hugging_face_folder import CONFIG, folder_of, planned
from weighin.stream.slices import ITEM_BYTES, Slice
from weighin.text import one_line

_BYTES: Final = frozenset(name for name, size in ITEM_BYTES.items() if size == 1 and name != "bool")
_CODES: Final = _BYTES | {"int16", "uint16", "int32", "uint32", "int64"}
_ANY: Final = frozenset(ITEM_BYTES)
_PAIRS: Final = (
    ("bitsandbytes (nf4)", "", ".quant_state.bitsandbytes__nf4", _ANY),
    ("bitsandbytes (fp4)", "", ".quant_state.bitsandbytes__fp4", _ANY),
    ("bitsandbytes (int8)", ".weight", ".SCB", _BYTES),
    ("mxfp4", "_blocks", "_scales", _BYTES),
    ("gptq or awq", ".qweight", ".scales", _CODES),
    ("compressed-tensors", "_packed", "_scale", _CODES),
    ("torchao", "_qdata", "_scale", _ANY),
    ("aqlm", ".codes", ".codebooks", _ANY),
    ("hqq", ".W_q", ".scale", _ANY),
    ("quanto", "._data", "._scale", _BYTES),
    ("eetq", ".weight", ".weight_scales", _BYTES),
    ("mlx", ".weight", ".scales", _CODES),
    ("vptq", ".indices", ".centroids.weight", _ANY),
    ("scaled fp8", ".weight", ".scale_weight", _BYTES),
    ("fp8 in blocks", "", "_scale_inv", _BYTES),
    ("codes of 8 or fewer bits", "", "_scale", _BYTES),
)
"""A method, the suffixes that it gives to codes and to their scales, and the dtypes of its codes. The
first row that fits applies; several libraries write codes as in the last row."""

_KEY: Final = "quantization_config"
_NO_CONFIG: Final = f"no {CONFIG}"
_OF_MODELOPT: Final = "hf_quant_config.json"
_METHODS: Final = frozenset({
    "aqlm", "auto-round", "awq", "bitnet", "bitsandbytes_4bit", "bitsandbytes_8bit",
    "compressed-tensors", "eetq", "fbgemm_fp8", "fouroversix", "fp8", "fp_quant", "gemma", "gptq",
    "higgs", "hqq", "metal", "mxfp4", "mxfp8", "nvfp4", "quanto", "quark", "sinq", "spqr",
    "torchao", "vptq",
})  # fmt: skip
"""The methods of transformers 5 (``quantizers/auto.py``)."""
_COMPRESSED: Final = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_DEQUANTISED: Final = [
    *([method, None] for method in ("fp8", "mxfp4", "mxfp8")),
    *(["compressed-tensors", layout] for layout in _COMPRESSED),
]
"""The methods, each with the format of its codes, that transformers dequantises."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """How a checkpoint is quantised: the method with its variant, and why from_pretrained does not dequantise it."""

    method: str
    weights: int  # how many tensors hold codes; 0 if only config.json names the method
    stored_bytes: int  # of all tensors in the files
    obstacle: str = ""
    repair: str = ""
    dequantises: bool = False

    @property
    def summary(self) -> str:
        """The method, the number of quantised tensors, and their size, as a part of a message."""
        from weighin.units import format_bytes  # imports decimal, which few loads need

        if not self.weights:
            return f"quantised with {self.method}, as the configuration says"
        tensors = f"{self.weights:,} tensors" if self.weights > 1 else "1 tensor"
        return (
            f"quantised with {self.method}: {tensors} of quantised values, which mean nothing without"
            f" their scales ({format_bytes(self.stored_bytes)} as stored)"
        )

    def error(self, path: Path) -> CheckpointError:
        """Return the error for a loader that would take the quantised values for weights."""
        why, repair, folder = self.obstacle, self.repair, quote(str(folder_of(path)))
        if not why and self.dequantises:
            why = "to fit the model, they must be dequantised"
            repair = "load it with load_pretrained, or write the weights: weighin convert"
            repair += f" {folder} NEW.safetensors --keys model"
        elif not why:
            why = "weighin does not dequantise them"
            repair = "load it with from_pretrained, which names the packages that it needs;"
            repair += f" to measure this load: weighin bench {folder} --strategies transformers"
        return CheckpointError(f"{path}: {self.summary}; {why}", repair)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"summary": self.summary}


def of_model(model: ModelSpec) -> Quantised | None:
    told = planned(model, "quantised", Quantised.__annotations__)
    return Quantised(**told) if told else None


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
    """Return how the weights of a Hugging Face folder are quantised, or None."""
    described, place = _described(folder, config)
    method, codes = _method(described), find_codes(slices)
    # Without codes, transformers ignores a method that it does not have.
    if not (codes or (place == _KEY and method in _METHODS)):
        return None
    obstacles = (
        (not place, f"{CONFIG} has no {_KEY}"),
        (place == _NO_CONFIG, f"{place} beside it has a {_KEY}"),
        (place != _KEY, f"transformers does not read {place}"),
        (method is None, f"{_KEY} in {CONFIG} has no quant_method"),
        (method not in _METHODS, "transformers has no such method"),
    )
    obstacle = next((text for is_so, text in obstacles if is_so), "")
    repair = ""
    if obstacle:
        obstacle += ": from_pretrained takes the quantised values for weights, or fails"
        repair = (
            "load the model with the library that quantised it; or, if transformers has the method,"
            f" copy that library's {_KEY} into {CONFIG}"
        )
    name = (method or "").replace("_4bit", " 4-bit").replace("_8bit", " 8-bit")
    details = [described.get(key) for key in ("format", "quant_algo", "bnb_4bit_quant_type")]
    if bits := described.get("bits"):
        details.append(f"{bits} bits")
    shown = [one for one in details if isinstance(one, str)]
    if name and shown:
        name += f" ({', '.join(shown)})"
    stored = {(one.file, one.offset, one.shape): one.nbytes for one in slices}
    return Quantised(
        method=one_line(name, 80) if name else next(iter(codes.values()))[0],
        weights=len(codes),
        stored_bytes=sum(stored.values()),
        obstacle=obstacle,
        repair=repair,
        dequantises=[method, described.get("format")] in _DEQUANTISED and not obstacle,
    )


def in_checkpoint(path: Path, slices: Sequence[Slice]) -> Quantised | None:
    """Return how a file or folder is quantised; None if it has no codes."""
    folder = folder_of(path)
    found = of_folder(folder, object_in(folder / CONFIG), slices)
    return found if found and found.weights else None


def refuse_codes(path: Path, slices: Sequence[Slice], names: Callable[[], Iterable[str]]) -> None:
    """Refuse codes for a model with tensors of these ``names``, unless it has some for scales."""
    if not (codes := find_codes(slices)):
        return
    places = {name.rpartition(".")[2] for name in names()}
    if any(scales.rpartition(".")[2] not in places for _, scales in codes.values()) and (
        found := in_checkpoint(path, slices)
    ):
        raise found.error(path)


def dequantising(folder: Path) -> dict[str, Any]:
    """Return the ``quantization_config`` with which from_pretrained dequantises on every device, or {}."""
    described, place = _described(folder, object_in(folder / CONFIG))
    is_known = [_method(described), described.get("format")] in _DEQUANTISED
    return {**described, "dequantize": True} if place == _KEY and is_known else {}


def _described(folder: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the description of the quantisation, or {}, and where it is: ``_KEY`` only if from_pretrained reads it."""
    # Transformers looks in the configuration, and in its part for the text model.
    for part in (config, *(config.get(name) for name in ("text_config", "decoder", "generator"))):
        if isinstance(part, Mapping) and isinstance(found := part.get(_KEY), Mapping):
            return found, _KEY
    for name, part in config.items():
        # These two names are keys of other libraries, which transformers does not read.
        if name in ("compression_config", "quantization") and isinstance(part, Mapping):
            return part, f"{name} in {CONFIG}"
        if isinstance(part, Mapping) and isinstance(found := part.get(_KEY), Mapping):
            return found, f"{_KEY} of {name} in {CONFIG}"
    of_modelopt = object_in(folder / _OF_MODELOPT).get("quantization")
    if isinstance(of_modelopt, Mapping):
        return {"quant_method": "modelopt", **of_modelopt}, _OF_MODELOPT
    return {}, "" if config else _NO_CONFIG


def _method(named: Mapping[str, Any]) -> str | None:
    for bits in ("4bit", "8bit"):
        if named.get(f"load_in_{bits}") is True:
            return f"bitsandbytes_{bits}"
    method = named.get("quant_method")
    if method == "bitsandbytes":
        return "bitsandbytes_8bit"
    return method if isinstance(method, str) else None
