"""Fill many small tensors in their present memory: one read for neighbours in a file.

A small tensor gains nothing from memory of its own in huge pages, and its costs are those of the calls
for it. So its present memory is filled, and one vectored read fills hundreds of tensors.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from weighin.formats.base import TensorSlice
from weighin.loader.direct_io import DISK_THREADS, MOST_UNUSED_BYTES, PIECE_BYTES, PieceReader
from weighin.loader.fill import cache_threads, one_thread_each
from weighin.models.deferred import DeferredLoad

SMALL_BYTES: Final = 64 * 1024
_LEAST_TENSORS: Final = 16  # side by side; fewer are read with the large tensors around them
_MOST_TENSORS: Final = 500  # in one read: a tensor and a gap are two of the 1024 buffers of preadv
_MOST_PROBED: Final = 16  # reads


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbours in a file, in its order, and the tensors that receive their bytes."""

    file: Path
    start: int
    end: int
    offsets: list[int]
    tensors: list[torch.Tensor]


def divide(
    loads: Sequence[DeferredLoad], device: torch.device, dtype: torch.dtype | None
) -> tuple[list[Group], list[DeferredLoad]]:
    """Return the groups of small tensors that only need their bytes, and all other loads.

    Args:
        loads: sorted by file and offset.
        device, dtype: of the loaded model; None keeps each tensor's dtype.
    """
    groups: list[Group] = []
    others: list[DeferredLoad] = []
    run: list[DeferredLoad] = []
    on_cpu = device.type == "cpu"

    def close() -> None:
        if len(run) < _LEAST_TENSORS:
            others.extend(run)
        else:
            groups.append(_group(run))
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
    """Tell whether a tensor is small and keeps its dtype, and its bytes lie side by side in the file."""
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


def _group(run: Sequence[DeferredLoad]) -> Group:
    offsets = [load.promise.offset for load in run]
    tensors = [load.target for load in run]
    return Group(
        run[0].promise.file, offsets[0], offsets[-1] + tensors[-1].nbytes, offsets, tensors
    )


def buffer_bytes(groups: Sequence[Group], threads: int | None) -> int:
    """Return the size of all threads' buffers in bytes where no file is cached."""
    return sum(sorted(group.end - group.start for group in groups)[-(threads or DISK_THREADS) :])


def fill_all(groups: Sequence[Group], threads: int | None) -> None:
    """Read the values of all groups; the first error ends the load.

    Args:
        threads: the number of threads; None chooses it, which depends on whether the files are cached.
    """
    if not groups:
        return
    threads = threads or (cache_threads() if _is_cached(groups) else DISK_THREADS)
    with one_thread_each, ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_fill_some, groups[n::threads]) for n in range(threads)]
        for future in futures:
            future.result()


def _is_cached(groups: Sequence[Group]) -> bool:
    with closing(PieceReader()) as reader:
        return all(
            reader.is_cached(group.file, group.start, group.end - group.start)
            for group in groups[:: len(groups) // _MOST_PROBED + 1]
        )


def _fill_some(groups: Sequence[Group]) -> None:
    with closing(PieceReader()) as reader:
        for group in groups:
            tensors = group.tensors
            places = [
                (offset, tensor.data_ptr(), tensor.nbytes)
                for offset, tensor in zip(group.offsets, tensors, strict=True)
            ]
            reader.scatter(group.file, places)
