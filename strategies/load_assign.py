"""Build on the meta device, torch.load the whole state dict, and assign its tensors to the model.

Expected peak: one copy of the weights. On the way to a GPU, one tensor after the other passes through
the page cache and RAM.

Options: map_location ("cpu" reads the whole state dict into RAM before the first copy to a GPU;
default: the cell's device).
"""

import torch

from weighin.strategy import Load, assign

FORMATS = ("pt", "pt_legacy")
DEVICES = ("cpu", "cuda")
OPTIONS = ("map_location",)
PEAK = ("storages",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("read"):
        where = job.options.get("map_location", job.device)
        state = torch.load(job.checkpoint, map_location=where, weights_only=True)
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
