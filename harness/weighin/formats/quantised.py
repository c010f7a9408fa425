"""Tell how a checkpoint is quantised, which packages ``from_pretrained`` needs, and how many bytes
the weights take.

``quantization_config`` in ``config.json`` describes the quantisation. Some quantising libraries
write the description under another key or into another file, where transformers does not look.
Without a configuration, the names and dtypes of the tensors suffice: a library writes the codes of a
weight under one name, and their scales under a name with another suffix. A loader that takes the codes
of a quantised weight for the weight itself gets wrong values without any error.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.errors import CheckpointError, ConfigError
from weighin.files import object_in
from weighin.formats.pretrained_folder import BUILDER, CONFIG, MODEL_DTYPES, dtype_of, folder_of
from weighin.stream.slices import ITEM_BYTES, TensorSlice
from weighin.text import one_line

# -- the names of tensors

_FLOAT8: Final = frozenset(
    {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
_BYTES: Final = frozenset({"int8", "uint8"})
_WORDS: Final = frozenset({"int32", "uint32", "int64"})


@dataclass(frozen=True, slots=True)
class Codes:
    """A tensor of codes.

    Attributes:
        method: the quantisation method by the suffixes of the names, such as "mxfp4".
        scales: the name of the tensor with the scales of the codes.
        elements: the number of weights in the codes; None if the shapes do not determine it.
    """

    where: TensorSlice
    method: str
    scales: str
    elements: int | None


@dataclass(frozen=True, slots=True)
class _Pair:
    """The suffixes that a method gives to codes and their scales, the dtypes of the codes, and how
    ``_elements`` counts the weights.
    """

    method: str
    codes: str
    scales: str
    dtypes: frozenset[str]
    counts: str


_ANY: Final = _FLOAT8 | _BYTES | _WORDS | {"bfloat16", "float16", "float32", "int16"}
_PAIRS: Final = (
    _Pair("bitsandbytes (nf4)", "", ".quant_state.bitsandbytes__nf4", _ANY, "two in a byte"),
    _Pair("bitsandbytes (fp4)", "", ".quant_state.bitsandbytes__fp4", _ANY, "two in a byte"),
    _Pair("bitsandbytes (int8)", ".weight", ".SCB", _BYTES, "each"),
    _Pair("mxfp4", "_blocks", "_scales", _BYTES, "two in a byte"),
    _Pair("gptq or awq", ".qweight", ".scales", _WORDS, "rows"),
    _Pair("compressed-tensors", "_packed", "_scale", _WORDS | _BYTES, "bits"),
    _Pair("torchao", "_qdata", "_scale", _ANY, "unknown"),
    _Pair("aqlm", ".codes", ".codebooks", _ANY, "codebooks"),
    _Pair("hqq", ".W_q", ".scale", _ANY, "bits"),
    _Pair("quanto", "._data", "._scale", _FLOAT8 | _BYTES, "each, or packed in uint8"),
    _Pair("eetq", ".weight", ".weight_scales", _BYTES, "each"),
    _Pair("mlx", ".weight", ".scales", _WORDS, "bits"),
    _Pair("vptq", ".indices", ".centroids.weight", _ANY, "unknown"),
    _Pair("scaled fp8", ".weight", ".scale_weight", _FLOAT8, "each"),
    _Pair("fp8 in blocks", "", "_scale_inv", _FLOAT8 | _BYTES, "each, or packed in uint8"),
    _Pair("codes of 8 or fewer bits", "", "_scale", _FLOAT8 | _BYTES, "each, or packed in uint8"),
)  # fmt: skip
"""The first pair whose suffixes and dtype fit applies. Several libraries use the last pair."""

_COMPANION: Final = re.compile(
    r"(\w*_)?(scales?|scale_inv|scale_2|scale_weight|scale_input|scale_and_zero|zero_point|zeros?"
    r"|qzeros|g_idx|shape|SCB|weight_format|biases|qbiases|codebooks|meta|shift)"
)
"""Matches the last part of the name of a tensor that belongs to codes, such as "zero_point"."""
_SCALES: Final = tuple(pair.scales for pair in _PAIRS)


def find_codes(slices: Sequence[TensorSlice], bits: int | None = None) -> list[Codes]:
    """Return the tensors of codes, in the order of ``slices``.

    A tensor counts as codes only if the method that has these suffixes stores codes in the tensor's
    dtype. ``bits`` is the size of one weight; None if the configuration does not say it.
    """
    by_name = {one.name: one for one in slices}
    scales = [name for name in by_name if name.endswith(_SCALES)]
    pairs = [pair for pair in _PAIRS if any(name.endswith(pair.scales) for name in scales)]
    found = []
    for name, where in by_name.items() if pairs else ():
        for pair in pairs:
            scale = name.removesuffix(pair.codes) + pair.scales
            if name.endswith(pair.codes) and where.dtype_name in pair.dtypes and scale in by_name:
                elements = _elements(pair, where, by_name, bits)
                found.append(Codes(where, pair.method, scale, elements))
                break
    return found


def _elements(
    pair: _Pair, codes: TensorSlice, by_name: Mapping[str, TensorSlice], bits: int | None
) -> int | None:
    """Return the number of weights in a tensor of codes; None if the shapes do not determine it."""
    beginning = codes.name.removesuffix(pair.codes)
    scales = by_name[beginning + pair.scales]
    if pair.counts == "two in a byte":
        bits = 4
    elif pair.counts == "each, or packed in uint8" and codes.dtype_name == "uint8":
        bits = bits if bits and bits < 8 else 4
    elif pair.counts.startswith("each"):
        return prod(codes.shape)
    elif pair.counts == "codebooks":
        is_known = len(scales.shape) == 4 and len(codes.shape) >= 2
        return prod(codes.shape[:2]) * prod(scales.shape[2:]) if is_known else None
    elif pair.counts == "rows":  # GPTQ packs along the first dimension, AWQ along the last
        if not scales.shape or len(codes.shape) != 2:
            return None
        if scales.shape[-1] != codes.shape[-1]:
            return codes.shape[0] * scales.shape[-1]
        if (places := by_name.get(beginning + ".g_idx")) is not None:
            return prod(places.shape) * codes.shape[-1]
    elif pair.counts == "unknown":
        bits = None
    return codes.nbytes * 8 // bits if bits else None


def _companions(slices: Sequence[TensorSlice], codes: Sequence[Codes]) -> set[str]:
    """Return the names of all tensors that belong to codes, such as scales and zero points."""
    coded = {one.where.name for one in codes}
    owned = coded | {name.removesuffix("._data") for name in coded}
    modules = {name.rpartition(".")[0] for name in owned}
    beside = {one.scales for one in codes}
    for one in slices:
        module, _, last = one.name.rpartition(".")
        named_so = module in modules and _COMPANION.fullmatch(last)
        if one.name not in coded and (named_so or any(up in coded for up in _parents(one.name))):
            beside.add(one.name)
    return beside


def _parents(name: str) -> Iterator[str]:
    while (name := name.rpartition(".")[0]) != "":
        yield name


# -- the whole checkpoint

_QUANTISATION: Final = "quantization_config"
_OF_TEXT: Final = ("text_config", "decoder", "generator")
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
class Quantised:
    """How a checkpoint is quantised.

    Attributes:
        method: the method's name and variant: "fp8", "compressed-tensors (pack-quantized)".
        weights: the number of tensors that hold codes; 0 if only ``config.json`` names the method.
        stored_bytes: the size of all tensors in the files.
        dequantised_bytes: the size of all weights in ``dtype``; None if the shapes do not determine it.
        dtype: the dtype of the dequantised model.
        packages: the packages that from_pretrained needs in addition to transformers.
        obstacle: the reason why from_pretrained does not dequantise the codes; empty if it does.
        repair: what the user can do about the obstacle.
        dequantises: whether transformers dequantises the codes.
    """

    method: str
    weights: int
    stored_bytes: int
    dequantised_bytes: int | None
    dtype: str
    packages: tuple[str, ...] = ()
    obstacle: str = ""
    repair: str = ""
    dequantises: bool = False

    @property
    def summary(self) -> str:
        """A part of a message: the method, the number of tensors of codes, and the sizes."""
        from weighin.units import format_bytes  # imports decimal, which few loads need

        if not self.weights:
            return f"quantised with {self.method}, as the configuration says"
        sizes = f"{format_bytes(self.stored_bytes)} as stored"
        if self.dequantised_bytes is not None:
            sizes += f", {format_bytes(self.dequantised_bytes)} as {self.dtype}"
        count = f"{self.weights:,} tensors are" if self.weights > 1 else "1 tensor is"
        return f"quantised with {self.method}: {count} codes that mean something only with their scales ({sizes})"

    @property
    def needed(self) -> str:
        """The packages that ``from_pretrained`` needs, as a part of a message."""
        return ", ".join(["transformers", *self.packages])

    @property
    def loaders(self) -> str:
        """The functions that load the codes, as a part of a message."""
        ours = "load_pretrained, strategy streaming and convert --keys model dequantise them, and "
        return (ours if self.dequantises else "") + "from_pretrained loads them"

    def error(self, path: Path) -> CheckpointError:
        """Return the error for a loader that would take the codes for weights."""
        if self.obstacle:
            return CheckpointError(f"{path}: {self.summary}; {self.obstacle}", self.repair)
        if self.dequantises:
            bench = f"weighin bench {quote(str(folder_of(path)))}"
            return CheckpointError(
                f"{path}: {self.summary}; only the model of this folder takes them, dequantised",
                f"load it with load_pretrained (needs {self.needed}), or write the weights:"
                f" weighin convert {quote(str(folder_of(path)))} NEW.safetensors --keys model; to measure"
                f" this load: {bench} --strategies streaming,transformers",
            )
        return CheckpointError(
            f"{path}: {self.summary}; weighin does not dequantise them",
            f"load it with from_pretrained (needs {self.needed}); to measure this load: weighin bench"
            f" {quote(str(folder_of(path)))} --strategies transformers",
        )

    @classmethod
    def of_argument(cls, fields: Mapping[str, Any]) -> "Quantised":
        """Return the object that ``as_argument`` described.

        Raises:
            TypeError, KeyError: the description is damaged.
        """
        known = {name: value for name, value in fields.items() if name != "own"}  # until 1.0
        return cls(**{**known, "packages": tuple(fields["packages"])})

    def as_argument(self) -> dict[str, Any]:
        """Return the attributes as a dict for a ``ModelSpec``; ``of_model`` reads this dict."""
        return asdict(self) | {"packages": list(self.packages)}


def of_model(model: ModelSpec) -> Quantised | None:
    """Return how a model's weights are quantised; None for a model whose folder has no codes.

    Raises:
        ConfigError: the argument ``quantised`` is damaged, as after an edit of the run's plan.
    """
    fields = model.kwargs.get("quantised") if model.builder == BUILDER else None
    if fields is None:
        return None
    try:
        return Quantised.of_argument(fields)
    except (TypeError, KeyError):
        raise ConfigError(
            f"the plan is damaged: the argument `quantised` of the model {model.name} is not a"
            " description of quantised weights",
            "start a new run",
        ) from None


def of_folder(
    folder: Path, config: Mapping[str, Any], slices: Sequence[TensorSlice]
) -> Quantised | None:
    """Return how the weights of a Hugging Face folder are quantised; None if no weight is quantised.

    In a folder without codes, ``config.json`` may still name a method. Such a method counts only if
    transformers has it, because from_pretrained ignores any other method.
    """
    described, place = _described(folder, config)
    method = _method(described)
    codes = find_codes(slices, _bits(described))
    if not (codes or (place == _QUANTISATION and method in _NEEDED)):
        return None
    beside = _companions(slices, codes)
    dtype = _dtype(config, slices, {one.where.name for one in codes} | beside)
    obstacle, repair = _obstacle(method, place)
    return Quantised(
        method=_shown(described) or codes[0].method,
        weights=len(codes),
        stored_bytes=sum(one.nbytes for one in _once(slices)),
        dequantised_bytes=_dequantised_bytes(slices, codes, beside, dtype) if codes else None,
        dtype=dtype,
        packages=_NEEDED.get(method or "", ()),
        obstacle=obstacle,
        repair=repair,
        dequantises=_is_dequantised(described) and not obstacle,
    )


def in_checkpoint(path: Path, slices: Sequence[TensorSlice]) -> Quantised | None:
    """Return how a checkpoint is quantised; None if the checkpoint has no codes.

    ``path`` is a file or a folder; a ``config.json`` in the folder may name the method.
    """
    folder = folder_of(path)
    found = of_folder(folder, object_in(folder / CONFIG), slices)
    return found if found and found.weights else None


def refuse_codes(path: Path, slices: Sequence[TensorSlice], names: Iterable[str]) -> None:
    """Raise CheckpointError if a model would take quantised codes for weights.

    ``names`` are the names of the model's tensors. A model with tensors for the scales, such as
    the built-in gpt-oss-20b, takes the codes and the scales as they are.
    """
    codes = find_codes(slices)
    if not codes:
        return
    places = {_last(name) for name in names}
    if any(_last(one.scales) not in places for one in codes) and (
        found := in_checkpoint(path, slices)
    ):
        raise found.error(path)


def dequantising(folder: Path) -> dict[str, Any]:
    """Return the ``quantization_config`` with which from_pretrained dequantises on every device.

    The result is empty if the folder is not quantised, or from_pretrained cannot dequantise it.
    """
    described, place = _described(folder, object_in(folder / CONFIG))
    if place != _QUANTISATION or not _is_dequantised(described):
        return {}
    return {**described, "dequantize": True}


def method_of(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the method and variant that a folder names, for messages; empty if it names none."""
    return _shown(_described(folder, config)[0])


def _dtype(config: Mapping[str, Any], slices: Sequence[TensorSlice], without: set[str]) -> str:
    """Return the dtype in ``config.json``, else that of most bytes; skip names in ``without``."""
    with suppress(ConfigError):
        if (named := dtype_of(config)) in MODEL_DTYPES:
            return named
    sizes: dict[str, int] = {}
    for one in slices:
        if one.name not in without and one.dtype_name in MODEL_DTYPES:
            sizes[one.dtype_name] = sizes.get(one.dtype_name, 0) + one.nbytes
    return max(sizes, key=lambda name: sizes[name], default="bfloat16")


def _dequantised_bytes(
    slices: Sequence[TensorSlice], codes: Sequence[Codes], beside: set[str], dtype: str
) -> int | None:
    elements = {one.where.name: one.elements for one in codes}
    if None in elements.values():
        return None
    item, total = ITEM_BYTES[dtype], 0
    for one in _once(slices):
        if one.name in elements:
            total += (elements[one.name] or 0) * item
        elif one.name not in beside:
            total += prod(one.shape) * item if one.dtype_name in MODEL_DTYPES else one.nbytes
    return total


def _once(slices: Sequence[TensorSlice]) -> list[TensorSlice]:
    return list({(one.file, one.offset, one.shape, one.name * (not one.nbytes)): one
                 for one in reversed(slices)}.values())  # fmt: skip


def _last(name: str) -> str:
    return name.rpartition(".")[2]


# -- the configuration


def _described(folder: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the description of the quantisation, and the key or file that has the description.

    The second value is "quantization_config" only if from_pretrained reads the description. Without
    a description, the first value is empty, and the second is "" or "no config.json".
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


def _is_dequantised(named: Mapping[str, Any]) -> bool:
    return named.get("format") in _DEQUANTISED.get(_method(named) or "", ())


def _shown(named: Mapping[str, Any]) -> str:
    name = (_method(named) or "").replace("_4bit", " 4-bit").replace("_8bit", " 8-bit")
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
