"""Fill many small tensors in their present memory, hundreds of them by one vectored read.

A tensor of at most 64 KiB gains nothing from huge pages. With many small tensors, function calls
take most of the load time. One system call therefore fills many tensors.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from weighin.construction.deferred import DeferredLoad
from weighin.formats.base import TensorSlice
from weighin.loader.direct_io import (
    DISK_THREADS,
    MOST_UNUSED_BYTES,
    PIECE_BYTES,
    DiskReaders,
    PieceReader,
    Readers,
)
from weighin.loader.fill import cache_threads, one_thread_each

SMALL_BYTES: Final = 64 * 1024
_LEAST_TENSORS: Final = 16  # fewer adjacent tensors are read together with larger tensors
# preadv takes 1024 buffers, and a tensor and the gap before it take two.
_MOST_TENSORS: Final = 500
_MOST_PROBED: Final = 16  # reads


@dataclass(frozen=True, slots=True)
class Group:
    """A range of a file with the bytes of several tensors, and these tensors in the file's order."""

    file: Path
    offsets: list[int]
    tensors: list[torch.Tensor]

    @property
    def start(self) -> int:
        return self.offsets[0]

    @property
    def nbytes(self) -> int:
        """The size of the read that fills all tensors, in bytes."""
        return self.offsets[-1] + self.tensors[-1].nbytes - self.start

    def parts(self, most_bytes: int) -> Iterator["Group"]:
        """Yield the group, divided into parts whose reads have at most ``most_bytes``."""
        if self.nbytes <= most_bytes:
            yield self
            return
        first, count = 0, len(self.tensors)
        ends = [at + one.nbytes for at, one in zip(self.offsets, self.tensors, strict=True)]
        while first < count:
            last = bisect_right(ends, self.offsets[first] + most_bytes, first + 1)
            yield Group(self.file, self.offsets[first:last], self.tensors[first:last])
            first = last


def divide(
    loads: Sequence[DeferredLoad], device: torch.device, dtype: torch.dtype | None
) -> tuple[list[Group], list[DeferredLoad]]:
    """Return groups of adjacent small tensors that need no conversion, and all other loads.

    Args:
        loads: sorted by file and offset. Fewer than 16 adjacent small tensors make no group.
        device, dtype: those of the model after the load; None as dtype keeps each tensor's dtype.
    """
    groups: list[Group] = []
    others: list[DeferredLoad] = []
    run: list[DeferredLoad] = []
    on_cpu = device.type == "cpu"

    def close() -> None:
        if len(run) < _LEAST_TENSORS:
            others.extend(run)
        else:
            offsets = [load.promise.offset for load in run]
            groups.append(Group(run[0].promise.file, offsets, [load.target for load in run]))
        run.clear()

    start = end = 0
    file: Path | None = None
    for load in loads:
        if not (on_cpu and _needs_bytes_alone(load, dtype)):
            close()
            others.append(load)
            continue
        source: TensorSlice = load.promise
        offset, last = source.offset, source.offset + load.target.nbytes
        if run and (
            not 0 <= offset - end <= MOST_UNUSED_BYTES
            or last - start > PIECE_BYTES
            or len(run) == _MOST_TENSORS
            or (source.file is not file and source.file != file)
        ):
            close()
        if not run:
            start, file = offset, source.file
        run.append(load)
        end = last
    close()
    return groups, others


def _needs_bytes_alone(load: DeferredLoad, dtype: torch.dtype | None) -> bool:
    """Tell whether a CPU tensor is small, and its bytes in the file are its bytes in memory.

    Such a tensor keeps its dtype, and is contiguous in the file and in memory.
    """
    target, source = load.target, load.promise
    return (
        load.source is None
        and 0 < target.nbytes <= SMALL_BYTES
        and target.is_cpu
        and target.dtype == source.dtype
        and (dtype is None or target.dtype == dtype or not target.is_floating_point())
        and not source.parts
        and not source.encoding
        and target.is_contiguous()
        and bool(source.contiguous)
    )


def buffer_bytes(groups: Sequence[Group], threads: int | None) -> int:
    """Return the size in bytes of all threads' buffers together, for files that are not cached."""
    return sum(sorted(group.nbytes for group in groups)[-(threads or DISK_THREADS) :])


def fill_all(groups: Sequence[Group], disk: DiskReaders) -> None:
    """Read the values of all groups; the first error ends the load.

    Args:
        disk: chooses the number of threads if the files are not cached.
    """
    if not groups:
        return
    with closing(PieceReader()) as reader:
        if _is_cached(groups, reader):
            readers = Readers(disk.threads or cache_threads())
        else:
            largest = max(groups, key=lambda group: group.nbytes)
            readers = disk.of(reader, largest.file, largest.start, largest.nbytes)
    waiting = deque(part for group in groups for part in group.parts(readers.piece_bytes))
    with one_thread_each, ThreadPoolExecutor(readers.threads) as pool:
        futures = [pool.submit(_fill_some, waiting, readers) for _ in range(readers.threads)]
        for future in futures:
            future.result()


def _is_cached(groups: Sequence[Group], reader: PieceReader) -> bool:
    return all(
        reader.opened(group.file).is_cached(group.start, group.nbytes)
        for group in groups[:: len(groups) // _MOST_PROBED + 1]
    )


def _fill_some(waiting: deque[Group], readers: Readers) -> None:
    with closing(PieceReader(None, readers.piece_bytes)) as reader:
        while waiting:
            try:
                group = waiting.popleft()
            except IndexError:  # another thread took the last group
                return
            places = [
                (offset, tensor.data_ptr(), tensor.nbytes)
                for offset, tensor in zip(group.offsets, group.tensors, strict=True)
            ]
            reader.scatter(group.file, places)
