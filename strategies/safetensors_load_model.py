"""Build the model, and let safetensors.torch.load_model map the file and copy it into the model.

Expected peak: one copy of the weights. The file's pages stay in the page cache if memory allows.
"""

import torch
from safetensors.torch import load_model as fill

from weighin.strategy import Load

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("model + mapped",)
PACKAGES = ("safetensors",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"):
        model = job.build_model().to(job.device)  # initialises weights that are overwritten below
    with job.phase("copy"):
        fill(
            model, job.checkpoint, device=str(job.device)
        )  # raises for missing keys; copies tied weights once
    return model
