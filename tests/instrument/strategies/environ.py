"""Load rightly if the process started with the variables that the option ``wanted`` names."""

from pathlib import Path

import torch

from strategies.baseline import load as load_rightly
from weighin import Load


def load(job: Load) -> torch.nn.Module:
    started_with = Path("/proc/self/environ").read_text().split("\0")
    for variable in job.options["wanted"]:
        assert variable in started_with, variable
    return load_rightly(job)
