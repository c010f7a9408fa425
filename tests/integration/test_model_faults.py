"""A model whose forward pass fails is named once, and a load that is right stays ok."""

from typing import Any

import pytest
import torch
from typed import CommandLine

pytestmark = pytest.mark.slow

BROKEN = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 8)

    def forward(self, x):
        return self.line(self.line(x))

def build():
    return Net()

def example_inputs():
    return torch.ones(1, 4)
"""
INFINITE = BROKEN.replace("self.line(self.line(x))", "self.line(x) / 0")
KILLED = BROKEN.replace("self.line(self.line(x))", "__import__('os').abort()")


def benched(command: CommandLine, nets: str, *more: str) -> tuple[int, str, str]:
    (command.folder / "nets.py").write_text(nets)
    torch.save({"line.weight": torch.ones(8, 4), "line.bias": torch.ones(8)}, "own.pt")
    ended = command.run(
        "bench", "--model", "nets.py:build", "--checkpoint", "own.pt", "--isolation", "process",
        "--out", "run", *more,
    )  # fmt: skip
    return ended.code, " ".join(ended.out.split()), ended.err


def blames(record: dict[str, Any]) -> list[str]:
    return [text for text in record["warnings"] if "forward pass" in text]


@pytest.fixture(autouse=True)
def in_the_folder(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(command.folder)


@pytest.mark.parametrize(
    ("nets", "how"),
    [
        (BROKEN, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x8 and 4x8)"),
        pytest.param(
            INFINITE,
            "the forward pass returns values that are not finite",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            KILLED,
            "the measured process was ended by SIGABRT in phase 'forward'",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_model_is_blamed_once_for_all_strategies(
    command: CommandLine, nets: str, how: str
) -> None:
    code, out, err = benched(command, nets, "-s", "baseline,streaming")
    assert code == 0, err
    records = command.records("run")
    assert [record["outcome"] for record in records] == ["ok", "ok"]
    assert {record["message"] for record in records} == {""}
    (warning,) = {text for record in records for text in blames(record)}
    assert warning.startswith(f"the forward pass of nets:build fails: {how}")
    assert warning.endswith("Every weight is right. To measure the load alone: --use none")
    assert out.count("the forward pass of nets:build fails") == 1


def test_without_a_forward_pass_there_is_nothing_to_blame(command: CommandLine) -> None:
    code, _, err = benched(command, BROKEN, "-s", "baseline", "--use", "none")
    assert code == 0, err
    (record,) = command.records("run")
    assert (record["outcome"], blames(record)) == ("ok", [])
