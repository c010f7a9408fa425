"""Build on the meta device, allocate, and copy tensor by tensor from a mapped safetensors file.

Expected peak: one copy of the weights. The file's pages stay in the page cache if memory allows.
"""

import torch
from safetensors import safe_open

from weighin.strategy import Load, retie, tied_names

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("model + mapped",)
PACKAGES = ("safetensors",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("allocate"):
        tied = tied_names(model)
        model.to_empty(device=job.device)
        retie(model, tied)  # the file stores a tied weight under only one of its names
    with job.phase("copy"):
        targets = model.state_dict()
        with safe_open(job.checkpoint, framework="pt") as file:
            for name in file.offset_keys():  # in the file's order, so that read-ahead works
                targets[name].copy_(file.get_tensor(name))
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
