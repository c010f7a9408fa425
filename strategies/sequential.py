"""Build on the device, load the state dict into RAM, copy it in tensor by tensor.

Expected peak: on the GPU one copy and one tensor; in RAM the state dict (and, where the device is
the CPU, the model beside it: 2x).
"""

import torch

from harness.strategy import Load

FORMATS = ("pt",)
DEVICES = ("cpu", "cuda")


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"):
        model = job.build_model().to(job.device)
    with job.phase("read"):
        state = torch.load(job.checkpoint, map_location="cpu", weights_only=True)
    with job.phase("copy"):
        targets = model.state_dict()  # parameters *and* persistent buffers, sharing their memory
        for name, target in targets.items():
            target.copy_(state[name])
    return model
