"""A user's own model: called where its module says how, and said to be uncalled where it does not."""

import json
from pathlib import Path

import pytest
import torch
from commands import CommandLine, Ended

NETS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.line = torch.nn.Linear(width, width)

    def forward(self, *, x, masks):
        mask, _ = masks
        return {"out": torch.where(mask, self.line(x), 0)}

def build(width):
    return Net(width)
"""
INPUTS = """
def example_inputs(width):
    mask = torch.ones(1, width, dtype=torch.bool)
    return {"x": torch.ones(1, width), "masks": [mask, (mask,)]}
"""


def benched(command: CommandLine, name: str, text: str) -> Ended:
    (command.folder / f"{name}.py").write_text(text)
    torch.save(
        {"line.weight": torch.ones(4, 4), "line.bias": torch.ones(4)}, command.folder / "own.pt"
    )
    return command.run(
        "bench", "--model", f"{name}:build", "--kwargs", '{"width": 4}', "--checkpoint", "own.pt",
        "-s", "load_assign", "--isolation", "process", "--dtype", "bf16", "--out", f"of_{name}",
    )  # fmt: skip


def record(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "records.jsonl").read_text())
    return found


@pytest.mark.slow
def test_a_model_is_called_with_what_its_module_gives_in_the_cells_dtype(
    command: CommandLine,
) -> None:
    ended = benched(command, "called", NETS + INPUTS)
    assert ended.code == 0, ended.err
    found = record(command.folder / "of_called")
    assert found["outcome"] == "ok"
    assert found["cost"]["first_use_ns"]  # type: ignore[index]
    assert "example_inputs" not in ended.out


@pytest.mark.slow
def test_a_model_that_nobody_says_how_to_call_is_ok_with_a_word_on_it(command: CommandLine) -> None:
    ended = benched(command, "uncalled", NETS)
    assert ended.code == 0, ended.err
    found = record(command.folder / "of_uncalled")
    assert found["outcome"] == "ok"
    assert found["cost"]["first_use_ns"] is None  # type: ignore[index]
    assert "uncalled defines no example_inputs" in " ".join(ended.out.split())
