"""Map the file in rank 0 and broadcast it tensor by tensor into the models of all ranks.

Expected peak: one copy of the weights in each rank. Only rank 0 reads the file.
"""

import torch
import torch.distributed as dist

from weighin.strategy import Load, retie, tied_names

FORMATS = ("pt",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
SHARES_LOAD = True


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("allocate"):
        tied = tied_names(model)
        model.to_empty(device=job.device)
        retie(model, tied)
    with job.phase("broadcast"), torch.no_grad():
        source = {}
        if dist.get_rank() == 0:
            source = torch.load(job.checkpoint, mmap=True, weights_only=True)
        filled = set()
        for name, tensor in model.state_dict().items():
            if tensor.data_ptr() not in filled or not tensor.numel():
                if source:
                    tensor.copy_(source[name])
                dist.broadcast(tensor, src=0)
                filled.add(tensor.data_ptr())
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
