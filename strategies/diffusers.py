"""Call ``from_pretrained`` of diffusers for a part of a pipeline, which maps safetensors files.

Expected peak: no anonymous memory for mapped weights, that is, weights on the CPU whose safetensors
file has the wanted dtype. All other weights take one copy.

Options: disable_mmap (read the files instead of mapping them), device_map (as in from_pretrained).
"""

import json
from pathlib import Path

import torch

from weighin.strategy import Load, diffusers_class

FORMATS = ("safetensors", "sharded", "pt", "sharded_pt")
DEVICES = ("cpu", "cuda")
OPTIONS = ("disable_mmap", "device_map")
PEAK = ("mapped",)
PACKAGES = ("diffusers", "accelerate")
PRETRAINED = "diffusers"
MAPS_KEYS = True


def load(job: Load) -> torch.nn.Module:
    checkpoint = Path(job.checkpoint)
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    with job.phase("read"):
        kind = diffusers_class(json.loads((folder / "config.json").read_text())["_class_name"])
        model: torch.nn.Module = kind.from_pretrained(
            folder, torch_dtype=job.dtype, local_files_only=True, **job.options
        )
    with job.phase("move"):
        return model.to(job.device)
