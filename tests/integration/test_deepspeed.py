"""DeepSpeed's converter agrees with weighin, on files of DeepSpeed and on those of the unit tests.

Needs the package deepspeed, which no strategy of weighin uses.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import small_model, write_zero

from weighin.checkpoint.reader import read_pieces
from weighin.stream import formats

os.environ["DS_ACCELERATOR"] = "cpu"
zero_to_fp32 = pytest.importorskip(
    "deepspeed.utils.zero_to_fp32", reason="deepspeed is not installed", exc_type=ImportError
)

WRITE = """
import os, sys
import torch
from torch import nn, multiprocessing

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.frozen = nn.Embedding(17, 6), nn.Linear(6, 6)
        self.layers, self.head = nn.ModuleList([nn.Linear(6, 6)]), nn.Linear(6, 17, bias=False)
        self.cube, self.head.weight = nn.Parameter(torch.rand(3, 5, 7)), self.embed.weight
        self.register_buffer("steps", torch.arange(5))
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        out = self.layers[0](self.frozen(self.embed(ids)))
        return (self.head(out) * self.cube.sum()).float().pow(2).mean()

def write(rank, folder, stage):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29530 + stage)}
    import deepspeed
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [{"params": [one for one in trained if one.dim() > 1]},
              {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0}]
    settings = {"train_batch_size": 6, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(engine(torch.arange(2) + rank))
    engine.step()
    engine.save_checkpoint(folder)
    deepspeed.comm.barrier()

if __name__ == "__main__":
    multiprocessing.spawn(write, (sys.argv[1], int(sys.argv[2])), nprocs=3)
"""


def check(run: Path, beyond: set[str]) -> None:
    """Compare with DeepSpeed's converter, which leaves out the tensors ``beyond``."""
    theirs = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(run))
    ours = {}
    for one in formats.read(run):
        pieces = [piece.clone() for piece in read_pieces(one)]
        ours[one.name] = torch.cat(pieces).reshape(one.shape)
    assert ours.keys() - theirs.keys() == beyond
    assert theirs.keys() <= ours.keys()
    for name, one in theirs.items():
        assert torch.equal(ours[name].to(one.dtype), one), name


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_reads_the_files_of_the_unit_tests(tmp_path: Path, stage: int, ranks: int) -> None:
    torch.manual_seed(0)
    model = small_model()
    write_zero(tmp_path / "run", model, stage, ranks, alignment=4)
    check(tmp_path / "run", set(model.frozen) if stage == 1 else set())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_its_own_files_are_read_and_are_like_those_of_the_unit_tests(
    tmp_path: Path, stage: int
) -> None:
    (tmp_path / "write.py").write_text(WRITE)
    command = [sys.executable, str(tmp_path / "write.py"), str(tmp_path / "run"), str(stage)]
    subprocess.run(command, check=True, capture_output=True, timeout=400)
    check(tmp_path / "run", {"frozen.weight", "frozen.bias"} if stage == 1 else set())
    (step,) = (path for path in (tmp_path / "run").iterdir() if path.is_dir())
    made = write_zero(tmp_path / "made", small_model(), stage, 3)
    assert {file.name for file in step.iterdir()} == {file.name for file in made.iterdir()}
    for file in step.iterdir():
        theirs = torch.load(file, weights_only=False)
        ours = torch.load(made / file.name, weights_only=False)
        assert _kinds(ours).items() <= _kinds(theirs).items(), file.name


def _kinds(state: Mapping[str, Any], depth: int = 2) -> dict[str, str]:
    """Return the types of the values in nested dicts, by dotted keys of at most ``depth`` parts."""
    found = {}
    for key, value in state.items():
        found[key] = type(value).__name__
        if depth > 1 and key == "optimizer_state_dict":
            found |= {f"{key}.{name}": kind for name, kind in _kinds(value, depth - 1).items()}
    return found
