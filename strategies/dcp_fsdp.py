"""Shard the model over all ranks with FSDP2, and load each rank's shards with DCP.

Expected peak: one copy of the weights for all ranks together. With safetensors files, the reader is
DCP's ``HuggingFaceStorageReader``.
"""

from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weighin.strategy import Load, retie, tied_names

FORMATS = ("dcp", "safetensors", "sharded")
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PACKAGES = ("numpy", "safetensors")  # DCP sends objects between ranks with numpy
SHARES_LOAD = True


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("shard"):
        tied = tied_names(model)
        mesh = init_device_mesh(
            torch.device(job.device).type, (torch.distributed.get_world_size(),)
        )
        fully_shard(model, mesh=mesh)
        model.to_empty(device=job.device)
        retie(model, tied)
    with job.phase("read"):
        path = Path(job.checkpoint)
        if (path / ".metadata").exists():
            reader = FileSystemReader(path)
        else:
            reader = HuggingFaceStorageReader(str(path if path.is_dir() else path.parent))
        stored = reader.read_metadata().state_dict_metadata  # one name of each group of tied names
        state = {name: tensor for name, tensor in model.state_dict().items() if name in stored}
        load_into(state, storage_reader=reader)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
