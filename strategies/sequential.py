"""Build the model, torch.load the state dict into RAM, and copy it in tensor by tensor.

Expected peak: on a GPU, one copy of the weights and one tensor, with the state dict in RAM; on the
CPU, 2x the model's size, for the model and the state dict.

Options: map_location (the state dict's device; default: "cpu"), pinned (true copies each tensor to
page-locked memory first).
"""

import torch

from weighin.strategy import Load

FORMATS = ("pt",)
DEVICES = ("cpu", "cuda")
OPTIONS = ("map_location", "pinned")
PEAK = ("model + storages",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"):
        model = job.build_model().to(job.device)
    with job.phase("read"):
        where = job.options.get("map_location", "cpu")
        state = torch.load(job.checkpoint, map_location=where, weights_only=True)
    with job.phase("copy"):
        targets = model.state_dict()  # parameters and persistent buffers, in the model's own memory
        for name, target in targets.items():
            tensor = state[name].pin_memory() if job.options.get("pinned") else state[name]
            target.copy_(tensor.to(job.device))  # on a GPU this needs memory for a second copy
    return model
