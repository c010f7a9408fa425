"""Writes that nobody has looked at: what a real construction would leave, at the cost of what is looked at."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from weighin.probes.process import memory_of, read_status
from weighin.stream.construct import WriteLog, without_weights
from weighin.units import MIB


class Looks(nn.Module):
    """Looks at values by operations and by what is none, seeds amidst, and calls all of ``torch.nn.init``."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        torch.manual_seed(5)
        self.two = copy.deepcopy(self.one)
        self.scale = self.one.weight.abs().max().item()
        self.listed = self.one.bias.tolist()
        self.array = torch.empty(3).fill_(2.0).numpy()
        self.narrow = nn.Linear(3, 3).half()
        self.kept = [self.narrow.weight]
        self.register_buffer("noise", torch.randn(3), persistent=False)
        self.register_buffer("mask", torch.ones(600, 600).triu(1), persistent=False)
        self.turned = nn.Parameter(torch.empty(5, 6).t())
        nn.init.kaiming_uniform_(self.turned, mode="fan_out", nonlinearity="relu")
        self.named = nn.Parameter(torch.empty(4, 6, dtype=torch.bfloat16))
        nn.init.uniform_(tensor=self.named, a=-2, b=3)
        self.mixed = nn.Parameter(torch.empty(2, 6))
        nn.init.kaiming_uniform_(self.mixed, 1, mode="fan_out")
        self.own = nn.Parameter(torch.empty(2, 6))
        nn.init.uniform_(self.own, generator=torch.Generator().manual_seed(3))
        self.refused = ""
        try:
            nn.init.kaiming_uniform_(torch.empty(3))  # as torch refuses it
        except ValueError as error:
            self.refused = str(error)
        self.last = nn.Parameter(torch.empty(5, 6))
        nn.init.normal_(self.last, 1, 0.5)


def test_all_is_as_a_real_construction_leaves_it() -> None:
    log = WriteLog()
    torch.manual_seed(0)
    with log.recording():
        model = Looks()
    log.finish()
    after = torch.rand(3)
    torch.manual_seed(0)
    right = Looks()
    assert torch.equal(after, torch.rand(3))
    for found, wanted in (
        (model.state_dict(), right.state_dict()),
        (dict(model.named_buffers()), dict(right.named_buffers())),
    ):
        assert found.keys() == wanted.keys()
        assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert all(parameter._version > 0 for parameter in (model.turned, model.named, model.last))
    assert "Fan in" in right.refused
    assert (model.scale, model.listed, model.refused) == (right.scale, right.listed, right.refused)
    assert (model.array == right.array).all()
    assert model.kept[0] is model.narrow.weight


@pytest.mark.usefixtures("no_garbage")
def test_what_nobody_looks_at_takes_no_memory() -> None:
    before = memory_of(read_status()).anon_bytes
    model = without_weights(lambda: nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))))
    assert sum(one.nbytes for one in model.parameters()) > 512 * MIB
    assert memory_of(read_status()).anon_bytes - before < 16 * MIB


def test_a_write_raises_where_it_is_written() -> None:
    with pytest.raises(RuntimeError, match="must match the size"), WriteLog().recording():
        torch.empty(3).copy_(torch.ones(2))


def test_other_threads_build_as_ever() -> None:
    def beside() -> torch.Tensor:
        torch.manual_seed(3)
        return nn.Linear(3, 3).weight

    class Slow(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(beside).result())

    found: list[torch.Tensor] = []
    without_weights(Slow)
    assert torch.equal(found[0], beside())
