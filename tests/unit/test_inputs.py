"""What a model is called with: what ``example_inputs`` beside its builder may give."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import nn

from weighin.worker.loading import WrongWeights, check_forward, example_inputs

CPU = torch.device("cpu")


def build(**_: Any) -> nn.Module:
    return nn.Identity()


@pytest.fixture
def module(monkeypatch: MonkeyPatch) -> ModuleType:
    """The module of ``build``, to which a test adds ``example_inputs``."""
    own = ModuleType("own_nets")
    monkeypatch.setitem(sys.modules, "own_nets", own)
    monkeypatch.setattr(build, "__module__", "own_nets")
    return own


def test_a_module_without_example_inputs_gives_none(module: ModuleType) -> None:
    assert example_inputs(build, {}, torch.float32) is None


@pytest.mark.parametrize("nothing", [(), [], {}, None], ids=repr)
def test_nothing_is_no_forward_pass(module: ModuleType, nothing: object) -> None:
    module.example_inputs = lambda: nothing  # type: ignore[attr-defined]
    assert example_inputs(build, {}, torch.float32) is None


def test_they_are_asked_with_the_builders_arguments(module: ModuleType) -> None:
    module.example_inputs = lambda *, width: torch.zeros(width)  # type: ignore[attr-defined]
    given = example_inputs(build, {"width": 3}, torch.float32)
    assert given
    assert [one.shape for one in given.positional] == [(3,)]


@pytest.mark.parametrize(
    ("gives", "expected"),
    [
        (torch.ones(2), "a[1. 1.] b-"),
        ((torch.ones(2), torch.zeros(1)), "a[1. 1.] b[0.]"),
        ([torch.ones(2)], "a[1. 1.] b-"),
        ({"b": torch.zeros(1), "a": torch.ones(2)}, "a[1. 1.] b[0.]"),
        (([torch.ones(1), torch.zeros(1)],), "a[1.], [0.] b-"),
        ((torch.ones(2), 7), "a[1. 1.] b7"),
    ],
    ids=["tensor", "tuple", "list", "keywords", "list of tensors", "number"],
)
def test_tensors_lists_and_keywords_reach_the_model(
    module: ModuleType, gives: object, expected: str
) -> None:
    def shown(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return str(value.numpy())
        return ", ".join(map(shown, value)) if isinstance(value, list) else str(value)

    class Shows(nn.Module):
        def forward(self, a: Any, b: Any = "-") -> None:
            seen.append(f"a{shown(a)} b{shown(b)}")

    seen: list[str] = []
    module.example_inputs = lambda: gives  # type: ignore[attr-defined]
    given = example_inputs(build, {}, torch.float32)
    assert given
    check_forward(Shows(), given.to(CPU))
    assert seen == [expected]


def test_floating_point_tensors_are_of_the_cells_dtype_and_others_stay(module: ModuleType) -> None:
    mask, tokens = torch.tensor([True]), torch.tensor([3])
    module.example_inputs = lambda: {"x": [torch.ones(2)], "mask": (mask, tokens)}  # type: ignore[attr-defined]
    given = example_inputs(build, {}, torch.bfloat16)
    assert given
    (x,), (kept_mask, kept_tokens) = given.keywords["x"], given.keywords["mask"]
    assert (x.dtype, kept_mask.dtype, kept_tokens.dtype) == (
        torch.bfloat16, torch.bool, torch.int64,
    )  # fmt: skip


def test_a_half_precision_model_takes_its_floating_point_inputs(module: ModuleType) -> None:
    module.example_inputs = lambda: torch.ones(1, 2)  # type: ignore[attr-defined]
    given = example_inputs(build, {}, torch.bfloat16)
    assert given
    check_forward(nn.Linear(2, 2, dtype=torch.bfloat16), given.to(CPU))
    broken = nn.Linear(2, 2, dtype=torch.bfloat16)
    nn.init.constant_(broken.bias, float("nan"))
    with pytest.raises(WrongWeights):
        check_forward(broken, given.to(CPU))
