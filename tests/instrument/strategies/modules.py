"""Load rightly, then complain of every module that a measured process should not have."""

import sys

import torch

from strategies.baseline import load as load_rightly
from weighin import Load


def load(job: Load) -> torch.nn.Module:
    model = load_rightly(job)
    present = {name.partition(".")[0] for name in sys.modules} | sys.modules.keys()
    if found := sorted(present & set(job.options["unwanted"])):
        raise ImportError(f"in the measured process: {', '.join(found)}")
    return model
