"""Tell how a checkpoint is quantised, which packages ``from_pretrained`` needs, and how many bytes
the weights take.

``quantisation_config`` finds the method in the configuration, and ``companions`` recognises it by
the tensors' names. A loader that takes the codes of a quantised weight for the weight
itself gets wrong values without any error.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

from weighin.cell import ModelSpec
from weighin.errors import CheckpointError, ConfigError
from weighin.files import object_in
from weighin.formats.base import TensorSlice
from weighin.formats.companions import Codes, companions, find_codes
from weighin.formats.dtypes import ITEM_BYTES
from weighin.formats.pretrained_folder import BUILDER, CONFIG, MODEL_DTYPES, dtype_of, folder_of
from weighin.formats.quantisation_config import named_in


@dataclass(frozen=True, slots=True)
class Quantised:
    """How a checkpoint is quantised.

    Attributes:
        method: the method's name and variant: "fp8", "compressed-tensors (pack-quantized)".
        weights: the number of tensors that hold codes; 0 if only ``config.json`` names the method.
        stored_bytes: the size of all tensors in the files.
        dequantised_bytes: the size of all weights in ``dtype``; None if the shapes do not determine it.
        dtype: the dtype of the dequantised model.
        packages, obstacle, repair: as in ``quantisation_config.NamedMethod``.
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
    named = named_in(folder, config)
    codes = find_codes(slices, named.bits)
    if not (codes or named.is_read):
        return None
    beside = companions(slices, codes)
    dtype = _dtype(config, slices, {one.where.name for one in codes} | beside)
    return Quantised(
        method=named.name or codes[0].method,
        weights=len(codes),
        stored_bytes=sum(one.nbytes for one in _once(slices)),
        dequantised_bytes=_dequantised_bytes(slices, codes, beside, dtype) if codes else None,
        dtype=dtype,
        packages=named.packages,
        obstacle=named.obstacle,
        repair=named.repair,
        dequantises=named.dequantised and not named.obstacle,
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
