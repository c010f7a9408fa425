"""Write shards of limited size and Hugging Face's index: safetensors files, or .bin of torch.save.

Expected peak: no copy of the weights.

Options: max_shard_bytes (default: 5 GiB).
"""

import json

import torch
from safetensors.torch import save_file

from weighin.strategy import MAX_SHARD_BYTES, Save, tied_names

FORMATS = ("sharded", "sharded_pt")
DEVICES = ("cpu", "cuda")
OPTIONS = ("max_shard_bytes",)


def save(job: Save) -> None:
    state = job.model.state_dict()
    shared = {name: first for first, *others in tied_names(job.model) for name in others}
    as_pt = job.format == "sharded_pt"
    stem, suffix = ("pytorch_model", ".bin") if as_pt else ("model", ".safetensors")
    weight_map: dict[str, str] = {}
    with job.phase("write"):
        shards = split(state, shared, job.options.get("max_shard_bytes", MAX_SHARD_BYTES))
        for number, shard in enumerate(shards, 1):
            name = f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
            ties = {other: first for other, first in shared.items() if first in shard}
            if as_pt:
                shard |= {other: state[other] for other in ties}
                torch.save(shard, job.target / name)
            else:
                save_file(shard, job.target / name, metadata={"format": "pt", **ties})
            weight_map |= dict.fromkeys(shard, name)
        size = sum(tensor.nbytes for name, tensor in state.items() if name not in shared)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        path = job.target / f"{stem}{suffix}.index.json"
        path.write_text(json.dumps(index, indent=2))


def split(
    state: dict[str, torch.Tensor], shared: dict[str, str], max_bytes: int
) -> list[dict[str, torch.Tensor]]:
    """Return the tensors in shards, in order; a tied weight appears only under its first name."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in state.items():
        if name in shared:
            continue
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards
