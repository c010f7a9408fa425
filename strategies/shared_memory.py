"""Read the file into shared memory in rank 0, and map this one copy in the models of all ranks.

Expected peak: one copy of the weights for all ranks together, in shared memory, which the kernel
cannot reclaim. Pages of the file leave the page cache as they are read. A rank that changes a
weight changes it for all ranks.
"""

import json
import mmap
import os
from pathlib import Path

import torch
import torch.distributed as dist

from weighin.strategy import Load, assign

FORMATS = ("safetensors",)
OPTIONS = ()
PACKAGES = ("numpy",)  # torch.distributed sends objects between ranks with it
SHARES_LOAD = True


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("share"), Path(job.checkpoint).open("rb", buffering=0) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(start - 8))
        entries.pop("__metadata__", None)
        wanted = model.state_dict()
        shapes = {name: wanted[name] for name in entries}
        memory = _shared(sum(map(_room, shapes.values())))
        state, end = {}, 0
        for name, shape in shapes.items():
            state[name] = _tensor(memory, end, shape.dtype, shape.numel()).view(shape.shape)
            end += _room(shape)
    with job.phase("read"), Path(job.checkpoint).open("rb", buffering=0) as file:
        if dist.get_rank() == 0:
            end = 0
            for name, shape in shapes.items():
                first, last = entries[name]["data_offsets"]
                same = _dtype(entries[name]["dtype"]) == shape.dtype
                target = memory if same else bytearray(last - first)
                at = end if same else 0
                _read(file.fileno(), memoryview(target)[at : at + last - first], start + first)
                if not same and last > first:
                    read = torch.frombuffer(target, dtype=_dtype(entries[name]["dtype"]))
                    state[name].copy_(read.view(shape.shape))
                end += _room(shape)
        dist.barrier()
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model


def _dtype(code: str) -> torch.dtype:
    """Return the dtype that a safetensors header calls ``code``."""
    dtypes = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
        "U8": torch.uint8, "BOOL": torch.bool,
    }  # fmt: skip
    return dtypes[code]


def _room(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in the shared memory, in bytes: a multiple of 64."""
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def _shared(size: int) -> mmap.mmap:
    """Return memory that all ranks share; rank 0 creates it."""
    memory = os.memfd_create("weights") if dist.get_rank() == 0 else None
    if memory is not None:
        os.truncate(memory, size)
    path = [f"/proc/{os.getpid()}/fd/{memory}"]
    dist.broadcast_object_list(path, src=0)
    opened = os.open(path[0], os.O_RDWR) if memory is None else memory
    mapped = mmap.mmap(opened, size)
    dist.barrier()  # rank 0's descriptor stays open until all ranks have opened the memory
    os.close(opened)
    return mapped


def _tensor(memory: mmap.mmap, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)


def _read(file: int, target: memoryview, offset: int) -> None:
    """Read a range of the file, and drop its pages from the page cache."""
    while target:
        size = os.preadv(file, [target[: 2**24]], offset)
        if not size:
            raise EOFError("the file is shorter than its header says")
        os.posix_fadvise(file, offset, size, os.POSIX_FADV_DONTNEED)
        target, offset = target[size:], offset + size
