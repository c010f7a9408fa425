"""End rank ``rank`` (1) of several in the way that the option ``how`` names; the others wait."""

import os
import time

import torch
import torch.distributed as dist

from strategies.baseline import load as load_rightly
from weighin import Load

MIB = 1024**2


def load(job: Load) -> torch.nn.Module:
    model = load_rightly(job)
    if dist.get_rank() == job.options.get("rank", 1):
        with job.phase("bad"):
            if job.options["how"] == "raises":
                raise ValueError("the shard is broken")
            if job.options["how"] == "exits as if all were well":
                os._exit(0)
            if job.options["how"] == "hangs":
                time.sleep(600)
            if job.options["how"] == "takes too much":
                taken = [b"x" * 16 * MIB for _ in range(1000)]
                del taken
            if job.options["how"] == "is late":
                time.sleep(1)
            if job.options["how"] == "is wrong":
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0] += 1
    with job.phase("meet"):
        if job.options["how"] != "is wrong":
            dist.barrier()
    return model
