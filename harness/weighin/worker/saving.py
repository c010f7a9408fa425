"""Load the model that a worker saves, before its baseline; sync the saved files, and verify them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from weighin import files
from weighin.checkpoint.manifest import Manifest
from weighin.checkpoint.reader import checksum_of
from weighin.errors import CheckpointError
from weighin.probes import page_cache
from weighin.stream import formats
from weighin.stream.load_streaming import load_streaming
from weighin.worker.loading import Load
from weighin.worker.verify import WrongWeights, complain, wanted_dtype


def load_model(job: Load) -> torch.nn.Module:
    if job.folder:
        from weighin.stream.load_pretrained import load_pretrained  # few saves need it

        model: torch.nn.Module = load_pretrained(**job.folder, dtype=job.dtype, device=job.device)
    else:
        model = load_streaming(job.build_model, job.checkpoint, device=job.device)
    page_cache.drop(formats.files(job.checkpoint))
    return model


def files_in(target: Path) -> list[Path]:
    return sorted(path for path in target.rglob("*") if path.is_file())


def sync(target: Path) -> None:
    for path in [target, *(path for path in target.rglob("*") if path.is_file() or path.is_dir())]:
        files.sync(path)


def sizes(target: Path) -> dict[str, int]:
    """Return the fields of ``Written``."""
    stats = [file.stat() for file in files_in(target)]
    file_bytes, blocks = sum(one.st_size for one in stats), sum(one.st_blocks for one in stats)
    return {"file_bytes": file_bytes, "disk_bytes": blocks * 512, "files": len(stats)}


def check(target: Path, manifest: Manifest, dtype: torch.dtype) -> None:
    """Read the saved checkpoint back from the disk, in pieces of 16 MiB, because the RAM limit of the save also applies
    here; raise WrongWeights if it differs from the model.
    """
    page_cache.drop(files_in(target))
    expected = {e.name: e for e in manifest.tensors if e.kind != "non_persistent_buffer"}
    wanted = {name: wanted_dtype(entry, dtype) for name, entry in expected.items()}
    try:
        contents = list(target.iterdir())
        is_file = len(contents) == 1 and contents[0].is_file()
        slices = {each.name: each for each in formats.read(contents[0] if is_file else target)}
        complain("missing from the saved checkpoint", expected.keys() - slices.keys())
        complain("saved but not in the model", slices.keys() - expected.keys())
        kinds = {name: (entry.shape, wanted[name]) for name, entry in expected.items()}
        others = [n for n, each in slices.items() if (each.shape, each.dtype_name) != kinds[n]]
        complain("saved with another shape or dtype", others)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            checksums = dict(zip(slices, pool.map(checksum_of, slices.values()), strict=True))
    except CheckpointError as error:
        raise WrongWeights(f"the saved checkpoint cannot be read: {error.message}") from error
    wrong = [n for n, entry in expected.items() if checksums[n] != entry.checksums[wanted[n]]]
    complain("saved with other values", wrong)
