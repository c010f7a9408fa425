"""Read a safetensors file with fastsafetensors, and assign its tensors to the model.

Expected peak: one copy of the weights, in one shared block of memory.

Options: gds (true reads with GPUDirect Storage, which needs a GPU and the kernel module nvidia-fs;
the package's own default is true, this strategy's is false).
"""

import torch
from fastsafetensors import fastsafe_open

from weighin.strategy import Load, assign

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ("gds",)
PEAK = ("model",)
PACKAGES = ("fastsafetensors",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("read"):
        state = {}
        device, nogds = str(job.device), not job.options.get("gds", False)
        with fastsafe_open(str(job.checkpoint), device=device, nogds=nogds) as opened:
            for name in opened.keys():  # noqa: SIM118 (a method; not a mapping)
                state[name] = opened.get_tensor(name)  # the tensor keeps its block alive
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
