"""Read a safetensors file straight into GPU memory with InstantTensor, and assign its tensors.

Expected peak: one copy of the weights on the GPU, and a buffer whose size InstantTensor chooses.
"""

import torch
from instanttensor import safe_open

from weighin.strategy import Load, assign

FORMATS = ("safetensors",)
DEVICES = ("cuda",)
OPTIONS = ()
PACKAGES = ("instanttensor",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    file = str(job.checkpoint)
    with job.phase("read"), safe_open(file, framework="pt", device=job.device) as opened:
        state = dict(opened.tensors())  # clones, which stay valid after the buffer is freed
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
