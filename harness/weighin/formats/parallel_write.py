"""Write tensors' bytes at given offsets of a new file, with several threads and bounded memory."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from weighin.formats.base import Pieces, Progress, TensorPlan
from weighin.formats.zip_writer import (
    Flusher,
    finish,
    leaves_holes,
    run_parallel,
    write_all,
    written,
)

Place = tuple[TensorPlan, int]
"""A tensor to write, and its offset in the file in bytes."""


def write_raw(
    path: Path,
    fixed: Mapping[int, bytes],
    places: Sequence[Place],
    pieces: Pieces,
    progress: Progress | None,
) -> None:
    """Write a new file: the bytes in ``fixed`` at their offsets, and the tensors in ``places``.

    The written file is synced and dropped from the page cache.

    Raises:
        ValueError: the pieces of a tensor together have another size than the tensor.
    """
    with path.open("xb") as file:
        ends = [at + plan.nbytes for plan, at in places]
        os.ftruncate(file.fileno(), max([*ends, *(at + len(text) for at, text in fixed.items())]))
        for at, text in fixed.items():
            write_all(file.fileno(), memoryview(text), at)
        flusher = Flusher(file.fileno(), progress)
        run_parallel(
            partial(_write_one, file.fileno(), plan, at, pieces, flusher) for plan, at in places
        )
        finish(file.fileno())
        os.fsync(file.fileno())


def _write_one(
    descriptor: int, plan: TensorPlan, start: int, pieces: Pieces, flusher: Flusher
) -> None:
    if not leaves_holes():
        for _ in written(descriptor, start, plan.nbytes, pieces(plan.name), flusher):
            pass
