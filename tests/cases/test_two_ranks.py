"""What two real processes of torch.distributed save: shards that are streamed, or refused as half a tensor."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.inspect import inspect
from weighin.errors import CheckpointError
from weighin.stream import formats
from weighin.stream.load_streaming import load_streaming

BOTH = """
import sys
import torch
import torch.distributed as dist
rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
"""
SHARDED = """
from torch.distributed.checkpoint import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 9), torch.nn.Linear(9, 3))
places = {"0.weight": Shard(0), "0.bias": Shard(0), "1.weight": Shard(1), "2.weight": Replicate()}
state = {
    name: distribute_tensor(one.detach(), mesh, [places[name]]) if name in places else one.detach()
    for name, one in model.state_dict().items()
}
save(state, checkpoint_id=folder)
del mesh, state  # they hold the group too, and its threads would outlive it
dist.destroy_process_group()
"""
FSDP = """
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
state = get_model_state_dict(model)
index = dict.fromkeys(state, 1)
save(state, storage_writer=HuggingFaceStorageWriter(folder, fqn_to_index_mapping=index, save_distributed=True))
dist.destroy_process_group()
"""


def saved(code: str, folder: Path) -> Path:
    """Run the code in two processes, and return the folder in which they saved a model."""
    command = [sys.executable, "-W", "ignore", "-c", BOTH + code]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as both:
        ranks = []
        for rank in range(2):
            where = [str(rank), str(folder / "store"), str(folder / "saved")]
            process = subprocess.Popen(
                [*command, *where], env=environment, stderr=subprocess.PIPE, text=True
            )
            ranks.append(both.enter_context(process))
        for process in ranks:
            both.callback(process.kill)  # the other waits for one that failed
        for process in ranks:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said
    return folder / "saved"


def test_what_two_ranks_save_is_streamed(tmp_path: Path) -> None:
    folder = saved(SHARDED, tmp_path)
    parts = {one.name: len(one.parts) for one in formats.read(folder)}
    assert {name for name, count in parts.items() if count == 2} == {
        "0.weight", "0.bias", "1.weight",
    }  # fmt: skip
    torch.manual_seed(0)
    right = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 9), torch.nn.Linear(9, 3))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 9), torch.nn.Linear(9, 3))
    found = load_streaming(model, folder).state_dict()
    for name, tensor in right.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_the_shards_of_two_ranks_are_refused(tmp_path: Path) -> None:
    files = sorted(saved(FSDP, tmp_path).glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        with pytest.raises(CheckpointError, match="a shard of torch's distributed checkpoint"):
            Conversion(file, tmp_path / "made.pt").write()
        with pytest.raises(CheckpointError, match="a shard of torch's distributed checkpoint"):
            inspect(file)
    assert not (tmp_path / "made.pt").exists()
