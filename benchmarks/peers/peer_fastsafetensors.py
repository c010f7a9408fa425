"""Read a safetensors file with fastsafetensors and assign its tensors.

Expected peak: one copy of the weights, in one shared block of memory.
"""

import torch
from fastsafetensors import fastsafe_open

from weighin.strategy import Load, without_weights

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"):
        model = without_weights(job.build_model)
    file = str(job.checkpoint)
    with job.phase("read"), fastsafe_open(file, device=str(job.device), nogds=True) as opened:
        state = {}
        for name in opened.keys():  # noqa: SIM118 (a method; not a mapping)
            tensor = opened.get_tensor(name)
            dtype = job.dtype if tensor.is_floating_point() else tensor.dtype
            state[name] = tensor.to(dtype)
    with job.phase("assign"):
        model.load_state_dict(state, assign=True)
    return model
