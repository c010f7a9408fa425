"""Build on the meta device, map one file per parameter, and assign the mapped tensors to the model.

Expected peak: no anonymous memory for the weights, as with mmap_assign. Each parameter has its own
mapping.
"""

import json
from pathlib import Path

import torch

from weighin.strategy import Load, assign

FORMATS = ("per_param",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("mapped",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("map"):
        state = {
            name: torch.load(file, map_location=job.device, weights_only=True, mmap=True)
            for name, file in read_index(job.checkpoint).items()
        }
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model


def read_index(folder: Path) -> dict[str, Path]:
    """Return each key's file, in the state dict's order."""
    index = json.loads(Path(folder, "index.json").read_text())
    return {key: Path(folder, name) for key, name in index["tensors"].items()}
