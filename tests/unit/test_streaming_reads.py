"""How streaming reads: by how many threads, in how large and how few reads; and what fails then."""

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
from cells import write_state
from nightly import by_day
from state_files import assert_same
from torch import nn

from weighin.errors import CheckpointError
from weighin.probes import page_cache
from weighin.stream import filling, formats
from weighin.stream.bytes import Disk, Reader
from weighin.stream.load_streaming import Granularity, load_streaming
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


@pytest.fixture(params=["cold", "cached"])
def cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let every page of a file look as if the disk had to read it, or none."""
    cold = request.param == "cold"
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: float(not cold))
    return bool(cold)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("granularity", by_day(["all", "module", "tensor"], "all"))
@pytest.mark.usefixtures("cold")
def test_a_model_is_right_at_every_granularity_from_the_disk_and_from_the_cache(
    two: tuple[Two, Path], granularity: Granularity, dtype: torch.dtype | None
) -> None:
    """Its largest tensor is larger than any buffer."""
    right, path = two
    found = load_streaming(Two, path, dtype=dtype, granularity=granularity)
    for name, tensor in right.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor.to(dtype or tensor.dtype)), name
    assert found.get_submodule("again").weight is found.get_submodule("large").weight


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_converted_by_way_of_the_models_own_dtype(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """As torch does."""
    torch.manual_seed(0)
    right = torch.nn.Linear(2500, 4001, dtype=torch.float64)
    torch.save(right.state_dict(), tmp_path / "large.pt")
    found = load_streaming(lambda: torch.nn.Linear(2500, 4001), tmp_path / "large.pt", dtype=dtype)
    right.to(torch.float32).to(dtype)
    assert torch.equal(found.get_parameter("weight"), right.weight)
    assert torch.equal(found.get_parameter("bias"), right.bias)


@pytest.mark.parametrize(
    ("granularity", "parts"), [("all", [3]), ("module", [2, 1]), ("tensor", [1, 1, 1])]
)
def test_reading_a_part_ends_before_the_next_begins(
    two: tuple[Two, Path],
    granularity: Granularity,
    parts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a tied weight, one name is read."""
    found: list[int] = []
    fill = filling.fill

    def noting(fills: Sequence[Fill], disk: Disk) -> None:
        found.append(len(fills))
        fill(fills, disk)

    monkeypatch.setattr(filling, "fill", noting)
    load_streaming(Two, two[1], granularity=granularity)
    assert found == parts


def test_a_new_thread_makes_no_cyclic_garbage() -> None:
    filling._compute_alone()
    gc.collect()
    gc.disable()  # as a load does
    filling._compute_alone()
    gc.enable()
    assert gc.collect() == 0


@pytest.mark.parametrize("collecting", [True, False])
def test_no_garbage_is_collected_during_a_load_and_then_as_before(
    two: tuple[Two, Path], collecting: bool
) -> None:
    seen, before = [], threading.active_count()

    def build() -> torch.nn.Module:
        seen.append(gc.isenabled())
        return Two()

    def fail() -> torch.nn.Module:
        raise KeyError("n_heads")

    try:
        (gc.enable if collecting else gc.disable)()
        load_streaming(build, two[1])
        assert gc.isenabled() == collecting
        with pytest.raises(KeyError, match="n_heads"):  # what a builder raises comes through
            load_streaming(fail, two[1])
        assert gc.isenabled() == collecting
    finally:
        gc.enable()
    assert seen == [False]
    assert threading.active_count() <= before


def test_a_file_that_ends_early_is_an_error_while_the_model_is_built(
    two: tuple[Two, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = two
    slices = formats.read(path)
    short = tmp_path / "short.pt"
    short.write_bytes(path.read_bytes()[: 20 * 1024**2])
    elsewhere = Checkpoint(replace(one, file=short) for one in slices)
    monkeypatch.setattr(formats, "read", lambda *_: elsewhere)
    with pytest.raises(CheckpointError, match=r"short\.pt: truncated: it ends before byte"):
        load_streaming(Two, short)


@pytest.mark.usefixtures("disk_in_time")
@pytest.mark.parametrize(
    ("cached_share", "processors", "threads"),
    # A cached file stays cached if the kernel reclaims a few of its pages.
    [(0.0, 2, 16), (1.0, 1, 1), (1.0, 2, 2), (0.97, 2, 2), (1.0, 64, 4)],
)
def test_a_disk_is_read_by_more_threads_than_the_cache(
    two: tuple[Two, Path], cached_share: float, processors: int, threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(processors)))
    started: list[int] = []

    def pool(count: int, **more: Any) -> ThreadPoolExecutor:
        started.append(count)
        return ThreadPoolExecutor(count, **more)

    monkeypatch.setattr(filling, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: cached_share)
    load_streaming(Two, two[1])
    assert started == [threads]


@pytest.mark.usefixtures("disk_in_time")
def test_small_tensors_that_are_converted_do_not_wait_for_a_disk_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.ParameterList(torch.arange(at, at + 1000.0) for at in range(300))
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: 0.0)
    reads = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    target = torch.nn.ParameterList(torch.empty(1000) for _ in range(300))
    load_streaming(target, path, dtype=torch.bfloat16)
    assert len(reads) == 4  # a look at the disk, and 1.2 MiB by way of buffers of half a MiB
    for found, right in zip(target, model, strict=True):
        assert torch.equal(found, right.bfloat16())


def layers(count: int = 60) -> nn.Sequential:
    """Return small layers of many sizes, with large ones and other dtypes among them."""
    torch.manual_seed(1)
    found = [nn.Linear(1 + number % 37, 1 + number % 11) for number in range(count)]
    found[20] = nn.Linear(600, 700)
    model = nn.Sequential(*found)
    model[30].half()
    model[31].register_buffer("steps", torch.tensor(7))
    model[32].register_buffer("none", torch.empty(0, 3))
    return model


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_small_tensors_are_filled_where_they_are_and_cached_ones_by_few_reads(
    kind: str, cold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = tmp_path / f"model.{kind}", layers()
    right = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    write_state(path, kind, right)
    with torch.no_grad():
        for tensor in target.state_dict().values():
            tensor.zero_()
    addresses = [tensor.data_ptr() for tensor in target[:20].parameters()]
    piece, calls = Reader.piece, []

    def counted(*arguments: Any) -> memoryview:
        calls.append(arguments)
        return piece(*arguments)

    monkeypatch.setattr(Reader, "piece", counted)
    found = load_streaming(target, path).state_dict()
    assert_same(found, right)
    assert [tensor.data_ptr() for tensor in target[:20].parameters()] == addresses
    assert cold or len(calls) == 2  # for 126 tensors
