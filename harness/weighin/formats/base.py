"""What every layout of a checkpoint on the disk can do, and the words for what lies in one.

A layout is a module of this package with ``NAME``, ``SUFFIX``, ``matches``, ``files``, ``read`` and
``write``. ``read`` reads no tensor data: it says where each tensor lies, so that a loader can read it
straight into place, whatever the layout. The parent uses all but the last: a layout imports torch
inside ``write`` only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weighin.formats.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    import torch

Pieces = Callable[[str], Iterable["torch.Tensor"]]
"""From a name to its elements in order, as contiguous tensors of any sizes."""

Progress = Callable[[int], None]
"""Called with the bytes written since the last call, from any thread."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor that is stored in several: where it begins in the tensor, and in a file."""

    start: tuple[int, ...]
    where: "TensorSlice"


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One key of a state dict as a stretch of a file.

    Attributes:
        stride: in elements.
        dtype_name: as torch calls it, "float32".
        offset: in bytes, from the file's start to the tensor's first element.
        storage_offset: in bytes, from the file's start to the storage that the tensor views;
            equal, in one file, for keys that share it (tied weights, views).
        storage_bytes: the length of that storage.
        parts: the blocks that tile a tensor which lies in several; file and offsets are then the
            first one's. Empty for a tensor that lies in one place.
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

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, without what a stride leaves out."""
        return prod(self.shape) * ITEM_BYTES[self.dtype_name]

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype itself; imports torch."""
        import torch  # nothing else of a slice needs it, and `weighin inspect` answers at once

        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one behind the other, in row-major order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size not in (0, 1) and step != expected:
                return 0 in self.shape
            expected *= max(size, 1)
        return True


class Slices(list[TensorSlice]):
    """The tensors of a checkpoint, in the state dict's order.

    ``metadata``: what ``torch.save`` keeps of each module's version, by the module's name, from which
    ``load_state_dict`` tells older checkpoints; None where the layout keeps none.
    """

    metadata: Mapping[str, Mapping[str, object]] | None = None


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to write. ``shared_with`` is the first name of its group of tied names, or None."""

    name: str
    shape: tuple[int, ...]
    dtype: "torch.dtype"
    shared_with: str | None = None


class Layout(Protocol):
    """What a module of this package offers."""

    NAME: str
    SUFFIX: str
    """How a checkpoint of one file ends, ".pt"; empty where it is a folder."""

    def matches(self, path: Path) -> bool:
        """Tell whether ``path`` looks like this layout, by its name and its first bytes."""
        ...

    def files(self, path: Path) -> list[Path]:
        """Return every file that a load may read, in a stable order; CheckpointError as ``read``."""
        ...

    def read(self, path: Path) -> list[TensorSlice]:
        """Return all tensors in the state dict's order; every one lies inside its file.

        Raises:
            CheckpointError: names the file, what is wrong, and where. Nothing in the file is
                executed, and nothing outside ``path`` is read.
        """
        ...

    def write(
        self,
        target: Path,
        tensors: Sequence[TensorPlan],
        pieces: Pieces,
        progress: Progress | None = None,
    ) -> None:
        """Write a checkpoint to ``target``, a file or a folder that does not exist yet.

        ``pieces`` is called once for each tensor that is not tied to an earlier one. Anonymous
        memory stays below a few pieces; files are synced and dropped from the page cache.
        """
        ...
