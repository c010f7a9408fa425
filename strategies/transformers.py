"""Call ``from_pretrained`` of transformers, which maps safetensors files and renames keys.

Expected peak: no anonymous memory for mapped weights, that is, weights on the CPU whose safetensors
file has the wanted dtype. All other weights take one copy. A tensor that transformers builds from
several tensors of the file, such as the stacked experts of a layer, needs memory for its sources
too.

Options: disable_mmap (read the files instead of mapping them), device_map (as in from_pretrained).
"""

import json
from pathlib import Path

import torch

from weighin.strategy import Load, pretrained_class

FORMATS = ("safetensors", "sharded", "pt", "sharded_pt")
DEVICES = ("cpu", "cuda")
OPTIONS = ("disable_mmap", "device_map")
PACKAGES = ("transformers",)
PRETRAINED = True
DEQUANTISES = True
MAPS_KEYS = True


def load(job: Load) -> torch.nn.Module:
    checkpoint = Path(job.checkpoint)
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    with job.phase("read"):
        config = json.loads((folder / "config.json").read_text())
        kind = pretrained_class(config["architectures"][0], job.remote_code, config)
        model: torch.nn.Module = kind.from_pretrained(
            folder, dtype=job.dtype, local_files_only=True, **job.options
        )
    with job.phase("move"):
        return model.to(job.device)
