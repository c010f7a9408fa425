"""Call from_pretrained of transformers under FSDP: rank 0 loads the weights, and all ranks shard them.

Expected peak: the whole weights in rank 0, mapped if they need no conversion, and one copy for all
ranks together. The other ranks build their models without values, as with Accelerate's option
``fsdp_cpu_ram_efficient_loading``.
"""

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    ValueType,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weighin.strategy import (
    Load,
    from_pretrained_arguments,
    pretrained_class,
    retie,
    tied_names,
)

FORMATS = ("safetensors", "sharded", "pt", "sharded_pt")
DEVICES = ("cpu", "cuda")
PACKAGES = ("transformers",)
PRETRAINED = True
MAPS_KEYS = True
OPTIONS = ()
SHARES_LOAD = True


def load(job: Load) -> torch.nn.Module:
    state: dict[str, ValueType] = {}
    with job.phase("read"):
        if torch.distributed.get_rank() == 0:
            kind = pretrained_class(**job.pretrained)
            folder = from_pretrained_arguments(job.checkpoint)
            whole = kind.from_pretrained(**folder, dtype=job.dtype)
            state = whole.state_dict()
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
    with job.phase("broadcast"):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
