"""What the predicting process has in memory, and a load has not: modules that its forks share, and a GPU's context."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from weighin.cell import Cell
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.predict import process
from weighin.predict.client import predict
from weighin.suite import registry
from weighin.units import MIB

BUILD = """
import json, sys, torch
from weighin.probes.process import memory_of, read_status
from weighin.predict.process import PRELOADED
def anon_bytes():
    return memory_of(read_status()).anon_bytes
counted = []
PRELOADED.on_import = counted.append
start_bytes = anon_bytes()
if {hidden}:
    PRELOADED.hide()
first = set(sys.modules)
torch_names = set(vars(torch))
{code}
print(json.dumps({{
    "modules": sorted(set(sys.modules) - first),
    "attributes": sorted(set(vars(torch)) - torch_names),
    "counted_bytes": counted,
    "bytes": anon_bytes() - start_bytes,
    "spec": sys.modules["torch._dynamo"].__spec__.origin if "torch._dynamo" in sys.modules else "",
}}))
"""
ON_META = "torch.nn.Embedding(1, 1, device='meta')"


def built(code: str, *, hidden: bool) -> dict[str, Any]:
    command = [sys.executable, "-c", BUILD.format(code=code, hidden=hidden)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_hidden_modules_come_back_with_the_import_that_a_worker_makes() -> None:
    worker, fork = built(ON_META, hidden=False), built(ON_META, hidden=True)
    for same in ("modules", "attributes", "spec"):
        assert fork[same] == worker[same]
    assert "torch._dynamo" in fork["modules"]
    (counted_bytes,) = fork["counted_bytes"]
    assert abs(counted_bytes - worker["bytes"]) < 4 * MIB
    assert abs(fork["bytes"] - worker["bytes"]) < 4 * MIB


def test_what_a_load_does_not_import_is_not_counted_and_a_part_comes_back_alone() -> None:
    code = "torch.nn.Embedding(1, 1); first |= set(sys.modules); import sympy.core"
    fork = built(code, hidden=True)
    assert "sympy.core" in fork["modules"]
    assert "torch._dynamo" not in fork["modules"]
    assert (fork["counted_bytes"], fork["spec"]) == ([], "")


def planned(strategy: str) -> Planned:
    info = registry.strategy(strategy)
    model = registry.model("gpt2-tiny")
    return plan_cell(Cell(model, strategy, "process", format=info.formats[0]), info)


def test_a_prediction_does_not_depend_on_the_predictions_before_it() -> None:
    *_, after = predict([planned(name) for name in ("baseline", "meta_copy", "mmap_assign")])
    (alone,) = predict([planned("mmap_assign")])
    assert (alone.cannot, after.cannot) == ("", "")
    assert alone.work.modules > 100
    assert replace(after.work, cpu_ns=0) == replace(alone.work, cpu_ns=0)
    for kind in ("host_anon_peak_bytes", "host_anon_most_bytes", "floor_bytes"):
        assert abs(getattr(after, kind) - getattr(alone, kind)) < 4 * MIB, kind
    for kind in ("model_bytes", "tensor_peak_bytes", "disk_read_bytes", "reasons"):
        assert getattr(after, kind) == getattr(alone, kind), kind


# -- the RAM of a CUDA context


@pytest.mark.parametrize(
    ("gpu", "context_mib", "kernels_mib"), [("none", 0, 0), ("full", 0, 0), ("free", 30, 20)]
)
def test_the_ram_of_a_context_and_of_the_kernels_that_read_a_model_is_measured(
    gpu: str, context_mib: int, kernels_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_mib = [100]
    zeros = torch.zeros

    def on_the_gpu(size: int, device: str) -> torch.Tensor:
        assert device == "cuda"
        if gpu == "full":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        held_mib.append(30)
        return zeros(min(size, 1))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu != "none")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "zeros", on_the_gpu)
    monkeypatch.setattr(process, "touch", lambda _: held_mib.append(20))
    monkeypatch.setattr(process, "anon_bytes", lambda: sum(held_mib) * MIB)
    assert process.gpu_bytes() == (context_mib * MIB, kernels_mib * MIB)
