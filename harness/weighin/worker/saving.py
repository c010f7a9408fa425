"""The one save of this worker: the model before it, and its proof afterwards.

The model is loaded before the baseline, so that peaks above the baseline are what the save takes
beside the model. What was written is synced inside the clock, and read back outside of it.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weighin import formats
from weighin.atomic import sync_folder
from weighin.checkpoint.manifest import Manifest
from weighin.checkpoint.piecewise import RunningChecksum
from weighin.checkpoint.reader import read_pieces
from weighin.errors import CheckpointError
from weighin.formats.base import TensorSlice
from weighin.loader.load import load_streaming
from weighin.probes import page_cache
from weighin.record import Written
from weighin.strategy import Load
from weighin.worker.phases import Marks
from weighin.worker.verify import WrongWeights, complain, wanted_dtype


@dataclass(frozen=True, slots=True)
class WorkerSave:
    """``weighin.strategy.Save`` inside the measured process."""

    model: torch.nn.Module
    target: Path
    format: str
    options: Mapping[str, Any]
    marks: Marks

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.marks.phase(name)


def load_model(job: Load) -> torch.nn.Module:
    """Return the model that is to be saved; leaves none of its checkpoint's pages cached."""
    model = load_streaming(job.build_model, job.checkpoint, device=job.device)
    page_cache.drop(formats.files(job.checkpoint))
    return model


def sync(target: Path) -> None:
    """Wait until every file below ``target``, and its name, is on the disk."""
    for file in files_in(target):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        sync_folder(folder)


def files_in(target: Path) -> list[Path]:
    """Return every file below ``target``."""
    return sorted(path for path in target.rglob("*") if path.is_file())


def measure(target: Path) -> Written:
    """Return what a save has left."""
    stats = [file.stat() for file in files_in(target)]
    return Written(
        file_bytes=sum(one.st_size for one in stats),
        disk_bytes=sum(one.st_blocks * 512 for one in stats),
        files=len(stats),
    )


def check(target: Path, manifest: Manifest, dtype: torch.dtype) -> None:
    """Read back, from the disk, what was written; raise WrongWeights where it is not the model.

    Holds a few pieces of 16 MiB: it must not need more than the save was allowed.
    """
    page_cache.drop(files_in(target))
    try:
        slices = {one.name: one for one in formats.read(_checkpoint_in(target))[1]}
        expected = {e.name: e for e in manifest.tensors if e.kind != "non_persistent_buffer"}
        complain("missing from what was written", expected.keys() - slices.keys())
        complain("written but not in the model", slices.keys() - expected.keys())
        wanted = {name: wanted_dtype(entry, dtype) for name, entry in expected.items()}
        others = [
            name
            for name, one in slices.items()
            if (one.shape, one.dtype_name) != (expected[name].shape, wanted[name])
        ]
        complain("written in another shape or dtype than the model's", others)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            checksums = dict(zip(slices, pool.map(_checksum, slices.values()), strict=True))
    except CheckpointError as error:
        raise WrongWeights(f"what was written cannot be read: {error.message}") from error
    wrong = [
        name for name, sum_ in checksums.items() if sum_ != expected[name].checksums[wanted[name]]
    ]
    complain("written with other values than the model's", wrong)


def _checksum(where: TensorSlice) -> str:
    running = RunningChecksum(where.nbytes)
    for piece in read_pieces(where):
        running.update(piece)
    return running.hexdigest()


def _checkpoint_in(target: Path) -> Path:
    """Return the one file in the folder, or the folder itself where it holds several."""
    found = list(target.iterdir())
    return found[0] if len(found) == 1 and found[0].is_file() else target
