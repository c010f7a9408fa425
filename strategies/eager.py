"""Read a whole safetensors file into bytes, make tensors of the bytes, and assign them to the model.

Expected peak: two copies of the weights, the file's bytes and the tensors made of them.
"""

from pathlib import Path

import torch
from safetensors.torch import load as make_tensors

from weighin.strategy import Load, assign

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("model + model",)
PACKAGES = ("safetensors",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("read"):
        data = Path(job.checkpoint).read_bytes()
    with job.phase("parse"):
        state = make_tensors(data)
        del data
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
