"""Load rightly, and then write the file that the file `fill` beside this one names until its disk is full."""

from contextlib import suppress
from pathlib import Path

import torch

from strategies.baseline import load as load_rightly
from weighin import Load


def load(job: Load) -> torch.nn.Module:
    model = load_rightly(job)
    if (where := Path(__file__).with_name("fill")).exists():
        with suppress(OSError), Path(where.read_text()).open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    return model
