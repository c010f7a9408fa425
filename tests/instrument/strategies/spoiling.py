"""Load rightly the first time, then with one value changed."""

from pathlib import Path

import torch

from strategies.baseline import load as load_rightly
from weighin import Load

SEEN = Path(__file__).with_suffix(".seen")


def load(job: Load) -> torch.nn.Module:
    model = load_rightly(job)
    if SEEN.exists():
        next(model.parameters()).data.view(-1)[0] += 1
    SEEN.touch()
    return model
