"""Build on the meta device, allocate, then load shard by shard, copy each in and free it.

Expected peak: one copy of the weights and the largest shard. The shard lies in anonymous memory if
it is a ``.bin`` file, and in file-backed pages if it is a safetensors file.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from weighin.strategy import Load, retie, tied_names

FORMATS = ("sharded", "sharded_pt")
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("model + mapped", "model + shard")
PACKAGES = ("safetensors",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("allocate"):
        tied = tied_names(model)
        model.to_empty(device=job.device)
        retie(model, tied)
    with job.phase("copy"):
        targets = model.state_dict()
        for shard in find_shards(job.checkpoint):
            for name, tensor in load_shard(shard).items():
                targets[name].copy_(tensor)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model


def find_shards(checkpoint: Path) -> list[Path]:
    """Return the shards that the index lists: safetensors files if a folder has both kinds."""
    index = Path(checkpoint)
    if index.is_dir():
        index = min(index.glob("*model*.index.json"))
    names = json.loads(index.read_text())["weight_map"].values()
    return [index.with_name(name) for name in dict.fromkeys(names)]


def load_shard(file: Path) -> dict[str, torch.Tensor]:
    """Return the state dict of one shard: mapped for safetensors, read into memory for ``.bin``."""
    if file.suffix == ".safetensors":
        return load_file(file)
    state: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return state
