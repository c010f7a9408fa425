"""Load in one rank after the other: build, torch.load, load_state_dict, while the others wait.

Expected peak: one copy of the weights in each rank, and one more in the rank whose turn it is.
"""

import torch
import torch.distributed as dist

from weighin.strategy import Load

FORMATS = ("pt", "pt_legacy")
DEVICES = ("cpu", "cuda")
OPTIONS = ()
SHARES_LOAD = True


def load(job: Load) -> torch.nn.Module:
    for turn in range(dist.get_world_size()):
        if turn == dist.get_rank():
            with job.phase("build"), torch.device(job.device):
                model = job.build_model()
            with job.phase("read"):
                state = torch.load(job.checkpoint, map_location=job.device, weights_only=True)
            with job.phase("copy"):
                model.load_state_dict(state)
                del state
        with job.phase("wait"):
            dist.barrier()
    return model
