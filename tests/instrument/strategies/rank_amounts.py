"""Take 64 MiB in each rank, and map 256 MiB of shared memory that rank 0 wrote, in all ranks."""

import mmap
import os
import time

import torch
import torch.distributed as dist

from strategies.baseline import load as load_rightly
from weighin.strategy import Load
from weighin.units import MIB


def load(job: Load) -> torch.nn.Module:
    model = load_rightly(job)
    with job.phase("meet"):
        # Reads all pages of libraries that "take" needs, so that "take" charges none of them.
        _take(own_bytes=mmap.PAGESIZE, shared_bytes=mmap.PAGESIZE)
    dist.barrier()  # no rank takes memory before the parent has read the charge at the end of "meet"
    with job.phase("take"):
        taken = _take(own_bytes=64 * MIB, shared_bytes=256 * MIB)
        time.sleep(0.2)
    object.__setattr__(model, "kept", taken)  # it lives as long as the model
    return model


def _take(own_bytes: int, shared_bytes: int) -> tuple[bytearray, mmap.mmap]:
    own = bytearray(own_bytes)
    own[:: mmap.PAGESIZE] = b"x" * (own_bytes // mmap.PAGESIZE)
    file = os.memfd_create("shared") if dist.get_rank() == 0 else None
    if file is not None:
        os.truncate(file, shared_bytes)
    path = [f"/proc/{os.getpid()}/fd/{file}"]
    dist.broadcast_object_list(path, src=0)
    shared = mmap.mmap(os.open(path[0], os.O_RDWR), shared_bytes)
    for at in range(0, shared_bytes, mmap.PAGESIZE):
        shared[at] = 1
    dist.barrier()
    return own, shared
