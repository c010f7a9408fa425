"""Build the model, torch.load the whole state dict, and copy it in: two copies of the weights.

Expected peak: 2x the model's size, for the model and the state dict.

Options: key (the key of the state dict in a training checkpoint; torch.load reads the whole file),
map_location (the state dict's device; "cpu" keeps it in RAM; default: the cell's device).
"""

import torch

from weighin.strategy import Load

FORMATS = ("pt",)
DEVICES = ("cpu", "cuda")
OPTIONS = ("map_location", "key")
PEAK = ("model + storages",)
WEIGHTS_ONLY = True


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"):
        model = job.build_model().to(job.device)  # initialises weights that are overwritten below
    with job.phase("read"):
        where = job.options.get("map_location", job.device)
        state = torch.load(job.checkpoint, map_location=where, weights_only=True)
        if job.options.get("key"):
            state = state[job.options["key"]]
    with job.phase("apply"):
        model.load_state_dict(state)  # strict; copies value by value
    return model
