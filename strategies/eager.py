"""Read a whole safetensors file into bytes, make tensors of the bytes, and assign them to the model.

Expected peak: two copies of the weights, the file's bytes and the tensors made of them.
"""

from pathlib import Path

import torch
from safetensors.torch import load as make_tensors

from weighin.strategy import Load, retie, share_missing, tied_names

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
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
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        for name, tensor in state.items():
            kind = dtypes.get(name, tensor.dtype)
            state[name] = tensor.to(job.device, kind)  # copies only if device or dtype differs
        tied = tied_names(model)
        share_missing(state, tied)
        model.load_state_dict(state, assign=True)
        retie(model, tied)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
