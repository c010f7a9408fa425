"""Build on the meta device, allocate once, read each tensor from its offset in the file into place.

Expected peak: one copy of the weights. No state dict ever exists; pages of the file are dropped
from the page cache as soon as they are copied.
"""

import ctypes
import os

import torch

from harness.checkpoint import layouts
from harness.models.tying import retie, tied_names
from harness.strategy import Load

FORMATS = ("pt",)
DEVICES = ("cpu", "cuda")

PIECE_BYTES = 4 * 1024**2  # a GPU's tensors pass through a buffer of this size


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("allocate"):
        tied = tied_names(model)
        model.to_empty(device=job.device)
        retie(model, tied)
    with job.phase("read"):
        targets = model.state_dict()
        file = os.open(job.checkpoint, os.O_RDONLY)
        for tensor in layouts.read(job.checkpoint)[1]:
            target = targets[tensor.name]
            if target.is_cuda:
                read_through_buffer(file, tensor.offset, target)
            else:
                read_into(file, tensor.offset, target)
            os.posix_fadvise(file, tensor.offset, target.nbytes, os.POSIX_FADV_DONTNEED)
        os.close(file)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model


def read_into(file: int, offset: int, target: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor with the bytes at ``offset``."""
    memory = memoryview((ctypes.c_ubyte * target.nbytes).from_address(target.data_ptr()))
    while memory:
        read = os.preadv(file, [memory], offset)
        memory, offset = memory[read:], offset + read


def read_through_buffer(file: int, offset: int, target: torch.Tensor) -> None:
    """Fill a contiguous GPU tensor, a piece at a time."""
    flat = target.view(-1).view(torch.uint8)
    for piece in torch.split(flat, PIECE_BYTES):
        buffer = torch.empty(len(piece), dtype=torch.uint8)
        read_into(file, offset, buffer)
        piece.copy_(buffer)
        offset += len(piece)
