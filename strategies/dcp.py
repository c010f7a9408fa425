"""Build on the meta device, allocate, and load with torch.distributed.checkpoint into the model.

Expected peak: one copy of the weights and the largest tensor. The load runs in one process, without
a process group. torch unpickles the checkpoint's metadata, which can execute code: use this
strategy only for checkpoints that you trust.
"""

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_into

from weighin.strategy import Load, retie, tied_names

FORMATS = ("dcp",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("model + tensor",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("allocate"):
        tied = tied_names(model)
        model.to_empty(device=job.device)
        retie(model, tied)
    with job.phase("read"):
        reader = FileSystemReader(job.checkpoint)
        load_into(model.state_dict(), storage_reader=reader)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
