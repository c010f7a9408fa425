"""Large constants of a constructor: right values, memory that is used again, never while it is held."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from harness.models.building import without_weights
from harness.models.recycling import RecycledConstants

SIDE = 512  # 1 MiB of float32


def ones(constants: RecycledConstants, *sizes: int, **kwargs: Any) -> torch.Tensor:
    tensor: torch.Tensor = constants.compute(torch.ones, sizes, kwargs)
    return tensor


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
    for _ in range(3):  # into fresh memory, and into memory that held something else
        found, wanted = constants.compute(func, args, kwargs), func(*args, **kwargs)
        assert torch.equal(found, wanted)
        assert (found.dtype, found.requires_grad) == (wanted.dtype, wanted.requires_grad)
        found.detach().fill_(7)


def test_memory_is_used_again_when_nobody_holds_it() -> None:
    constants = RecycledConstants()
    first = ones(constants, SIDE, SIDE)
    address = first.data_ptr()
    del first
    assert ones(constants, SIDE, SIDE).data_ptr() == address


@pytest.mark.parametrize(
    "hold",
    [lambda t: t, lambda t: t[1:], lambda t: t.detach(), lambda t: t.numpy(), torch.nn.Parameter],
)
def test_memory_that_somebody_holds_is_left_alone(hold: Callable[[torch.Tensor], Any]) -> None:
    constants = RecycledConstants()
    held = hold(ones(constants, SIDE, SIDE))
    other = ones(constants, SIDE, SIDE)
    other.fill_(0)
    assert bool((held == 1).all())


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
