"""Build on the meta device, allocate, then load one file per layer, copy it in and free it.

Expected peak: one copy of the weights and the largest layer. The checkpoint has the format
per_module, with one file for each layer or submodule.
"""

import json
from pathlib import Path

import torch

from weighin.strategy import Load, retie, tied_names

FORMATS = ("per_module",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("model + layer",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("allocate"):
        tied = tied_names(model)
        model.to_empty(device=job.device)
        retie(model, tied)
    with job.phase("read"):
        targets = model.state_dict()
        for file in read_index(job.checkpoint):
            for name, tensor in torch.load(file, map_location="cpu", weights_only=True).items():
                targets[name].copy_(tensor)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model


def read_index(folder: Path) -> list[Path]:
    """Return the checkpoint's files; each contains the state dict of one module."""
    index = json.loads(Path(folder, "index.json").read_text())
    return [Path(folder, name) for name in index["files"]]
