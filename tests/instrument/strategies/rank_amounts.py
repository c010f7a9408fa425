"""Take 64 MiB in each rank, and map 256 MiB of shared memory that rank 0 wrote, in all ranks."""

import mmap
import os
import time

import torch
import torch.distributed as dist

from strategies.baseline import load as load_rightly
from weighin import Load

MIB = 1024**2


def load(job: Load) -> torch.nn.Module:
    model = load_rightly(job)
    with job.phase("meet"):
        dist.barrier()
    dist.barrier()  # no rank takes memory before the parent has read the charge at the end of "meet"
    with job.phase("take"):
        own = bytearray(64 * MIB)
        own[:: mmap.PAGESIZE] = b"x" * (64 * MIB // mmap.PAGESIZE)
        file = os.memfd_create("shared") if dist.get_rank() == 0 else None
        if file is not None:
            os.truncate(file, 256 * MIB)
        path = [f"/proc/{os.getpid()}/fd/{file}"]
        dist.broadcast_object_list(path, src=0)
        shared = mmap.mmap(os.open(path[0], os.O_RDWR), 256 * MIB)
        for at in range(0, 256 * MIB, mmap.PAGESIZE):
            shared[at] = 1
        dist.barrier()
        time.sleep(0.2)
    dist.barrier()  # nor does a rank read its model before the charge at the end of "take" is read
    object.__setattr__(model, "kept", (own, shared))  # they live as long as the model
    return model
