"""Save a model that two processes share, as a fine-tuning with FSDP does: one file for each process.

Usage: sharded_save.py FOLDER RANK
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", f"file://{folder}.store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    state = get_model_state_dict(model)
    writer = HuggingFaceStorageWriter(
        path=str(folder), fqn_to_index_mapping=dict.fromkeys(state, 1), save_distributed=True
    )
    save(state, storage_writer=writer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
