"""Define the interface of a checkpoint format, and the types that describe a checkpoint's tensors.

A format is a module of this package with ``NAME``, ``SUFFIX``, ``matches``, ``files``, ``read`` and
``write``. ``read`` returns each tensor's file and offset and reads no tensor data, so that a loader
can read any format straight into a model. Only ``write`` imports torch, because weighin's own
process, which must not import torch, calls only the other functions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar, dataclass_transform

from weighin.errors import CheckpointError
from weighin.formats.dtypes import ITEM_BYTES
from weighin.text import shown

if TYPE_CHECKING:
    import torch

Pieces = Callable[[str], Iterable["torch.Tensor"]]
"""A function that takes a tensor's name and yields the tensor's elements in order, as contiguous
tensors of any sizes."""

Progress = Callable[[int], None]
"""A function that every writing thread calls with the number of bytes that it has just written."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of several blocks of a tensor: the indexes of its first element, and its place."""

    start: tuple[int, ...]
    where: "TensorSlice"


Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen_in_types(kind: type[Kind]) -> type[Kind]:
    """Make a slotted dataclass whose fields mypy treats as read-only.

    The class is not really frozen, because a checkpoint may have 100,000 tensors, and making an
    instance of a frozen dataclass takes five times as long.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)


@frozen_in_types
class TensorSlice:
    """One tensor of a state dict and its place in a file.

    Attributes:
        stride: the stride of each dimension, in elements.
        dtype_name: torch's name of the dtype, such as "float32".
        offset: the distance in bytes from the file's start to the tensor's first element.
        storage_offset: the distance in bytes from the file's start to the storage that the tensor
            views. Tensors of one file that share a storage (tied weights, views) have the same
            ``storage_offset``.
        storage_bytes: the length of that storage, in bytes.
        encoding: the quantised type in which a GGUF file stores the elements ("Q4_K"); empty for
            elements stored in ``dtype_name``.
        parts: the blocks of a tensor that is stored in several blocks. The blocks cover the tensor;
            ``file`` and the offsets are those of the first block. The tuple is empty for a tensor
            in one block.
        fill: a function that computes the tensor's values, for example from quantised codes and
            scales. The function writes the values into a tensor of the shape ``shape``, in that
            tensor's dtype. Several threads may call the functions of different tensors at the same
            time. None for a tensor whose elements are in the file.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype_name: str
    file: Path
    offset: int
    storage_offset: int
    storage_bytes: int
    parts: tuple[Part, ...] = ()
    encoding: str = ""
    fill: "Callable[[torch.Tensor], None] | None" = None

    @property
    def nbytes(self) -> int:
        """The size in bytes of all elements in ``dtype_name``, without the gaps between them."""
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
        parts = tuple((part.start, part.where.file, part.where.offset) for part in self.parts)
        return self.file, self.offset, self.dtype_name, self.shape, self.stride, parts

    @property
    def read_order(self) -> tuple[str, int]:
        """The key by which loaders sort their reads: the file's path, and the tensor's offset."""
        return str(self.file), self.offset

    @property
    def dtype(self) -> "torch.dtype":
        """The tensor's ``torch.dtype``.

        Raises:
            CheckpointError: this version of torch does not have the dtype.
        """
        dtype = _torch_dtype(self.dtype_name)
        if dtype is None:
            import torch  # not at the top: `weighin inspect` needs no torch

            raise CheckpointError(
                f"{self.file}: {shown(self.name)} has the dtype {self.dtype_name}; torch"
                f" {torch.__version__} does not have this dtype",
                "use a later version of torch",
            )
        return dtype

    @property
    def contiguous(self) -> bool:
        return _is_row_major(self.shape, self.stride)


@lru_cache
def _torch_dtype(name: str) -> "torch.dtype | None":
    import torch

    return getattr(torch, name, None)


@lru_cache
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor that is stored without gaps in row-major order."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache
def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size not in (0, 1) and step != expected:
            return 0 in shape
        expected *= max(size, 1)
    return True


class Slices(list[TensorSlice]):
    """The tensors of a checkpoint, in the state dict's order.

    Attributes:
        metadata: maps each module's name to its version metadata, by which ``load_state_dict`` detects
            older checkpoints; None if the format does not store such metadata.
        values: maps the names of the state dict's values other than tensors, such as an extra
            state, to records of ``stream.pickles``.
        refused: the name of the first class or function in the file that
            torch.load(weights_only=True) refuses; empty if torch.load refuses none.
        notes: sentences on contradictions between the checkpoint's files, such as an index that
            names another shard. These contradictions do not change the result of a load.
    """

    metadata: Mapping[str, Mapping[str, object]] | None = None
    values: Mapping[str, object] = MappingProxyType({})
    refused: str = ""
    notes: tuple[str, ...] = ()

    @property
    def only_tensors(self) -> bool:
        """Whether torch.load(weights_only=True) reads the file as a state dict of tensors alone."""
        return not (self.values or self.refused)

    def without(self, prefix: str, *, only: bool = False) -> "Slices":
        """Return the tensors and values with ``prefix``, "module.", removed from their names.

        With ``only``, names without the prefix are left out. Modules' names in ``metadata`` lose the
        prefix as in ``torch.nn.modules.utils.consume_prefix_in_state_dict_if_present``.
        """
        renamed = Slices(
            replace(one, name=one.name.removeprefix(prefix))
            for one in self
            if not only or one.name.startswith(prefix)
        )
        renamed.values = {
            name.removeprefix(prefix): one
            for name, one in self.values.items()
            if not only or name.startswith(prefix)
        }
        if self.metadata is not None:
            renamed.metadata = {
                f"{name}.".removeprefix(prefix).removesuffix("."): local
                for name, local in self.metadata.items()
                if name and (not only or f"{name}.".startswith(prefix))
            }
        renamed.refused, renamed.notes = self.refused, self.notes
        return renamed


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to write; ``shared_with`` names an earlier tensor that it is tied to, or is None."""

    name: str
    shape: tuple[int, ...]
    dtype: "torch.dtype"
    shared_with: str | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Plans = Sequence[TensorPlan]
"""The tensors to write, in the state dict's order."""


class ReadLayout(Protocol):
    """The interface of a checkpoint format that weighin reads."""

    NAME: str
    SUFFIX: str
    """The suffix of a checkpoint of one file, ".pt"; empty if a checkpoint is a folder."""

    def matches(self, path: Path) -> bool:
        """Tell by names and first bytes whether the file or folder at ``path`` has this format."""

    def files(self, path: Path) -> list[Path]:
        """Return every file that a load may read, in a stable order; raise as ``read`` does."""

    def read(self, path: Path) -> Slices:
        """Return the files and offsets of all tensors, in the state dict's order. No offset lies
        outside its file.

        ``read`` executes no code in the files, and reads no file outside the checkpoint's folder.

        Raises:
            CheckpointError: a file is damaged; the message names the file and the place of the
                damage.
        """


class Layout(ReadLayout, Protocol):
    """The interface of a checkpoint format that weighin also writes."""

    def write(
        self, target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None
    ) -> None:
        """Write a checkpoint to ``target``, a file or a folder that does not exist yet.

        ``write`` calls ``pieces`` for each tensor that is not tied to an earlier tensor, and needs
        anonymous memory for a few pieces (the format tensorizer: for the largest tensor). At the
        end, ``write`` syncs the files and drops them from the page cache.
        """
