"""The modules that forks of a predicting process share: a load still imports and counts them."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from nightly import nightly

from weighin.cell import Cell
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.predict.client import predict
from weighin.predict.prediction import Prediction
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
    script = BUILD.format(code=code, hidden=hidden)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, text=True
    )
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


@pytest.mark.parametrize("code", ["torch.nn.Embedding(1, 1)", *nightly("import json.tool")])
def test_a_load_that_does_not_import_the_modules_does_not_count_them(code: str) -> None:
    worker, fork = built(code, hidden=False), built(code, hidden=True)
    assert fork["modules"] == worker["modules"]
    assert fork["counted_bytes"] == []


def test_another_hidden_module_comes_back_alone() -> None:
    fork = built("import sympy.core", hidden=True)
    assert "sympy.core" in fork["modules"]
    assert "torch._dynamo" not in fork["modules"]
    assert fork["counted_bytes"] == []


def test_a_prediction_does_not_depend_on_the_predictions_before_it() -> None:
    together = predict([planned(name) for name in ("baseline", "meta_copy", "mmap_assign")])
    (alone,) = predict([planned("mmap_assign")])
    assert alone.work.modules > 100
    after = together[-1]
    assert replace(after.work, cpu_ns=0) == replace(alone.work, cpu_ns=0)
    for kind in ("host_anon_peak_bytes", "host_anon_most_bytes", "floor_bytes"):
        assert abs(figure(after, kind) - figure(alone, kind)) < 4 * MIB, kind
    for kind in ("model_bytes", "tensor_peak_bytes", "disk_read_bytes", "reasons"):
        assert getattr(after, kind) == getattr(alone, kind), kind


def planned(strategy: str) -> Planned:
    info = registry.strategy(strategy)
    model = registry.model("gpt2-tiny")
    return plan_cell(Cell(model, strategy, "process", format=info.formats[0]), info)


def figure(one: Prediction, kind: str) -> int:
    assert one.cannot == ""
    found: int = getattr(one, kind)
    return found
