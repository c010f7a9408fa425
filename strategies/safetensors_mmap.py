"""Build on the meta device, map a safetensors file, and assign the mapped tensors to the model.

Expected peak: no anonymous memory for the weights, as with mmap_assign. The file contains no pickle.
"""

import torch
from safetensors.torch import load_file

from weighin.strategy import Load, assign

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("mapped",)
PACKAGES = ("safetensors",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("map"):
        state = load_file(job.checkpoint, device=str(job.device))
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
