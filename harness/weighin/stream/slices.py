"""What a reader returns: a checkpoint's tensors, and each one's place in the files; without torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import mul
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from weighin.errors import CheckpointError
from weighin.text import shown

if TYPE_CHECKING:  # pathlib takes 1 MiB in a worker
    from pathlib import Path

    import torch

ITEM_BYTES: Final = {  # of one element, for each dtype that weighin reads, writes and verifies
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip
LARGEST: Final = 2**63 - 1  # size or offset that torch can represent
MOST_DIMENSIONS: Final = 64
NOT_CONVERTED: Final = "float4_e2m1fn_x2"
_LONGEST: Final = 96 * 1024  # Linux limits one argument of a process to 128 KiB


def dtype_name(dtype: "torch.dtype") -> str:
    """Return the name of a dtype without "torch.": "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def is_sizes(value: object) -> bool:
    """Tell whether a value is a list or tuple of sizes that torch can represent."""
    return (
        isinstance(value, list | tuple)
        and len(value) <= MOST_DIMENSIONS
        and not [size for size in value if type(size) is not int or not 0 <= size <= LARGEST]
    )


@dataclass(slots=True, unsafe_hash=True)  # not frozen, which would take five times as long to make
class Slice:
    """One tensor of a state dict, and its place in a file: offsets in bytes from the file's start.

    Attributes:
        stride: of each dimension, in elements.
        dtype_name: torch's name of the dtype, such as "float32".
        storage_offset: of the storage that the tensor views, alone or with others.
        parts: the blocks that cover a tensor which is stored in several; ``file`` and the offsets are
            then those of the first block.
        start: of a block among ``parts``, the indexes of its first element in the whole tensor.
        encoding: the quantised type of the elements in a GGUF file ("Q4_K"); else empty.
        fill: writes computed values, in its dtype, into a tensor of this shape; called by several threads.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype_name: str
    file: "Path"
    offset: int
    storage_offset: int
    storage_bytes: int
    parts: "tuple[Slice, ...]" = ()
    start: tuple[int, ...] = ()
    encoding: str = ""
    fill: "Callable[[torch.Tensor], None] | None" = None

    @property
    def nbytes(self) -> int:
        """The size in bytes of all elements, without the gaps between them."""
        return prod(self.shape) * ITEM_BYTES[self.dtype_name]

    @property
    def span(self) -> int:
        """The number of elements from the tensor's first to its last, gaps included."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in steps)

    @property
    def place(self) -> object:
        """Where the tensor's elements are stored. Only tied tensors have equal places."""
        parts = tuple((part.start, part.file, part.offset) for part in self.parts)
        return self.file, self.offset, self.dtype_name, self.shape, self.stride, parts

    @property
    def dtype(self) -> "torch.dtype":
        """The tensor's ``torch.dtype``; CheckpointError if this version of torch has none."""
        import torch  # not at the top: `weighin inspect` needs no torch

        dtype: torch.dtype | None = getattr(torch, self.dtype_name, None)
        if dtype is None:
            raise CheckpointError(
                f"{self.file}: {shown(self.name)} has the dtype {self.dtype_name}; torch"
                f" {torch.__version__} does not have this dtype",
                "use a later version of torch",
            )
        return dtype

    @property
    def contiguous(self) -> bool:
        usual = row_major(self.shape)
        if self.stride == usual or 0 in self.shape:
            return True
        steps = zip(self.shape, self.stride, usual, strict=True)
        return all(size == 1 or step == one for size, step, one in steps)


class Fill(NamedTuple):
    """A tensor to fill, of any dtype and on any device, and the stored tensor to read."""

    where: Slice
    out: "torch.Tensor"


@lru_cache
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    steps = accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1)
    return tuple(steps)[::-1] if shape else ()


class Checkpoint(list[Slice]):
    """The tensors of a checkpoint, in the state dict's order.

    Attributes:
        files: every file that a load may read, in a stable order.
        metadata: the version metadata of each module by its name, for ``load_state_dict``; None if the
            format does not store them.
        values: the state dict's other values by name, such as an extra state: records of ``pickles``.
        refused: whether torch.load(weights_only=True) refuses a class or function in the file.
    """

    format: str = ""
    files: "tuple[Path, ...]" = ()
    metadata: Mapping[str, Mapping[str, object]] | None = None
    values: Mapping[str, object] = MappingProxyType({})
    refused: bool = False

    @property
    def only_tensors(self) -> bool:
        """Whether torch.load(weights_only=True) reads the file as a state dict of tensors alone."""
        return not (self.values or self.refused)

    def without(self, prefix: str, *, only: bool = False) -> "Checkpoint":
        """Return the checkpoint with ``prefix`` cut off; with ``only``, without names that lack it."""
        kept = prefix if only else ""
        names = [*(one.name for one in self), *self.values]
        short = {name: name.removeprefix(prefix) for name in names if name.startswith(kept)}
        found = Checkpoint(replace(one, name=short[one.name]) for one in self if one.name in short)
        vars(found).update(vars(self))
        found.values = {short[key]: value for key, value in self.values.items() if key in short}
        if self.metadata is not None:
            found.metadata = {
                f"{name}.".removeprefix(prefix).removesuffix("."): local
                for name, local in self.metadata.items()
                if name and f"{name}.".startswith(kept)
            }
        return found


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to write. ``shared_with`` names the earlier tensor to which this one is tied, or is None."""

    name: str
    shape: tuple[int, ...]
    dtype: "torch.dtype"
    shared_with: str | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Plans = Sequence[TensorPlan]  # in the state dict's order

Pieces = Callable[[str], Iterable["torch.Tensor"]]
"""Takes a tensor's name and yields the tensor's elements in order, as contiguous tensors of any sizes."""


def ties(slices: Sequence[Slice]) -> dict[str, str]:
    """Return a dict from each further name of a tied tensor to the tensor's first name."""
    firsts: dict[object, str] = {}
    found = {one.name: firsts.setdefault(one.place, one.name) for one in slices if one.nbytes}
    return {name: first for name, first in found.items() if name != first}


def are_equal(one: Slice, other: Slice) -> bool:
    """Tell whether two tensors of the same shape have the same dtype and the same bytes."""
    from weighin.stream.foreign import unreadable  # few reads compare

    if (one.file, one.offset) == (other.file, other.offset):
        return one.stride == other.stride
    if one.dtype_name != other.dtype_name:
        return False
    left, size = one.nbytes, 4096  # different tensors nearly always differ here
    try:
        with one.file.open("rb") as file, other.file.open("rb") as another:
            file.seek(one.offset)
            another.seek(other.offset)
            while left > 0:
                if file.read(min(left, size)) != another.read(min(left, size)):
                    return False
                left, size = left - size, 4 * 1024**2
    except OSError as error:
        raise unreadable(error.filename or one.file, error) from error
    return True


def check_converts(checkpoint: "Path", slices: Iterable[Slice], repair: str) -> None:
    """Raise CheckpointError with ``repair`` if torch cannot convert a tensor to another dtype."""
    for one in slices:
        if one.dtype_name == NOT_CONVERTED:
            raise CheckpointError(
                f"{checkpoint}: {shown(one.name)} has the dtype torch.{one.dtype_name}; torch can"
                " neither copy nor convert a tensor of this dtype",
                repair,
            )


def pack(slices: Sequence[Slice]) -> str:
    """Return tensors' names, shapes, dtypes and ties as a string, for ``from_tensors``."""
    import base64
    import json
    import zlib

    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    kind_of = [kinds.setdefault((one.dtype_name, one.shape), len(kinds)) for one in slices]
    names, tied = [one.name for one in slices], ties(slices)
    numbers = {name: number for number, name in enumerate(names)}
    tied_to = [numbers[name] - numbers[tied.get(name, name)] for name in names]  # mostly 0
    columns = [names, kind_of, tied_to, [[dtype, *shape] for dtype, shape in kinds]]
    data = json.dumps(columns, separators=(",", ":")).encode()
    text = base64.urlsafe_b64encode(zlib.compress(data, 9)).decode()
    if len(text) > _LONGEST:
        raise CheckpointError(
            f"the checkpoint has {len(slices):,} tensors, too many for weighin to build the model without its code",
            "name the function that builds the model: --model package.module:callable",
        )
    return text
