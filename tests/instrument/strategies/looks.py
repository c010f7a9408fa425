"""Load rightly, then complain of variables that the process did not start with, and of modules that it has.

The option ``wanted`` names variables, ``unwanted`` modules.
"""

import sys
from pathlib import Path

import torch

from strategies.baseline import load as load_rightly
from weighin import Load


def load(job: Load) -> torch.nn.Module:
    started_with = Path("/proc/self/environ").read_text().split("\0")
    model = load_rightly(job)
    present = {name.partition(".")[0] for name in sys.modules} | sys.modules.keys()
    for variable in job.options.get("wanted", ()):
        assert variable in started_with, variable
    if found := sorted(present & set(job.options.get("unwanted", ()))):
        raise ImportError(f"in the measured process: {', '.join(found)}")
    return model
