"""A checkpoint that two real processes of torch.distributed saved, each its own shards, is streamed."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from weighin.stream import formats
from weighin.stream.model import load_streaming

RANK = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
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


def test_what_two_ranks_save_is_streamed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    with ExitStack() as both:
        ranks = [
            both.enter_context(
                subprocess.Popen(
                    [*command, str(rank), str(tmp_path / "store"), str(folder)],
                    env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for rank in ranks:
            both.callback(rank.kill)  # the other waits for one that failed
        for rank in ranks:
            _, said = rank.communicate(timeout=120)
            assert rank.returncode == 0, said
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
