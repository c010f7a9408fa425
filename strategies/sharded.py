"""Build on the meta device, allocate, then load shard by shard, copy each in and free it.

Expected peak: one copy of the weights and the largest shard: in anonymous memory for ``.bin`` files,
in file-backed pages for safetensors.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from weighin.strategy import Load, files, retie, tied_names

FORMATS = ("sharded", "sharded_pt")
DEVICES = ("cpu", "cuda")
OPTIONS = ()


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("allocate"):
        tied = tied_names(model)
        model.to_empty(device=job.device)
        retie(model, tied)
    with job.phase("copy"):
        targets = model.state_dict()
        _index, *shards = files(job.checkpoint)
        for shard in shards:
            for name, tensor in load_shard(shard).items():
                targets[name].copy_(tensor)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model


def load_shard(file: Path) -> dict[str, torch.Tensor]:
    """Return the state dict of one shard: mapped for safetensors, read into memory for ``.bin``."""
    if file.suffix == ".safetensors":
        return load_file(file)
    state: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return state
