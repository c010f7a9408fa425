"""Each strategy that reads safetensors gives the model's own values, where its package is installed."""

import mmap
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from again import EVICTED, tried_again
from model_differences import differences
from safetensors.torch import save_model
from torch._C._distributed_c10d import HashStore

from weighin.cell import ModelSpec
from weighin.probes import page_cache
from weighin.suite import registry
from weighin.units import MIB
from weighin.worker.loading import Load, import_strategy

READERS = [
    name
    for name, info in registry.strategies().items()
    if "safetensors" in info.formats and "cpu" in info.devices and not info.pretrained
    if name != "dcp_fsdp"  # its model consists of shards: tests/instrument/test_rank_cells.py
]


class Tied(torch.nn.Module):
    """Tied weights, a buffer in the checkpoint, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.last = torch.nn.Linear(7, 5, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def job(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Load:
    spec = ModelSpec("Tied", "test_loaders:Tied")
    marks: Any = SimpleNamespace(phase=lambda _name: nullcontext())
    return Load(checkpoint, torch.device("cpu"), dtype, {}, spec, Tied, marks)


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
    info, path = registry.strategy(name), tmp_path / "model.safetensors"
    if info.missing:
        pytest.skip(f"{name} {info.missing}")
    torch.manual_seed(1)
    save_model(right := Tied(), str(path), {"format": "pt"})  # for accelerate
    model = import_strategy(info.path)(job(path, dtype))
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
