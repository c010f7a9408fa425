"""Skeletons cost no weights and keep what loading loses: buffers, and which weights are tied."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from torch import nn

from weighin.models.gpt2 import gpt2
from weighin.models.tied import tied
from weighin.stream.construct import build_skeleton, construct, reset_buffers, resolve_builder
from weighin.stream.tensors import retie, tied_names

TIED = {"vocab_size": 64, "emb_dim": 16, "n_layers": 2, "n_heads": 2}
GPT2 = {"vocab_size": 64, "context_length": 8, "emb_dim": 16, "n_layers": 2, "n_heads": 2}
CPU = torch.device("cpu")


class ManyInits(nn.Module):
    """Initialises in all the ways that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.embedding = nn.Embedding(8, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.LSTM(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.weight.data.uniform_(-1, 1)
        nn.init.orthogonal_(nn.Linear(2, 2).weight)
        with torch.no_grad():
            self.weight[0] = 1.0
        table = torch.arange(4.0)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("same", table, persistent=False)
        self.register_buffer("steps", torch.tensor(7), persistent=False)


class FromParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("copy", self.weight.detach().clone(), persistent=False)


def test_a_wrong_builder_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(resolve_builder, "weighin.models.gpt2:gpt3") == (
        "builder 'weighin.models.gpt2:gpt3': module 'weighin.models.gpt2' has no function 'gpt3'\n"
        f"define `def gpt3(...)` in {sys.modules['weighin.models.gpt2'].__file__}"
    )
    (tmp_path / "broken_model.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert refused(resolve_builder, "broken_model:build").startswith(
        "builder 'broken_model:build': importing 'broken_model' failed: No module named 'a_pack"
    )
    said = refused(build_skeleton, gpt2, {})
    assert "builder weighin.models.gpt2:gpt2 failed: " in said and "emb_dim" in said
    assert "returned dict, not a torch.nn.Module" in refused(build_skeleton, dict, {})


def test_tied_parameters_stay_tied_and_buffers_are_real() -> None:
    real, skeleton = tied(**TIED), build_skeleton(tied, TIED)
    assert skeleton.get_parameter("head.weight") is skeleton.get_parameter("embedding.weight")
    shapes = [
        {key: one.shape for key, one in each.state_dict().items()} for each in (skeleton, real)
    ]
    assert shapes[0] == shapes[1]
    assert torch.equal(skeleton.get_buffer("rotary.cos"), real.get_buffer("rotary.cos"))
    everything = build_skeleton(gpt2, GPT2)
    assert torch.equal(everything.get_buffer("trf_blocks.1.att.mask"), torch.ones(8, 8).triu(1))
    skeleton = build_skeleton(ManyInits, {})  # all ways of initialising are skipped or survived
    assert torch.equal(skeleton.get_buffer("norm.running_var"), torch.ones(4))
    assert torch.equal(skeleton.get_buffer("table"), torch.arange(4.0))


def test_the_callers_context_has_no_effect_and_feels_none() -> None:
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            skeleton = build_skeleton(tied, TIED)
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    cos = skeleton.get_buffer("rotary.cos")
    assert (cos.device, cos.dtype) == (CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert nn.Linear(2, 2).weight.device == CPU, "the hooks are gone"


def test_reset_buffers_gives_the_constructors_values_in_the_wanted_dtype() -> None:
    model = ManyInits().to_empty(device="cpu")
    running = model.get_buffer("norm.running_var").fill_(5.0)
    reset_buffers(model, ManyInits, {}, CPU, torch.bfloat16)
    assert torch.equal(model.get_buffer("table"), torch.arange(4.0, dtype=torch.bfloat16))
    assert model.same is model.table
    steps = model.get_buffer("steps")
    assert (steps.item(), steps.dtype) == (7, torch.int64)
    assert model.norm.running_var is running, "persistent buffers come from the checkpoint"


def test_a_tied_buffer_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, converted = ManyInits(), list[torch.Tensor]()
    model.table = model.same = table = torch.arange(4.0, dtype=torch.float64)
    convert = torch.Tensor.to

    def noting(tensor: torch.Tensor, *given: Any) -> torch.Tensor:
        converted.append(tensor)
        return convert(tensor, *given)

    monkeypatch.setattr(torch.Tensor, "to", noting)
    construct(lambda: model, torch.float32)
    assert model.same is model.table
    assert [one is table for one in converted] == [True]


def test_a_buffer_that_is_computed_from_a_parameter_is_given_back_or_named() -> None:
    model = FromParameters()
    model.copy = torch.empty(3)
    reset_buffers(model, FromParameters, {}, CPU, torch.float32)
    assert torch.equal(model.copy, torch.ones(3))
    said = "cannot reset buffer 'copy': a new model from weighin.models.tied:tied has no buffer of this name"
    assert refused(reset_buffers, model, tied, TIED, CPU, torch.float32).startswith(said)


def test_a_gpt2_xl_skeleton_costs_little_memory_and_no_imports() -> None:
    code = """
import sys, torch
from weighin.stream.construct import build_skeleton, map_large_tensors
from weighin.models.gpt2 import gpt2
def peak_kib():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
map_large_tensors()
torch.set_num_threads(1)
before, modules = peak_kib(), len(sys.modules)
build_skeleton(gpt2, dict(emb_dim=1600, n_layers=48, n_heads=25), real_buffers="non_persistent")
assert peak_kib() - before < 30 * 1024
assert len(sys.modules) - modules < 10 and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Linked(nn.Module):
    """Parameters ``a``, ``b`` ... of equal values, of which some are one."""

    def __init__(self, *groups: str) -> None:
        super().__init__()
        for group in groups:
            one = nn.Parameter(torch.ones(2))
            for name in group:
                setattr(self, name, one)


LAYER = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (Linked("a", "b"), []),  # equal values are not tied
        (Linked("ac", "bd"), [["a", "c"], ["b", "d"]]),
        (Linked("abd", "c"), [["a", "b", "d"]]),
        (nn.Sequential(LAYER, LAYER), [["0.weight", "1.weight"], ["0.bias", "1.bias"]]),
        (tied(**TIED), [["embedding.weight", "head.weight"]]),
    ],
    ids=["none", "pairs", "three", "a module twice", "deep"],
)
def test_tied_weights_are_found_by_identity_and_tied_again(
    model: nn.Module, groups: list[list[str]]
) -> None:
    assert tied_names(model) == groups
    state = {
        name: value + number for number, (name, value) in enumerate(model.state_dict().items())
    }
    apart = copy.deepcopy(model)
    for name, module in model.named_children():
        setattr(apart, name, copy.deepcopy(module))  # a module that is used twice becomes two
    apart.load_state_dict(state, assign=True)
    assert tied_names(apart) == []
    retie(apart, groups)
    assert tied_names(apart) == groups
    assert all(torch.equal(apart.get_parameter(one[0]), state[one[0]]) for one in groups)
