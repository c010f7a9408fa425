"""A strategy that allocates 1 GiB, so that ``weighin doctor`` can test a limit of 384 MiB."""

import torch

from weighin.strategy import Load
from weighin.units import MIB

FORMATS = ("pt",)
DEVICES = ("cpu",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("overrun"):
        tensor = torch.ones(1024 * MIB, dtype=torch.uint8)  # written, so that they are resident
    return torch.nn.Linear(1, int(tensor[0]))  # reached only if nothing enforces the limit
