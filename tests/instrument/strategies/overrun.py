"""Take as much memory as the options say, in a phase of that name, and load rightly if it fits."""

import mmap
import time

import torch

from strategies.baseline import load as load_rightly
from weighin import Load

MIB = 1024**2
OPTIONS = ("mib",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("before"):
        time.sleep(0.05)
    with job.phase("take"):
        held = mmap.mmap(-1, job.options["mib"] * MIB, flags=mmap.MAP_PRIVATE)
        for offset in range(0, len(held), mmap.PAGESIZE):
            held[offset] = 1
    with job.phase("hold"):
        time.sleep(0.05)
    model = load_rightly(job)
    held.close()
    return model
