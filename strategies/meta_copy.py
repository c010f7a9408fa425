"""Build on the meta device, allocate, torch.load the whole state dict, and copy it in.

Expected peak: two copies of the weights, the model's and the state dict's. The model's memory is
allocated without initialising its weights.

Options: map_location (the state dict's device; "cpu" keeps it in RAM; default: the cell's device).
"""

import torch

from weighin.strategy import Load, retie, tied_names

FORMATS = ("pt",)
DEVICES = ("cpu", "cuda")
OPTIONS = ("map_location",)
PEAK = ("model + storages",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()  # shapes without values
    with job.phase("allocate"):
        tied = tied_names(model)
        model.to_empty(device=job.device)  # uninitialised storage
        retie(model, tied)  # to_empty unties the weights
    with job.phase("read"):
        where = job.options.get("map_location", job.device)
        state = torch.load(job.checkpoint, map_location=where, weights_only=True)
    with job.phase("copy"):
        model.load_state_dict(state)
    with job.phase("buffers"):
        job.reset_buffers(model)  # the checkpoint has no non-persistent buffers
    return model
