"""Writes that nobody has looked at: what a real construction would leave, at the cost of what is looked at."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from weighin.probes.process import memory_of, read_status
from weighin.stream.construct import WriteLog, without_weights
from weighin.units import MIB


def recorded(build: Callable[[], nn.Module]) -> tuple[nn.Module, WriteLog]:
    log = WriteLog()
    torch.manual_seed(0)
    with log.recording():
        model = build()
    return model, log


class Reseeded(nn.Module):
    """Draws, seeds, and draws again; keeps one of the later numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        torch.manual_seed(5)
        self.second = nn.Linear(3, 3)
        self.register_buffer("noise", torch.randn(3), persistent=False)


class Looks(nn.Module):
    """Looks at values by operations, and by what is none."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = copy.deepcopy(self.one)
        self.scale = self.one.weight.abs().max().item()
        self.listed = self.one.bias.tolist()
        self.array = torch.empty(3).fill_(2.0).numpy()
        self.narrow = nn.Linear(3, 3).half()
        self.kept = [self.narrow.weight]
        self.register_buffer("mask", torch.ones(600, 600).triu(1), persistent=False)


@pytest.mark.parametrize("kind", [Reseeded, Looks])
def test_all_that_is_looked_at_is_as_a_real_construction_leaves_it(
    kind: Callable[[], nn.Module],
) -> None:
    model, log = recorded(kind)
    log.finish()
    torch.manual_seed(0)
    right = kind()
    for name, tensor in right.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    for name, buffer in right.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    if isinstance(right, Looks):
        assert isinstance(model, Looks)
        assert (model.scale, model.listed) == (right.scale, right.listed)
        assert (model.array == right.array).all()
        assert model.kept[0] is model.narrow.weight


def test_what_nobody_looks_at_takes_no_memory() -> None:
    before = memory_of(read_status()).anon_bytes
    model = without_weights(lambda: nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))))
    assert sum(one.nbytes for one in model.parameters()) > 512 * MIB
    assert memory_of(read_status()).anon_bytes - before < 16 * MIB


def test_a_write_raises_where_it_is_written() -> None:
    with pytest.raises(RuntimeError, match="must match the size"), WriteLog().recording():
        torch.empty(3).copy_(torch.ones(2))


def test_other_threads_build_as_ever() -> None:
    building, others = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            building.set()
            assert others.wait(60)

    found: list[nn.Module] = []

    def build_beside() -> None:
        assert building.wait(60)
        torch.manual_seed(3)
        found.append(nn.Linear(3, 3))
        others.set()

    thread = threading.Thread(target=build_beside)
    thread.start()
    without_weights(Slow)
    thread.join()
    torch.manual_seed(3)
    assert torch.equal(found[0].get_parameter("weight"), nn.Linear(3, 3).weight)


class Initialises(nn.Module):
    """Calls the functions of ``torch.nn.init`` in several ways, and keeps what some refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.one = nn.Parameter(torch.empty(5, 6))
        nn.init.normal_(self.one, 1, 0.5)
        self.two = nn.Parameter(torch.empty(5, 6).t())
        nn.init.kaiming_uniform_(self.two, mode="fan_out", nonlinearity="relu")
        self.three = nn.Parameter(torch.empty(4, 6, dtype=torch.bfloat16))
        nn.init.uniform_(tensor=self.three, a=-2, b=3)
        self.four = nn.Parameter(torch.empty(2, 6))
        nn.init.kaiming_uniform_(self.four, 1, mode="fan_out")
        self.five = nn.Parameter(torch.empty(2, 6))
        nn.init.uniform_(self.five, generator=torch.Generator().manual_seed(3))
        self.refused = ""
        try:
            nn.init.kaiming_uniform_(torch.empty(3))  # as torch refuses it
        except ValueError as error:
            self.refused = str(error)
        self.last = nn.Conv2d(2, 3, 2)


def test_functions_of_torch_nn_init_draw_the_numbers_of_a_real_construction() -> None:
    model, log = recorded(Initialises)
    log.finish()
    after = torch.rand(3)
    torch.manual_seed(0)
    right = Initialises()
    assert torch.equal(after, torch.rand(3))
    assert "Fan in" in str(right.refused)
    assert model.refused == right.refused
    for name, tensor in right.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
        assert dict(model.named_parameters())[name]._version > 0
