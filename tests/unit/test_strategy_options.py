"""Options of our strategies: where the state dict goes, and how it gets to the device.

The meta device stands for the other one: what goes there is seen without a GPU.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weighin.suite.registry import strategy
from weighin.worker.loading import import_strategy


@dataclass(frozen=True, slots=True)
class _Load:
    checkpoint: Path
    device: torch.device
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        return model.to(self.dtype)

    def reset_buffers(self, model: nn.Module) -> None:
        pass  # all of them are in the checkpoint

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    state = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()
    torch.save(state, tmp_path / "model.pt")
    return tmp_path / "model.pt", state


@pytest.fixture
def locations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each state dict of the test was loaded to."""
    seen: list[str] = []
    load = torch.load

    def noting(*arguments: Any, **named: Any) -> Any:
        state = load(*arguments, **named)
        seen.extend(sorted({tensor.device.type for tensor in state.values()}))
        return state

    monkeypatch.setattr(torch, "load", noting)
    return seen


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")  # on purpose
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("baseline", {}, "meta"),
        ("baseline", {"map_location": "cpu"}, "cpu"),
        ("sequential", {}, "cpu"),
        ("sequential", {"map_location": "meta"}, "meta"),
        ("meta_copy", {}, "meta"),
        ("meta_copy", {"map_location": "cpu"}, "cpu"),
        ("load_assign", {}, "meta"),
        ("load_assign", {"map_location": "cpu"}, "cpu"),
        ("mmap_assign", {}, "meta"),
        ("mmap_assign", {"map_location": "cpu"}, "cpu"),
    ],
)
def test_the_state_dict_goes_where_map_location_says_and_the_model_to_the_device(
    saved: tuple[Path, Any],
    locations: list[str],
    name: str,
    options: dict[str, Any],
    expected: str,
) -> None:
    job = _Load(saved[0], torch.device("meta"), options)
    model = import_strategy(strategy(name).path)(job)
    assert locations == [expected]
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("name", ["load_assign", "mmap_assign"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_arrive_converted_but_for_integers(
    saved: tuple[Path, dict[str, torch.Tensor]], name: str, dtype: torch.dtype
) -> None:
    path, state = saved
    model = import_strategy(strategy(name).path)(_Load(path, torch.device("cpu"), dtype=dtype))
    found = model.state_dict()
    assert found.keys() == state.keys()
    for key, tensor in state.items():
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert found[key].dtype == expected.dtype
        assert torch.equal(found[key], expected)


def test_pinned_copies_are_asked_of_the_allocator(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor  # page-locking itself needs a GPU

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    load = import_strategy(strategy("sequential").path)
    load(_Load(saved[0], torch.device("meta")))
    assert pinned == []
    load(_Load(saved[0], torch.device("meta"), {"pinned": True}))
    assert len(pinned) == len(saved[1])
