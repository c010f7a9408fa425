"""Test the comparison itself: it finds each planted difference, and none between equal models."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, cases, check
from cells import CheckpointError, format_of, read_state
from checkpoints import PT, make
from hypothesis import HealthCheck, given, settings
from known import KNOWN
from model_differences import differences, output_differences, same_bytes, torch_leaves
from torch import nn
from torch.nn.parameter import is_lazy


class Model(nn.Module):
    table: torch.Tensor
    row: torch.Tensor
    kept: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(6.0).view(2, 3), persistent=False)
        self.register_buffer("row", self.table[1])
        self.plain = torch.ones(2)
        self.kept = [self.first.bias]
        bias: Any = self.first.bias
        bias.axis = 1
        self.first.bias.register_hook(lambda gradient: gradient * 2)
        self.number = 1.5


def _lost_hook(model: Model) -> None:
    new: Any = nn.Parameter(model.first.bias.detach())
    new.axis = 1
    model.first.bias, model.kept = new, [new]


def _other_place(model: Model) -> None:
    model.row = model.table.view(-1)[2:5]
    model.row[0] = 3


PLANTED: dict[str, tuple[Callable[[Model], object], str]] = {
    "wrong byte": (lambda model: model.first.weight.data.view(torch.uint8)[2, 7].bitwise_xor_(1), "other values"),
    "lost tie": (lambda model: setattr(model.last, "weight", nn.Parameter(model.first.weight.detach().clone())), "same object is shared no more"),
    "same memory, other object": (lambda model: setattr(model.last, "weight", nn.Parameter(model.first.weight.detach())), "same object is shared no more"),
    "new tie": (lambda model: setattr(model, "plain", model.table[0, :2].fill_(1)), "memory is shared now"),
    "lost buffer": (lambda model: model._buffers.pop("table"), "lost .*table"),
    "buffer became persistent": (lambda model: model._non_persistent_buffers_set.clear(), "non-persistent"),
    "buffer became None": (lambda model: setattr(model, "table", None), "NoneType"),
    "other stride": (lambda model: setattr(model.table, "data", model.table.t().contiguous().t()), "stride is"),
    "requires_grad": (lambda model: model.first.bias.requires_grad_(False), "requires_grad is"),
    "dtype": (lambda model: model.to(torch.float64), "dtype is"),
    "meta device": (lambda model: setattr(model, "plain", torch.ones(2, device="meta")), "meta"),
    "other class of parameter": (lambda model: setattr(model, "row", nn.Parameter(model.row)), "lost .*row"),
    "lost gradient hook": (_lost_hook, "gradient of"),
    "lost attribute": (lambda model: delattr(model.first.bias, "axis"), "attributes are"),
    "plain tensor": (lambda model: model.plain.add_(1), "plain: other values"),
    "plain number": (lambda model: setattr(model, "number", 2.5), "2.5, not 1.5"),
    "view of another place": (_other_place, "memory is shared no more"),
    "list holds another object": (lambda model: setattr(model, "kept", [model.first.bias.detach().clone().requires_grad_()]), "same object is shared no more"),
    "training": (lambda model: model.first.eval(), "training is False"),
    "negative zero": (lambda model: model.table[0].neg_().abs_().neg_(), "other values"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found(name: str) -> None:
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(0)
    reference = Model()
    assert differences(model, reference) == []
    plant, line = PLANTED[name]
    with torch.no_grad():
        plant(model)
    found = differences(model, reference)
    assert any(re.search(line, one) for one in found), found


def test_nan_equals_itself_and_its_bits_count_where_nothing_is_converted() -> None:
    one = torch.tensor([float("nan"), 1.0])
    assert same_bytes(one, one.clone())
    other = one.clone()
    other.view(torch.int32)[0] |= 1
    assert not same_bytes(one, other)
    assert same_bytes(one, other, nan_bits=False)
    assert not same_bytes(one, torch.tensor([1.0, float("nan")]), nan_bits=False)


def test_another_output_is_found() -> None:
    assert not output_differences({"a": torch.ones(2)}, {"a": torch.ones(2)})
    assert output_differences({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 1.1])})
    assert output_differences({"a": torch.ones(2)}, {"a": RuntimeError})


def load_plainly(
    source: nn.Module | Callable[[], nn.Module],
    path: Path,
    *,
    dtype: torch.dtype | None,
    **_options: Any,
) -> nn.Module:
    """Load with torch's own load_state_dict; restore all tensors if torch raises."""
    state = torch.load(path, weights_only=True) if format_of(path) in PT else read_state(path)
    model = source if isinstance(source, nn.Module) else source()
    held = [one for one in (*model.parameters(), *model.buffers()) if not is_lazy(one)]
    before = [one.detach().clone() for one in held]
    owned = [(names, dict(names)) for one in model.modules() for names in (vars(one), one._buffers)]
    try:
        return torch_leaves(model, state, dtype)
    except Exception as error:
        for one, value in zip(held, before, strict=True):
            if not same_bytes(one, value):
                one.detach().copy_(value)
        for names, old in owned:
            names.update(old)
        raise CheckpointError(str(error), "load another") from error


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_a_plain_load_passes_the_check(case: Case, disk: Path) -> None:
    check(case, disk, load_plainly)


@pytest.mark.parametrize("built", [False, True], ids=["builder", "built"])
@pytest.mark.parametrize("behaviour", KNOWN)
def test_a_plain_load_passes_every_known_case(behaviour: str, built: bool, disk: Path) -> None:
    check(replace(KNOWN[behaviour], built=built), disk, load_plainly)


@pytest.mark.parametrize("behaviour", KNOWN)
def test_torch_refuses_what_the_names_of_known_cases_say(behaviour: str, disk: Path) -> None:
    if "refuse" in behaviour and "torch refuses" not in behaviour:
        return  # weighin alone refuses it
    case = KNOWN[behaviour]
    _, state = make(case.recipe, case.checkpoint, disk)
    refused = pytest.raises(RuntimeError) if "torch refuses" in behaviour else nullcontext()
    with refused:
        torch_leaves(case.recipe.prepare()[0](), state, None)
