"""Call ``create_model`` of timm for a folder of timm, which reads the file and copies it into the model.

Expected peak: two copies of the weights: the model, and the file's tensors, which are mapped from a
safetensors file.
"""

from pathlib import Path

import torch

from weighin.strategy import Load

FORMATS = ("safetensors", "pt")
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PACKAGES = ("timm",)
PRETRAINED = "timm"
MAPS_KEYS = True


def load(job: Load) -> torch.nn.Module:
    import timm

    with job.phase("read"):
        folder = Path(job.checkpoint).parent
        model: torch.nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    with job.phase("move"):
        return model.to(device=job.device, dtype=job.dtype)
