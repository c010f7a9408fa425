"""Build on the meta device, allocate, then load one file per parameter, copy it in and free it.

Expected peak: one copy of the weights and the largest tensor. The checkpoint has the format
per_param, with one file for each state-dict key.
"""

import json
from pathlib import Path

import torch

from weighin.strategy import Load, retie, tied_names

FORMATS = ("per_param",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("model + tensor",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("allocate"):
        tied = tied_names(model)
        model.to_empty(device=job.device)
        retie(model, tied)
    with job.phase("read"):
        targets = model.state_dict()
        for name, file in read_index(job.checkpoint).items():
            targets[name].copy_(torch.load(file, map_location="cpu", weights_only=True))
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model


def read_index(folder: Path) -> dict[str, Path]:
    """Return each key's file, in the state dict's order."""
    index = json.loads(Path(folder, "index.json").read_text())
    return {key: Path(folder, name) for key, name in index["tensors"].items()}
