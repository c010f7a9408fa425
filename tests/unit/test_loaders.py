"""Our strategies: each that reads safetensors gives the model's own values, and each does what its options say.

Where options lead, the meta device stands for the other one: what goes there is seen without a GPU.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from again import EVICTED, tried_again
from model_differences import differences
from safetensors.torch import save_model
from torch import nn
from torch._C._distributed_c10d import HashStore
from worker_jobs import load

from weighin.cell import ModelSpec
from weighin.probes import page_cache
from weighin.suite import registry
from weighin.units import MIB
from weighin.worker.loading import import_strategy

READERS = [
    name
    for name, info in registry.strategies().items()
    if "safetensors" in info.formats and "cpu" in info.devices and not info.pretrained
    if name != "dcp_fsdp"  # its model consists of shards: tests/instrument/test_rank_cells.py
]


class Tied(nn.Module):
    """Tied weights, a buffer in the checkpoint, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(7, 5, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)


SPEC = ModelSpec("Tied", "test_loaders:Tied")


@pytest.fixture
def _group() -> Iterator[None]:
    """A process group of one rank, for strategies that divide a load among ranks."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", READERS)
def test_a_strategy_loads_the_right_values(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if missing := registry.strategy(name).missing:
        pytest.skip(f"{name} {missing}")
    torch.manual_seed(1)
    path = tmp_path / "model.safetensors"
    save_model(right := Tied(), str(path), {"format": "pt"})  # for accelerate
    model = load(name, path, Tied, SPEC, dtype)
    vars(model).pop("hf_device_map", None)  # accelerate notes in the model where its parts are
    assert differences(model, right.to(dtype)) == []
    assert model.first.weight is model.last.weight


class Refusing(mmap.mmap):
    """Maps of a kernel without MADV_POPULATE_READ."""

    def madvise(self, option: int, *stretch: int) -> None:
        raise OSError(22, "Invalid argument")


@tried_again(EVICTED)
@pytest.mark.parametrize("mapping", [mmap.mmap, Refusing])
def test_a_prefetch_leaves_the_file_in_the_page_cache(
    mapping: type[mmap.mmap], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "file").write_bytes(bytes(5 * MIB))
    if page_cache.drop([path]) != 0:
        pytest.skip("this file system keeps a file's pages")
    strategy: Any = import_strategy(registry.strategy("prefetch_mmap").path)
    monkeypatch.setattr(mmap, "mmap", mapping)
    strategy.__globals__["prefetch"](path, window_bytes=2 * MIB)
    cached = page_cache.cached([path])
    assert cached is not None
    assert mapping is Refusing or cached == 5 * MIB  # advice alone reads in the background


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(build().state_dict(), path := tmp_path / "model.pt")
    return path


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")  # on purpose
@pytest.mark.parametrize("location", [None, "cpu", "meta"])
@pytest.mark.parametrize(
    "name", ["baseline", "sequential", "meta_copy", "load_assign", "mmap_assign"]
)
def test_the_state_dict_goes_where_map_location_says_and_the_model_to_the_device(
    name: str, location: str | None, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    by_torch = torch.load

    def noting(*arguments: Any, **named: Any) -> Any:
        state = by_torch(*arguments, **named)
        seen.extend({tensor.device.type for tensor in state.values()})
        return state

    monkeypatch.setattr(torch, "load", noting)
    options: dict[str, Any] = {"map_location": location} if location else {}
    model = load(name, saved, build, SPEC, device="meta", **options)
    assert seen == [location or ("cpu" if name == "sequential" else "meta")]
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("options", [{}, {"pinned": True}])
def test_pinned_copies_are_asked_of_the_allocator(
    options: dict[str, Any], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor  # page-locking itself needs a GPU

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    model = load("sequential", saved, build, SPEC, device="meta", **options)
    assert len(pinned) == len(model.state_dict()) * len(options)
