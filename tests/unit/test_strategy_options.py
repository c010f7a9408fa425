"""Options of our strategies: where the state dict goes, and how it gets to the device.

The meta device stands for the other one: what goes there is seen without a GPU.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from worker_jobs import NoPhases

from weighin.cell import ModelSpec
from weighin.suite.registry import strategy
from weighin.worker.loading import Load, import_strategy


def load(name: str, folder: Path, **options: Any) -> nn.Module:
    """Load a checkpoint by a strategy onto the meta device."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    torch.save(build().state_dict(), folder / "model.pt")
    meta, given = torch.device("meta"), MappingProxyType(options)
    spec = ModelSpec("m", "a:b")
    job = Load(folder / "model.pt", meta, torch.float32, given, spec, build, NoPhases())
    model: nn.Module = import_strategy(strategy(name).path)(job)
    return model


NAMES = ("baseline", "sequential", "meta_copy", "load_assign", "mmap_assign")


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")  # on purpose
@pytest.mark.parametrize("location", [None, "cpu", "meta"])
@pytest.mark.parametrize("name", NAMES)
def test_the_state_dict_goes_where_map_location_says_and_the_model_to_the_device(
    name: str, location: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    by_torch = torch.load

    def noting(*arguments: Any, **named: Any) -> Any:
        state = by_torch(*arguments, **named)
        seen.extend({tensor.device.type for tensor in state.values()})
        return state

    monkeypatch.setattr(torch, "load", noting)
    model = load(name, tmp_path, **({"map_location": location} if location else {}))
    assert seen == [location or ("cpu" if name == "sequential" else "meta")]
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("options", [{}, {"pinned": True}])
def test_pinned_copies_are_asked_of_the_allocator(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor  # page-locking itself needs a GPU

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    model = load("sequential", tmp_path, **options)
    assert len(pinned) == len(model.state_dict()) * len(options)
