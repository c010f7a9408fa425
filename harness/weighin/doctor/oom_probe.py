"""A strategy that overruns its limit on purpose: ``weighin doctor`` proves with it that one holds."""

import torch

from weighin.strategy import Load
from weighin.units import MIB

FORMATS = ("pt",)
DEVICES = ("cpu",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("overrun"):
        held = torch.ones(1024 * MIB, dtype=torch.uint8)  # written, so really taken
    return torch.nn.Linear(1, int(held[0]))  # only reached where nothing limits
