"""Build on the device, load the whole state dict there, copy it in: two copies of the weights.

Expected peak: the model and the state dict, 2x the model's size.

Options: map_location ("cpu" keeps the state dict in RAM; default: the device).
"""

import torch

from weighin.strategy import Load

FORMATS = ("pt",)
DEVICES = ("cpu", "cuda")
OPTIONS = ("map_location",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"):
        model = job.build_model().to(job.device)  # initialised, only to be overwritten
    with job.phase("read"):
        where = job.options.get("map_location", job.device)
        state = torch.load(job.checkpoint, map_location=where, weights_only=True)
    with job.phase("apply"):
        model.load_state_dict(state)  # strict; copies value by value
    return model
