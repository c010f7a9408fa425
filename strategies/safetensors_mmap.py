"""Build on the meta device, map a safetensors file, and assign the mapped tensors to the model.

Expected peak: no anonymous memory for the weights, as with mmap_assign. The file contains no pickle.
"""

import torch
from safetensors.torch import load_file

from weighin.strategy import Load, retie, share_missing, tied_names

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PACKAGES = ("safetensors",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("map"):
        state = load_file(job.checkpoint, device=str(job.device))
    with job.phase("assign"):
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        for name, tensor in state.items():
            state[name] = tensor.to(dtypes.get(name, tensor.dtype))  # copies only if it differs
        tied = tied_names(model)
        share_missing(state, tied)
        model.load_state_dict(state, assign=True)
        retie(model, tied)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
