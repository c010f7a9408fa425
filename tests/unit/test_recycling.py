"""Large constants of a constructor: right values whatever was done to those before, and little memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from harness.models import recycling
from harness.models.building import without_weights
from harness.models.recycling import RecycledConstants

SIDE = 512  # 1 MiB of float32


def ones(constants: RecycledConstants, *sizes: int, **kwargs: Any) -> torch.Tensor:
    tensor: torch.Tensor = constants.compute(torch.ones, sizes, kwargs)
    return tensor


def upper(constants: RecycledConstants, tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = constants.compute(torch.triu, (tensor,), {"diagonal": 1})
    return found


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith("Anonymous:"))
    return int(found) * 1024


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (torch.ones, (SIDE, SIDE), {}),
        (torch.ones, ((2, SIDE, SIDE),), {"dtype": torch.bool}),
        (torch.zeros, (SIDE, 2 * SIDE), {"dtype": torch.int64, "device": "cpu"}),
        (torch.triu, (torch.rand(SIDE, SIDE),), {"diagonal": 1}),
        (torch.tril, (torch.rand(2, SIDE, SIDE), -3), {}),
        (torch.triu, (torch.rand(SIDE, SIDE).t(),), {}),
        (torch.ones, (3,), {}),
        (torch.ones, (SIDE, SIDE), {"requires_grad": True}),
        (torch.triu, (torch.rand(SIDE, SIDE, requires_grad=True),), {}),
    ],
)
def test_constants_are_what_torch_computes(
    func: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    constants = RecycledConstants()
    for _ in range(4):  # into fresh memory, into memory that held something else, and kept ones
        found, wanted = constants.compute(func, args, kwargs), func(*args, **kwargs)
        assert torch.equal(found, wanted)
        assert (found.dtype, found.requires_grad) == (wanted.dtype, wanted.requires_grad)
        found.detach().fill_(7)


def test_memory_is_used_again_when_nobody_holds_it() -> None:
    constants = RecycledConstants()
    source = torch.rand(SIDE, SIDE)
    first = upper(constants, source)
    address = first.data_ptr()
    del first
    assert upper(constants, source).data_ptr() == address


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize(
    "hold",
    [lambda t: t, lambda t: t[1:], lambda t: t.detach(), lambda t: t.numpy(), torch.nn.Parameter],
)
def test_memory_that_somebody_holds_is_left_alone(
    hold: Callable[[torch.Tensor], Any], before: int
) -> None:
    constants = RecycledConstants()
    for _ in range(before):
        ones(constants, SIDE, SIDE)
    held = hold(ones(constants, SIDE, SIDE))
    other = ones(constants, SIDE, SIDE)
    other.fill_(0)
    assert bool((held == 1).all())


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.fill_(7),
        lambda t: t.data.fill_(7),  # neither of these moves the tensor's version
        lambda t: t.numpy().fill(7),
        lambda t: t.view(torch.int32)[5].fill_(7),
        lambda t: t.sum(),
        lambda t: t.t(),
        lambda t: t.view(2 * SIDE, SIDE // 2),
    ],
)
def test_what_is_computed_from_a_constant_follows_what_became_of_it(
    change: Callable[[torch.Tensor], Any],
) -> None:
    constants = RecycledConstants()
    for _ in range(5):
        upper(constants, ones(constants, SIDE, SIDE))
    source = ones(constants, SIDE, SIDE)
    changed = change(source)
    for tensor in (source, changed):
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2:
            assert torch.equal(upper(constants, tensor), torch.triu(tensor, diagonal=1))
    fresh = upper(constants, ones(constants, SIDE, SIDE))
    assert torch.equal(fresh, torch.triu(torch.ones(SIDE, SIDE), diagonal=1))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.booleans(), st.booleans())))
def test_any_series_of_calls_gives_what_torch_gives(
    series: list[tuple[int, int, bool, bool]],
) -> None:
    constants = RecycledConstants()
    held: list[tuple[torch.Tensor, torch.Tensor]] = []  # ours, and torch's own
    for function, diagonal, writes, drops in series:
        if function < 2 or not held:
            create = (torch.ones, torch.zeros)[function % 2]
            held.append((constants.compute(create, (SIDE, SIDE), {}), create(SIDE, SIDE)))
        else:
            derive = (torch.triu, torch.tril)[function % 2]
            ours, theirs = held[diagonal % len(held)]
            held.append((constants.compute(derive, (ours, diagonal), {}), derive(theirs, diagonal)))
        if writes:
            for tensor in held[-1]:
                tensor.numpy()[diagonal] = 7 + diagonal
        if drops:
            del held[0]
    for ours, theirs in held:
        assert torch.equal(ours, theirs)


def test_masks_that_are_alike_take_the_memory_of_one() -> None:
    constants = RecycledConstants()
    before = anonymous_bytes()
    masks = [upper(constants, ones(constants, SIDE, SIDE)) for _ in range(50)]
    assert all(float(mask.sum()) == SIDE * (SIDE - 1) / 2 for mask in masks)
    assert anonymous_bytes() - before < 8 * 4 * SIDE * SIDE


def test_files_in_memory_are_closed_with_the_constants() -> None:
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    constants = RecycledConstants()
    held = [ones(constants, SIDE, SIDE) for _ in range(5)]
    assert len(list(descriptors.iterdir())) == before + 1
    del constants
    assert len(list(descriptors.iterdir())) == before
    assert all(bool((one == 1).all()) for one in held)


@pytest.mark.parametrize("missing", ["memfd_create", "pagemap"])
def test_values_are_right_where_the_system_has_less(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "pagemap":
        monkeypatch.setattr(recycling, "_PAGEMAP", Path("/proc/self/none"))
    else:
        monkeypatch.delattr(os, "memfd_create")
    constants = RecycledConstants()
    for number in range(5):
        source = ones(constants, SIDE, SIDE)
        source[0] = number
        assert torch.equal(upper(constants, source), torch.triu(source, diagonal=1))


def test_memory_of_another_size_is_not_kept() -> None:
    constants = RecycledConstants()
    ones(constants, SIDE, SIDE)
    ones(constants, SIDE, 2 * SIDE)
    assert [len(area) for area, _ in constants._areas] == [8 * SIDE * SIDE]


def test_a_buffer_that_no_checkpoint_brings_keeps_its_value_beside_many_that_one_brings() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.register_buffer("mask", torch.triu(torch.ones(SIDE, SIDE), diagonal=1))
            own = torch.tril(torch.ones(SIDE, SIDE)) * 1
            self.register_buffer("kept", torch.tril(own), persistent=False)
            own.fill_(number)

    with without_weights():
        layers = torch.nn.ModuleList(Layer(number) for number in range(3))
    wanted = torch.tril(torch.ones(SIDE, SIDE))
    for layer in layers:
        assert layer.mask.is_meta
        assert torch.equal(layer.kept, wanted)


def test_a_mode_outside_still_sees_the_calls() -> None:
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += func is torch.ones
            return func(*args, **(kwargs or {}))

    with Counting() as mode, without_weights():
        torch.ones(SIDE, SIDE)
    assert mode.calls == 1
