"""Build on the device, load the state dict into RAM, copy it in tensor by tensor.

Expected peak: on the GPU one copy and one tensor; in RAM the state dict (and, where the device is
the CPU, the model beside it: 2x).

Options: map_location (a device for the state dict; default "cpu"), pinned (true: page-locked copies).
"""

import torch

from weighin.strategy import Load

FORMATS = ("pt",)
DEVICES = ("cpu", "cuda")
OPTIONS = ("map_location", "pinned")


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"):
        model = job.build_model().to(job.device)
    with job.phase("read"):
        where = job.options.get("map_location", "cpu")
        state = torch.load(job.checkpoint, map_location=where, weights_only=True)
    with job.phase("copy"):
        targets = model.state_dict()  # parameters *and* persistent buffers, sharing their memory
        for name, target in targets.items():
            tensor = state[name].pin_memory() if job.options.get("pinned") else state[name]
            target.copy_(tensor.to(job.device))  # on a GPU there is one tensor twice
    return model
