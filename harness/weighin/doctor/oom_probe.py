"""A strategy that allocates more than its limit, with which ``weighin doctor`` tests limits."""

import torch

from weighin.strategy import Load
from weighin.units import MIB

FORMATS = ("pt",)
DEVICES = ("cpu",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("overrun"):
        tensor = torch.ones(1024 * MIB, dtype=torch.uint8)  # written, so that it is resident
    return torch.nn.Linear(1, int(tensor[0]))  # reached only if nothing enforces the limit
