"""What a model is called with: what ``example_inputs`` beside its builder may give."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import nn

from weighin.worker.loading import example_inputs
from weighin.worker.verify import WrongWeights, check_forward

CPU = torch.device("cpu")


def build(**_: Any) -> nn.Module:
    return nn.Identity()


@pytest.fixture
def module(monkeypatch: MonkeyPatch) -> Any:
    """The module of ``build``, to which a test adds ``example_inputs``."""
    own = ModuleType("own_nets")
    monkeypatch.setitem(sys.modules, "own_nets", own)
    monkeypatch.setattr(build, "__module__", "own_nets")
    return own


def test_without_example_inputs_or_with_nothing_there_is_no_forward_pass(module: Any) -> None:
    assert example_inputs(build, {}, torch.float32) is None
    kinds: list[Any] = [(), [], {}, None]
    for nothing in kinds:
        module.example_inputs = lambda nothing=nothing: nothing
        assert example_inputs(build, {}, torch.float32) is None, nothing


def test_they_are_asked_with_the_builders_arguments(module: Any) -> None:
    module.example_inputs = lambda *, width: torch.zeros(width)
    given = example_inputs(build, {"width": 3}, torch.float32)
    assert given
    assert [one.shape for one in given.positional] == [(3,)]


ONE, TWO, ZERO = torch.ones(1), torch.ones(2), torch.zeros(1)


@pytest.mark.parametrize(
    ("gives", "expected"),
    [
        (TWO, "a[1. 1.] b-"),
        ((TWO, ZERO), "a[1. 1.] b[0.]"),
        ([TWO], "a[1. 1.] b-"),
        ({"b": ZERO, "a": TWO}, "a[1. 1.] b[0.]"),
        (([ONE, ZERO],), "a[1.], [0.] b-"),
        ((TWO, 7), "a[1. 1.] b7"),
    ],
    ids=["tensor", "tuple", "list", "keywords", "list of tensors", "number"],
)
def test_tensors_lists_and_keywords_reach_the_model(
    module: Any, gives: object, expected: str
) -> None:
    def shown(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return str(value.numpy())
        return ", ".join(map(shown, value)) if isinstance(value, list) else str(value)

    class Shows(nn.Module):
        def forward(self, a: Any, b: Any = "-") -> None:
            seen.append(f"a{shown(a)} b{shown(b)}")

    seen: list[str] = []
    module.example_inputs = lambda: gives
    given = example_inputs(build, {}, torch.float32)
    assert given
    check_forward(Shows(), given.to(CPU))
    assert seen == [expected]


def test_floating_point_tensors_are_of_the_cells_dtype_and_others_stay(module: Any) -> None:
    mask, tokens = torch.tensor([True]), torch.tensor([3])
    module.example_inputs = lambda: {"input": [torch.ones(1, 2)], "mask": (mask, tokens)}
    given = example_inputs(build, {}, torch.bfloat16)
    assert given
    (x,), kept = given.keywords["input"], given.keywords["mask"]
    assert [one.dtype for one in (x, *kept)] == [torch.bfloat16, torch.bool, torch.int64]
    module.example_inputs = lambda: torch.ones(1, 2)
    given = example_inputs(build, {}, torch.bfloat16)
    assert given
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    check_forward(model, given.to(CPU))
    nn.init.constant_(model.bias, float("nan"))
    with pytest.raises(WrongWeights):
        check_forward(model, given.to(CPU))
