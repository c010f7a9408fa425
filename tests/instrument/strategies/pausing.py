"""Wait while this file is marked as a program, then load rightly.

The mode is all that a container sees of a change: of a strategy, it has the file alone.
"""

import time
from pathlib import Path

import torch

from strategies.baseline import load as load_rightly
from weighin import Load


def load(job: Load) -> torch.nn.Module:
    with job.phase("pause"):
        while Path(__file__).stat().st_mode & 0o100:
            time.sleep(0.01)
    return load_rightly(job)
