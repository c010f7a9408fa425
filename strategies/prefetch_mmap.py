"""Read a safetensors file into the page cache in order, then map it and assign the mapped tensors.

Expected peak: no anonymous memory for the weights, as with safetensors_mmap. The file is read once
from its beginning to its end, the fastest order for a disk; serving engines do so on disks with slow
random reads. If the RAM limit is below the model's size, the kernel drops the file's first pages
before the model uses them.
"""

import mmap
import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from weighin.strategy import Load, assign

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("mapped",)
PACKAGES = ("safetensors",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("prefetch"):
        prefetch(job.checkpoint)
    with job.phase("map"):
        state = load_file(job.checkpoint, device=str(job.device))
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model


def prefetch(path: Path, window_bytes: int = 64 * 1024**2) -> None:
    """Read a file into the page cache, mapping at most ``window_bytes`` of the file at a time."""
    populate_read = 22  # MADV_POPULATE_READ (Linux 5.14), a constant that Python's mmap lacks
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start in range(0, size, window_bytes):
            length = min(window_bytes, size - start)
            window = mmap.mmap(file.fileno(), length, offset=start, access=mmap.ACCESS_READ)
            try:
                window.madvise(mmap.MADV_SEQUENTIAL)
                window.madvise(populate_read)
            except OSError:  # an older kernel, or a file system that refuses it
                os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)
            finally:
                window.close()
