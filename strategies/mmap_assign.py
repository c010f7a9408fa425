"""Build on the meta device, torch.load with mmap=True, and assign the mapped tensors to the model.

Expected peak: no anonymous memory for the weights. The weights stay file-backed pages, which the
kernel can reclaim under memory pressure. If the RAM limit is below the model's size, each use of
the model reads reclaimed pages again.

Options: key (the key of the state dict in a training checkpoint; torch.load maps the whole file),
map_location ("cpu" maps the whole file before the first copy to a GPU; default: the cell's
device).
"""

import torch

from weighin.strategy import Load, assign

FORMATS = ("pt",)
DEVICES = ("cpu", "cuda")
OPTIONS = ("map_location", "key")
PEAK = ("mapped",)
WEIGHTS_ONLY = True


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("map"):
        where = job.options.get("map_location", job.device)
        state = torch.load(job.checkpoint, map_location=where, weights_only=True, mmap=True)
        if job.options.get("key"):
            state = state[job.options["key"]]
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
