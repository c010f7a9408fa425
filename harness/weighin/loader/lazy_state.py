"""Make a checkpoint's state dict with tensors that have no values yet, and read single tensors."""

import mmap
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any, Final

import torch

from weighin.construction.deferred import DeferredLoad, WriteLog
from weighin.errors import CheckpointError
from weighin.formats.base import Slices, TensorSlice
from weighin.loader import fill
from weighin.loader.disk_readers import DiskReaders
from weighin.loader.huge_pages import MAP_NORESERVE, TENSOR_ALIGNMENT
from weighin.loader.pieces import Fill, file_order, is_readable
from weighin.text import plain

FILLED_DEVICES: Final = frozenset({"cpu", "cuda"})
"""The devices whose memory the loader fills piece by piece. torch fills others from a CPU copy."""


class LazyState(Mapping[str, Any]):
    """The state dict of a checkpoint, with tensors that have no values yet.

    The state dict creates a tensor when the tensor is first looked up. A tensor without values only
    reserves address space, and takes memory only if a module's code reads its values.

    Args:
        log: records the source from which each created tensor will get its values.
        values: the state dict's values that are no tensors.

    Attributes:
        sources: each tensor's file and offset, in the order of the keys; None for a value that is no
            tensor.
        metadata: the modules' version metadata; None if the checkpoint has none.

    Raises:
        CheckpointError: weighin cannot dequantise a tensor, or a tensor is stored in several blocks
            of which one has gaps. ``torch.distributed.checkpoint`` never writes such gaps.
    """

    def __init__(self, log: WriteLog, slices: Slices, values: Mapping[str, Any]) -> None:
        self._log = log
        self._numbers: dict[str, int] = {}
        self._values: dict[str, Any] = {}
        self.sources: list[TensorSlice | None] = []
        self.metadata = slices.metadata
        for number, source in enumerate(slices):
            if source.parts or source.encoding:
                _check_blocks(source)
            self._numbers[source.name] = number
        self.sources += slices
        for name, value in values.items():
            self._numbers[name] = len(self.sources)
            self._values[name] = value
            self.sources.append(None)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._made(self._numbers[name])
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def all(self) -> dict[str, Any]:
        """Return the whole state dict as an ``OrderedDict`` with the attribute ``_metadata``."""
        state = OrderedDict(self)
        if self.metadata is not None:
            state._metadata = self.metadata  # type: ignore[attr-defined]
        return state

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each value; () for values that are no tensors."""
        places = zip(self, self.sources, strict=True)
        return {name: source.shape if source else () for name, source in places}

    @cached_property
    def _reserved(self) -> tuple[mmap.mmap, list[int]]:
        """Address space for all tensors, and the offset of each tensor within this space."""
        offsets, length = [], 0
        for source in self.sources:
            offsets.append(length)
            size = source.span * source.dtype.itemsize if source else 0
            length += -(-size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | MAP_NORESERVE), offsets

    def _made(self, number: int) -> torch.Tensor:
        source = self.sources[number]
        assert source is not None
        if count := source.span:
            memory, offsets = self._reserved
            flat = torch.frombuffer(memory, dtype=source.dtype, count=count, offset=offsets[number])
            tensor = flat.as_strided(source.shape, source.stride)
        else:
            tensor = torch.empty_strided(source.shape, source.stride, dtype=source.dtype)
        self._log.promise(tensor, source)
        return tensor


def read_at_once(load: DeferredLoad) -> None:
    """Fill the target of one load, even if its values are only a view of a tensor in the file."""
    source, target = source_of(load), load.target
    direct = target.device.type in FILLED_DEVICES
    if direct and source is not None and is_readable(source) and not source.encoding:
        _fill(source, target)
        return
    promised, view = load.promise, load.source
    count = prod(promised.shape) if promised.parts else promised.span
    flat = torch.empty(count, dtype=promised.dtype)
    if promised.parts:
        _fill(promised, flat.view(promised.shape))
    else:
        _fill(replace(promised, shape=(count,), stride=(1,)), flat)
    if torch._debug_has_internal_overlap(target) == 1:  # an expanded tensor of the state dict
        target = target.as_strided((count,), (1,), target.storage_offset())
        target.copy_(flat)
        return
    if view is None:
        target.copy_(flat.as_strided(promised.shape, promised.stride))
        return
    target.copy_(flat.as_strided(view.shape, view.stride(), view.storage_offset()))


def _fill(source: TensorSlice, target: torch.Tensor) -> None:
    with fill.being_filled([Fill(source, target)], DiskReaders(1)):
        pass


def source_of(load: DeferredLoad) -> TensorSlice | None:
    """Return the range of the file from which a load reads.

    ``source_of`` returns None for a view with another dtype than the file's tensor, and for a part
    of a tensor that is quantised or stored in several blocks.
    """
    promised: TensorSlice = load.promise
    view = load.source
    if view is None:
        return promised
    same = (tuple(view.shape), view.stride()) == (promised.shape, promised.stride)
    if same and not view.storage_offset() and view.dtype == promised.dtype:
        return promised
    if promised.parts or promised.encoding or view.dtype != promised.dtype:
        return None
    offset = promised.offset + int(view.storage_offset()) * view.element_size()
    return replace(promised, shape=tuple(view.shape), stride=tuple(view.stride()), offset=offset)


def _check_blocks(source: TensorSlice) -> None:
    if source.encoding:
        raise CheckpointError(
            f"{source.file}: {plain(source.name)} is quantised to {source.encoding}, which load_streaming"
            " does not dequantise",
            "first write the dequantised values into a folder, and load that folder: weighin"
            f" convert {source.file} FOLDER --keys model",
        )
    for part in source.parts:
        where = part.where
        if file_order(where) is None:
            raise CheckpointError(
                f"{where.file}: the part of {source.name!r} at byte {where.offset:,} has gaps between its "
                "elements",
                "rewrite the checkpoint with each tensor in one block: "
                f"weighin convert {where.file.parent} WHOLE --format dcp",
            )
