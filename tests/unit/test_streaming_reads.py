"""How streaming reads: by how many threads, in how large and how few reads; and what fails then.

A disk that answers late is read by many threads, in small reads, with no more buffers than others.
"""

import copy
import gc
import itertools
import math
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
from hypothesis import given
from hypothesis import strategies as st
from model_differences import differences
from pytest import MonkeyPatch
from safetensors.torch import save_file
from torch import nn

from weighin.errors import CheckpointError
from weighin.probes import page_cache
from weighin.stream import filling, foreign, formats
from weighin.stream.bytes import (
    DISK_THREADS,
    MOST_THREADS,
    PIECE_BYTES,
    Disk,
    Reader,
    Readers,
    choose,
)
from weighin.stream.load_streaming import Granularity, load_streaming
from weighin.stream.slices import Checkpoint, Fill

KIB, MIB = 1024, 1024**2
MS = 1_000_000
LATE_MS = (20, 21)
LATE = choose(20 * MS, 21 * MS)


class Layers(nn.Module):
    """Large tensors, many small ones, a turned one, a tie, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(2000, 1001)
        self.small = nn.ModuleList(nn.Linear(120, 100) for _ in range(20))
        self.turned = nn.Parameter(torch.randn(700, 300).t())
        self.again = self.large
        self.register_buffer("steps", torch.arange(100_003))
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 3))


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


@pytest.fixture(scope="module", params=["pt", "safetensors"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layers") / f"model.{request.param}"
    state = seeded().state_dict()
    if request.param == "pt":
        torch.save(state, path)
    else:
        save_file({name: one.clone().contiguous() for name, one in state.items()}, path)
    return path


def places(model: nn.Module) -> list[int]:
    """Return where the tensors of a model are in memory."""
    return [one.data_ptr() for one in itertools.chain(model.parameters(), model.buffers())]


def cached(monkeypatch: MonkeyPatch, share: float) -> None:
    """Let so much of each file look as if it were in the page cache."""
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: share)


def answering(monkeypatch: MonkeyPatch, *times_ms: float) -> list[tuple[int, int]]:
    """Let every disk answer its first reads in these times; return the reads' offsets and sizes."""
    looks: list[tuple[int, int]] = []
    piece = Reader.piece

    def noting(reader: Reader, file: Path, offset: int, size: int) -> memoryview:
        if threading.current_thread() is threading.main_thread():
            looks.append((offset, size))
        return piece(reader, file, offset, size)

    around = [moment for time_ms in times_ms for moment in (0, round(time_ms * MS))]
    clock = itertools.cycle(around)
    monkeypatch.setattr(Reader, "piece", noting)
    monkeypatch.setattr("weighin.stream.bytes.time.monotonic_ns", lambda: next(clock))
    return looks


# The share of a file that is cached, how soon its disk answers, and how often it is asked first.
DISKS: dict[str, tuple[float, tuple[float, ...], int, Granularity]] = {
    "cached": (1.0, (0.1,), 0, "all"),
    "a disk in time": (0.0, (0.1,), 1, "module"),
    "a late disk": (0.0, LATE_MS, 2, "tensor"),
}


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("model", [Layers, Layers()], ids=["fresh memory", "memory that is there"])
def test_a_model_from_any_disk_is_right(
    saved: Path,
    model: Any,
    dtype: torch.dtype | None,
    disk: str,
    monkeypatch: MonkeyPatch,
) -> None:
    """Its largest tensor takes several reads, and is larger than any buffer."""
    share, times_ms, looks, granularity = DISKS[disk]
    right, looked = seeded().to(dtype or torch.float32), answering(monkeypatch, *times_ms)
    cached(monkeypatch, share)
    monkeypatch.setattr(filling, "READ_BYTES", MIB)
    target = copy.deepcopy(model)
    addresses = places(target) if isinstance(target, nn.Module) else []
    found = load_streaming(target, saved, dtype=dtype, granularity=granularity)
    assert differences(found, right) == []
    assert len(looked) == looks
    if addresses and dtype is None:  # an optimizer may hold these tensors
        assert places(target) == addresses


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["disk", "cached"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_converted_by_way_of_the_models_own_dtype_as_torch_does(
    dtype: torch.dtype, share: float, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """By more than one read: of 800 KiB."""
    monkeypatch.setattr(filling, "READ_BYTES", 64 * KIB)
    cached(monkeypatch, share)
    right = nn.Linear(250, 401, dtype=torch.float64)
    torch.save(right.state_dict(), tmp_path / "model.pt")
    found = load_streaming(lambda: nn.Linear(250, 401), tmp_path / "model.pt", dtype=dtype)
    assert differences(found, right.to(torch.float32).to(dtype)) == []


@pytest.mark.parametrize(
    ("granularity", "parts"), [("all", [3]), ("module", [2, 1]), ("tensor", [1, 1, 1])]
)
def test_reading_a_part_ends_before_the_next_begins(
    granularity: Granularity, parts: list[int], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Of a tied weight, one name is read."""
    first, tied = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    torch.save((model := nn.Sequential(first, tied, tied)).state_dict(), tmp_path / "model.pt")
    found: list[int] = []
    fill = filling.fill

    def noting(fills: Sequence[Fill], disk: Disk) -> None:
        found.append(len(fills))
        fill(fills, disk)

    monkeypatch.setattr(filling, "fill", noting)
    load_streaming(model, tmp_path / "model.pt", granularity=granularity)
    assert found == parts


# What a load does to its process


def test_a_new_thread_makes_no_cyclic_garbage() -> None:
    filling._compute_alone()
    gc.collect()
    gc.disable()  # as a load does
    filling._compute_alone()
    gc.enable()
    assert gc.collect() == 0


@pytest.mark.parametrize("collecting", [True, False])
def test_no_garbage_is_collected_during_a_load_and_then_as_before(
    saved: Path, collecting: bool
) -> None:
    seen, before = [], threading.active_count()

    def build() -> nn.Module:
        seen.append(gc.isenabled())
        return Layers()

    def fail() -> nn.Module:
        raise KeyError("n_heads")

    try:
        (gc.enable if collecting else gc.disable)()
        load_streaming(build, saved)
        assert gc.isenabled() == collecting
        with pytest.raises(KeyError, match="n_heads"):  # what a builder raises comes through
            load_streaming(fail, saved)
        assert gc.isenabled() == collecting
    finally:
        gc.enable()
    assert seen == [False]
    assert threading.active_count() <= before


def test_a_file_that_ends_early_is_an_error_while_the_model_is_built(
    saved: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    slices, short = formats.read(saved), tmp_path / "short.pt"
    short.write_bytes(saved.read_bytes()[: 5 * MIB])
    elsewhere = Checkpoint(replace(one, file=short) for one in slices)
    monkeypatch.setattr(formats, "read", lambda *_: elsewhere)
    with pytest.raises(CheckpointError, match=r"short\.pt: truncated: it ends before byte"):
        load_streaming(Layers, short)


# By how many threads, in which reads


@pytest.mark.usefixtures("disk_in_time")
@pytest.mark.parametrize(
    ("cached_share", "processors", "threads"),
    # A cached file stays cached if the kernel reclaims a few of its pages.
    [(0.0, 2, 16), (1.0, 1, 1), (1.0, 2, 2), (0.97, 2, 2), (1.0, 64, 4)],
)
def test_a_disk_is_read_by_more_threads_than_the_cache(
    saved: Path,
    cached_share: float,
    processors: int,
    threads: int,
    monkeypatch: MonkeyPatch,
) -> None:
    started: list[int] = []

    def pool(count: int, **more: Any) -> ThreadPoolExecutor:
        started.append(count)
        return ThreadPoolExecutor(count, **more)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(processors)))
    monkeypatch.setattr(filling, "ThreadPoolExecutor", pool)
    cached(monkeypatch, cached_share)
    load_streaming(Layers, saved)
    assert started == [threads]


CHOICES = [  # the times of a small and of a larger read in ms, and threads and KiB of a piece
    (0.052, 0.052, 16, 512),  # a local SSD
    (0.499, 0.499, 16, 512),  # just in time
    (8, 0.3, 16, 512),  # late once, by chance
    (1, 1.3, 16, 504),
    (2, 2.5, 32, 248),
    (5, 5.2, 64, 120),
    (20, 20, 64, 120),
    (0.6, 30, 64, 120),  # slow, not only late
]


def test_the_first_reads_choose_the_readers() -> None:
    for small_ms, sample_ms, threads, piece_kib in CHOICES:
        chosen = choose(round(small_ms * MS), round(sample_ms * MS))
        assert (chosen.threads, chosen.piece_bytes) == (threads, piece_kib * KIB)


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_buffers_are_largest_for_a_disk_in_time(small_ns: int, sample_ns: int) -> None:
    chosen = choose(small_ns, sample_ns)
    assert chosen.threads * chosen.piece_bytes <= DISK_THREADS * PIECE_BYTES
    assert chosen.piece_bytes % 4096 == 0 < chosen.piece_bytes
    assert DISK_THREADS <= chosen.threads <= MOST_THREADS


def test_one_load_looks_at_the_disk_once(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (file := tmp_path / "file").write_bytes(bytes(2 * MIB))
    looks, disk, reader = answering(monkeypatch, *LATE_MS), Disk(None), Reader()
    assert disk.readers(reader, file, 0, 128 * KIB - 1) == Readers(16)  # too small to tell
    assert disk.readers(reader, file, 1000, MIB) == LATE
    assert disk.readers(reader, file, 5, MIB) == LATE
    assert Disk(1).readers(reader, file, 0, MIB) == Readers(1)
    middle = (1000 + (MIB - 128 * KIB) // 2) // 4096 * 4096  # one request, and not two
    assert looks == [(middle, 4096), (middle, 128 * KIB)]
    wanted = Disk(3).readers(reader, file, 0, MIB)  # as the caller wants
    assert wanted == LATE._replace(threads=3)
    looks = answering(monkeypatch, 0.1)
    assert Disk(None).readers(reader, file, 0, MIB) == Readers(16)
    assert len(looks) == 1
    reader.close()


class Flights:
    """Counts the reads under way beside the main thread, which makes the first ones, and keeps each of
    them until as many as awaited are."""

    def __init__(self, awaited: int) -> None:
        self.most, self._now, self._awaited = 0, 0, awaited
        self._changed, self._preadv = threading.Condition(), os.preadv

    def preadv(self, *read: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            return self._preadv(*read)
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._awaited, timeout=60)
        done = self._preadv(*read)
        with self._changed:
            self._now -= 1
        return done


@pytest.mark.parametrize(("times_ms", "under_way"), [((0.06,), 16), (LATE_MS, 64)])
def test_many_reads_are_under_way_if_the_disk_answers_late(
    times_ms: tuple[float, ...], under_way: int, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    path, count = tmp_path / "model.safetensors", 2896  # 32 MiB
    save_file({"weight": torch.zeros(count, count)}, path)
    monkeypatch.setattr(filling, "READ_BYTES", MIB)
    cached(monkeypatch, 0.0)
    answering(monkeypatch, *times_ms)
    flights = Flights(under_way)
    monkeypatch.setattr(os, "preadv", flights.preadv)
    load_streaming(lambda: nn.Linear(count, count, bias=False), path)
    assert flights.most == under_way


@pytest.mark.usefixtures("disk_in_time")
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize(
    ("share", "dtype", "count"),
    # 1.2 MiB by way of buffers of half a MiB, and a look at the disk
    [(1.0, None, 3), (0.0, None, 4), (0.0, torch.bfloat16, 4)],
    ids=["cached", "from a disk", "converted from a disk"],
)
def test_small_tensors_are_read_together_and_filled_where_they_are(
    share: float,
    dtype: torch.dtype | None,
    count: int,
    kind: str,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
) -> None:
    """Also a half, a scalar and an empty one among them."""
    values = [torch.arange(at, at + 1000.0) for at in range(300)]
    values[100:100] = [torch.ones(3).half(), torch.tensor(7.0), torch.empty(0, 3)]
    model = nn.ParameterList(values)
    write_state(path := tmp_path / f"model.{kind}", kind, model.state_dict())
    cached(monkeypatch, share)
    reads, preadv = [], os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    target = nn.ParameterList(torch.zeros_like(one) for one in values)
    addresses = places(target)
    load_streaming(target, path, dtype=dtype)
    assert len(reads) == count
    assert differences(target, model.to(dtype) if dtype else model) == []
    assert dtype or places(target) == addresses


# Headers


def test_headers_of_a_zip_file_on_a_late_disk_are_read_at_once(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    torch.save({f"{number}.weight": torch.zeros(20_000 + number) for number in range(96)}, path)
    sound = [one.offset for one in formats.read(path)]
    readers: set[str] = set()
    pread = os.pread

    def noting(file: int, size: int, offset: int) -> bytes:
        readers.add(threading.current_thread().name)
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", noting)
    for late_s, at_once in ((0.0, True), (math.inf, False)):
        readers.clear()
        monkeypatch.setattr(foreign, "_LATE_S", late_s)
        assert [one.offset for one in formats.read(path)] == sound
        assert (len(readers) > 1) == at_once


def test_many_files_are_read_at_once_if_the_first_was_late(monkeypatch: MonkeyPatch) -> None:
    together = threading.Barrier(5, timeout=60)

    def wait(number: int) -> int:
        return number and together.wait() + 1

    monkeypatch.setattr(foreign, "_LATE_S", 0.0)
    assert sorted(foreign.map_late(wait, range(6))) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(foreign, "_LATE_S", math.inf)
    reads = iter(range(6))
    assert next(foreign.map_late(lambda one: one, reads)) == 0
    assert next(reads) == 1  # nothing was read before its value is asked for
    names = foreign.map_late(lambda _: threading.current_thread().name, range(6))
    assert set(names) == {threading.current_thread().name}


def test_a_file_is_opened_once_for_all_formats(tmp_path: Path, opened: list[str]) -> None:
    path = tmp_path / "model.safetensors"
    for name in ("weight", "other"):  # nothing is remembered until the next load
        save_file({name: torch.zeros(3)}, path)
        del opened[:]
        assert [one.name for one in formats.read(path)] == [name]
        assert opened.count(str(path)) == 1
