"""Build on the meta device, read a safetensors file with pread, and assign its tensors to the model.

Expected peak: one copy of the weights. The file is not mapped.
"""

import torch
from safetensors.torch import load_file

from weighin.strategy import Load, assign

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("model",)
PACKAGES = ("safetensors>=0.8",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("read"):
        state = load_file(job.checkpoint, device=str(job.device), backend="pread")
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
