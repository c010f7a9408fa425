"""Build with init_empty_weights of accelerate, and fill with load_checkpoint_and_dispatch.

Expected peak: no anonymous memory for the weights of safetensors files on the CPU, which stay
mapped. A ``.bin`` or ``.pt`` file, which torch.load reads, takes one copy. Weights that are
converted to another dtype take one copy in this dtype, beside the largest file's own weights.
accelerate refuses a safetensors file without the metadata that save_pretrained writes.

Options: device_map (as in load_checkpoint_and_dispatch; default: the whole model on the cell's
device), offload_state_dict (writes the weights to the folder for temporary files, and reads them
back after the last file; needs one copy). There is no option to offload the model to the disk or the
CPU, because that leaves meta tensors in the model, and weighin cannot verify their values.
"""

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch

from weighin.strategy import Load

FORMATS = ("safetensors", "sharded", "pt", "sharded_pt")
DEVICES = ("cpu", "cuda")
OPTIONS = ("device_map", "offload_state_dict")
PEAK = ("mapped", "mapped", "storages", "storages")
PACKAGES = ("accelerate",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), init_empty_weights(include_buffers=True):  # parameters alone lose ties
        model = job.build_model()
    with job.phase("buffers"):
        job.reset_buffers(model)  # dispatching fails if a buffer has no values
    with job.phase("load"):
        where = job.options.get("device_map", {"": str(job.device)})
        offload = job.options.get("offload_state_dict", False)
        dtype = job.dtype if offload else None  # None: each tensor's dtype in the model
        load_checkpoint_and_dispatch(
            model,
            str(job.checkpoint),
            device_map=where,
            offload_state_dict=offload,
            dtype=dtype,
        )
    return model
