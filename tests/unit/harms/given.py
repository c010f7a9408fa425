"""A sound checkpoint of each layout, and the register of what can be done to it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from weighin.stream.slices import TensorPlan

PLANS = [
    TensorPlan("a.weight", (3, 2), torch.float32),
    TensorPlan("a.weighu", (3, 2), torch.float32),  # becomes the first one's name
    TensorPlan("b.bias", (5,), torch.bfloat16),
]
DATA = {  # the file in which a.weight lies, and the one that says so
    "pt": ("", None),
    "pt_legacy": ("", None),
    "safetensors": ("", None),
    "per_param": ("a.weight.pt", "index.json"),
    "per_module": ("a.pt", "index.json"),
    "sharded": ("model-00001-of-00001.safetensors", "model.safetensors.index.json"),
    "sharded_pt": ("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"),
    "dcp": ("__0_0.distcp", ".metadata"),
}
ZIPPED = ("pt", "per_param", "per_module", "sharded_pt", "dcp")
PICKLED = (*ZIPPED, "pt_legacy")
HEADED = ("safetensors", "sharded")
INDEXED = ("per_param", "per_module", "sharded", "sharded_pt", "dcp")
JSON = INDEXED[:-1]
KEYED = ("pt", "pt_legacy", "safetensors", "per_module", "sharded", "sharded_pt")


@dataclass(frozen=True)
class Given:
    """A sound checkpoint to harm, beside a sound file that nobody may open."""

    layout: str
    path: Path
    outside: Path
    proof: Path

    @property
    def data(self) -> Path:
        return self.path / name if (name := DATA[self.layout][0]) else self.path

    @property
    def index(self) -> Path:
        return self.path / str(DATA[self.layout][1])


Said = tuple[Path, str]
Harm = Callable[[Given], Said]
CASES: list[Any] = []


def case(*names: str) -> Callable[[Harm], Harm]:
    """Try a harm in these layouts; it returns the file and the words that the error must have."""

    def register(harm: Harm) -> Harm:
        CASES.extend(pytest.param(name, harm, id=f"{harm.__name__}-{name}") for name in names)
        return harm

    return register


def change(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))


class Command:
    """Leaves a proof where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.proof}",)
