"""How streaming reads: by how many threads, in how large reads; and what fails then."""

import gc
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weighin.errors import CheckpointError
from weighin.probes import page_cache
from weighin.stream import filling, formats
from weighin.stream.bytes import Disk
from weighin.stream.model import Granularity, load_streaming
from weighin.stream.slices import Checkpoint, Fill


class Two(torch.nn.Module):
    """A weight that takes several reads, another that takes one, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Linear(2500, 3)
        self.large = torch.nn.Linear(2500, 4001, bias=False)
        self.again = self.large


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Two, Path]:
    torch.manual_seed(0)
    right, path = Two(), tmp_path_factory.mktemp("two") / "two.pt"
    torch.save(right.state_dict(), path)
    return right, path


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "cached"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["all", "module", "tensor"])
def test_a_model_is_right_at_every_granularity_from_the_disk_and_from_the_cache(
    two: tuple[Two, Path], granularity: Granularity, dtype: torch.dtype | None, cold: bool
) -> None:
    right, path = two
    if cold:
        assert page_cache.drop([path]) == 0
    found = load_streaming(Two, path, dtype=dtype, granularity=granularity)
    for name, tensor in right.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor.to(dtype or tensor.dtype)), name
    assert found.get_submodule("again").weight is found.get_submodule("large").weight


@pytest.mark.parametrize("granularity", ["all", "module", "tensor"])
def test_reading_a_part_ends_before_the_next_begins(
    two: tuple[Two, Path], granularity: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    fill = filling.fill

    def noting(fills: Sequence[Fill], disk: Disk) -> None:
        found.append(len(fills))
        fill(fills, disk)

    monkeypatch.setattr(filling, "fill", noting)
    load_streaming(Two, two[1], granularity=granularity)
    parts = {
        "all": [3],
        "module": [2, 1],
        "tensor": [1, 1, 1],
    }  # of a tied weight, one name is read
    assert found == parts[granularity]


@pytest.mark.parametrize("collecting", [True, False])
def test_no_garbage_is_collected_during_a_load_and_then_as_before(
    two: tuple[Two, Path], collecting: bool
) -> None:
    seen = []

    def build() -> torch.nn.Module:
        seen.append(gc.isenabled())
        return Two()

    def fail() -> torch.nn.Module:
        raise RuntimeError

    try:
        (gc.enable if collecting else gc.disable)()
        load_streaming(build, two[1])
        assert gc.isenabled() == collecting
        with pytest.raises(RuntimeError):
            load_streaming(fail, two[1])
        assert gc.isenabled() == collecting
    finally:
        gc.enable()
    assert seen == [False]


def test_what_a_builder_raises_comes_through(two: tuple[Two, Path]) -> None:
    def build() -> torch.nn.Module:
        raise KeyError("n_heads")

    before = threading.active_count()
    with pytest.raises(KeyError, match="n_heads"):
        load_streaming(build, two[1])
    assert threading.active_count() <= before


def test_a_file_that_ends_early_is_an_error_while_the_model_is_built(
    two: tuple[Two, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = two
    slices = formats.read(path)
    short = tmp_path / "short.pt"
    short.write_bytes(path.read_bytes()[: 20 * 1024**2])
    assert page_cache.drop([short]) == 0
    elsewhere = Checkpoint(replace(one, file=short) for one in slices)
    monkeypatch.setattr(formats, "read", lambda *_: elsewhere)
    with pytest.raises(CheckpointError, match=r"short\.pt: truncated: it ends before byte"):
        load_streaming(Two, short)


def test_the_model_of_another_checkpoint_is_refused_after_it_was_built(
    two: tuple[Two, Path],
) -> None:
    with pytest.raises(CheckpointError, match=r"2 missing \(bias, weight\)"):
        load_streaming(lambda: torch.nn.Linear(2500, 4001), two[1])


@pytest.mark.usefixtures("disk_in_time")
@pytest.mark.parametrize(
    ("cold", "processors", "threads"),
    [(True, 2, 16), (False, 1, 1), (False, 2, 2), (False, 64, 4)],
)
def test_a_disk_is_read_by_more_threads_than_the_cache(
    two: tuple[Two, Path],
    cold: bool,
    processors: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(processors)))
    started: list[int] = []

    def pool(count: int, **more: Any) -> ThreadPoolExecutor:
        started.append(count)
        return ThreadPoolExecutor(count, **more)

    monkeypatch.setattr(filling, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: float(not cold))
    load_streaming(Two, two[1])
    assert started == [threads]


def test_a_cached_file_stays_cached_if_the_kernel_reclaims_a_few_of_its_pages(
    two: tuple[Two, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    started: list[int] = []

    def pool(count: int, **more: Any) -> ThreadPoolExecutor:
        started.append(count)
        return ThreadPoolExecutor(count, **more)

    monkeypatch.setattr(filling, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: 0.97)
    load_streaming(Two, two[1])
    assert started == [2]


@pytest.mark.usefixtures("disk_in_time")
def test_small_tensors_that_are_converted_do_not_wait_for_a_disk_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.ParameterList(torch.arange(at, at + 1000.0) for at in range(300))
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    assert page_cache.drop([path]) == 0
    reads = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    target = torch.nn.ParameterList(torch.empty(1000) for _ in range(300))
    load_streaming(target, path, dtype=torch.bfloat16)
    assert len(reads) <= 4  # 1.2 MiB by way of buffers of half a MiB
    for found, right in zip(target, model, strict=True):
        assert torch.equal(found, right.bfloat16())


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "cached"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_tensors_larger_than_any_buffer(
    kind: torch.dtype, dtype: torch.dtype, cold: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    right = torch.nn.Linear(2500, 4001, dtype=kind)
    torch.save(right.state_dict(), tmp_path / "large.pt")
    if cold:
        assert page_cache.drop([tmp_path / "large.pt"]) == 0
    found = load_streaming(lambda: torch.nn.Linear(2500, 4001), tmp_path / "large.pt", dtype=dtype)
    right.to(torch.float32).to(dtype)  # as torch does: by way of the model's own dtype
    assert torch.equal(found.get_parameter("weight"), right.weight)
    assert torch.equal(found.get_parameter("bias"), right.bias)
