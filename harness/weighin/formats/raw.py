"""Write tensors' bytes at given offsets of a new file, with several threads and bounded memory."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from weighin.formats.base import Pieces, Progress, TensorPlan
from weighin.formats.zip_writer import _Flusher, _write_all, finish, leaves_holes, run_parallel

Place = tuple[TensorPlan, int]
"""A tensor to write, and its offset in the file in bytes."""


def plan_bytes(plan: TensorPlan) -> int:
    """Return the size of a tensor's elements in bytes."""
    return torch.Size(plan.shape).numel() * plan.dtype.itemsize


def write_raw(
    path: Path,
    fixed: Mapping[int, bytes],
    places: Sequence[Place],
    pieces: Pieces,
    progress: Progress | None,
) -> None:
    """Write a new file from ``fixed``, which maps offsets to bytes, and the tensors in ``places``.

    The file is synced and dropped from the page cache.

    Raises:
        ValueError: the pieces of a tensor have another total size than its plan.
    """
    with path.open("xb") as file:
        ends = [at + plan_bytes(plan) for plan, at in places]
        os.ftruncate(file.fileno(), max([*ends, *(at + len(text) for at, text in fixed.items())]))
        for at, text in fixed.items():
            _write_all(file.fileno(), memoryview(text), at)
        flusher = _Flusher(file.fileno(), progress)
        run_parallel(
            partial(_write_one, file.fileno(), plan, at, pieces, flusher) for plan, at in places
        )
        finish(file.fileno())
        os.fsync(file.fileno())


def _write_one(
    descriptor: int, plan: TensorPlan, start: int, pieces: Pieces, flusher: _Flusher
) -> None:
    if leaves_holes():
        return
    at, end = start, start + plan_bytes(plan)
    for piece in pieces(plan.name):
        data = memoryview(piece.detach().reshape(-1).view(torch.uint8).numpy().data)
        if at + len(data) > end:
            raise ValueError(
                f"{plan.name!r}: more than {end - start} bytes for a tensor of {end - start}"
            )
        _write_all(descriptor, data, at)
        at += len(data)
        flusher.wrote(len(data))
    if at != end:
        raise ValueError(f"{plan.name!r}: {at - start} bytes for a tensor of {end - start}")
