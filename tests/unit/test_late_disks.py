"""A disk that answers late is read by many threads, in small reads, with no more buffers than others."""

import itertools
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

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
from weighin.stream.model import Granularity, load_streaming

KIB, MIB = 1024, 1024**2
MS = 1_000_000
LATE_MS = (20, 21)
LATE = choose(20 * MS, 21 * MS)


@pytest.mark.parametrize(
    ("small_ns", "sample_ns", "threads", "piece_kib"),
    [
        (52_000, 52_000, 16, 512),  # a local SSD
        (499_999, 499_999, 16, 512),  # just in time
        (8 * MS, 300_000, 16, 512),  # late once, by chance
        (1 * MS, 1_300_000, 16, 504),
        (2 * MS, 2_500_000, 32, 248),
        (5 * MS, 5_200_000, 64, 120),
        (20 * MS, 20 * MS, 64, 120),
        (600_000, 30 * MS, 64, 120),  # slow, not only late
    ],
)
def test_the_first_reads_choose_the_readers(
    small_ns: int, sample_ns: int, threads: int, piece_kib: int
) -> None:
    chosen = choose(small_ns, sample_ns)
    assert (chosen.threads, chosen.piece_bytes) == (threads, piece_kib * KIB)


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_the_buffers_of_all_threads_are_largest_for_a_disk_in_time(
    small_ns: int, sample_ns: int
) -> None:
    chosen = choose(small_ns, sample_ns)
    assert chosen.threads * chosen.piece_bytes <= DISK_THREADS * PIECE_BYTES
    assert chosen.piece_bytes % 4096 == 0 < chosen.piece_bytes
    assert DISK_THREADS <= chosen.threads <= MOST_THREADS


def test_one_load_looks_at_the_disk_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, disk, reader = answering(monkeypatch, *LATE_MS), Disk(None), Reader()
    assert disk.readers(reader, saved, 0, 128 * KIB - 1) == Readers(16)  # too small to tell
    assert disk.readers(reader, saved, 1000, MIB) == LATE
    assert disk.readers(reader, saved, 5, MIB) == LATE
    assert Disk(1).readers(reader, saved, 0, MIB) == Readers(1)
    middle = (1000 + (MIB - 128 * KIB) // 2) // 4096 * 4096  # one request, and not two
    assert looks == [(middle, 4096), (middle, 128 * KIB)]
    wanted = Disk(3).readers(reader, saved, 0, MIB)  # as the caller wants
    assert wanted == LATE._replace(threads=3)
    looks = answering(monkeypatch, 0.1)
    assert Disk(None).readers(reader, saved, 0, MIB) == Readers(16)
    assert len(looks) == 1
    reader.close()


class Layers(nn.Module):
    """Large tensors, many small ones, a turned one, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(1000, 1001)
        self.small = nn.ModuleList(nn.Linear(120, 100) for _ in range(20))
        self.turned = nn.Parameter(torch.randn(700, 300).t())
        self.again = self.large
        self.register_buffer("steps", torch.arange(100_003))


@pytest.fixture(scope="module", params=["pt", "safetensors"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("late") / f"model.{request.param}"
    torch.manual_seed(0)
    state = Layers().state_dict()
    if request.param == "pt":
        torch.save(state, path)
    else:
        save_file({name: one.clone().contiguous() for name, one in state.items()}, path)
    return path


def answering(monkeypatch: pytest.MonkeyPatch, *times_ms: float) -> list[tuple[int, int]]:
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


CASES = [
    ("cold", "fresh memory", None, "all"),
    ("cold", "fresh memory", torch.bfloat16, "tensor"),
    ("cold", "fresh memory", torch.float64, "all"),
    ("cold", "memory that is there", None, "tensor"),
    ("cold", "memory that is there", torch.bfloat16, "all"),
    ("cold", "memory that is there", torch.float64, "tensor"),
    ("cached", "fresh memory", None, "tensor"),
    ("cached", "memory that is there", torch.bfloat16, "all"),
]


@pytest.mark.parametrize(("state", "memory", "dtype", "granularity"), CASES)
def test_a_model_from_a_late_disk_is_right(
    saved: Path, granularity: Granularity, dtype: torch.dtype | None,
    memory: str, state: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    right = Layers().state_dict()
    looks = answering(monkeypatch, *LATE_MS)
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: float(state == "cached"))
    model = Layers if memory == "fresh memory" else Layers()
    found = load_streaming(model, saved, dtype=dtype, granularity=granularity).state_dict()
    for name, tensor in right.items():
        wanted = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert torch.equal(found[name], wanted), name
    assert len(looks) == 2 * (state == "cold")


class Flights:
    """Counts the reads under way, and keeps each of them until as many as awaited are.

    The first reads of a load, which the main thread makes, take the latency.
    """

    def __init__(self, awaited: int, latency_s: float) -> None:
        self.most, self._now = 0, 0
        self._awaited, self._latency_s = awaited, latency_s
        self._changed = threading.Condition()
        self._preadv = os.preadv

    def preadv(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            first = threading.current_thread() is threading.main_thread()
            if not first:
                self._changed.wait_for(lambda: self.most >= self._awaited, timeout=60)
        if first:
            time.sleep(self._latency_s)
        try:
            return self._preadv(file, buffers, offset)
        finally:
            with self._changed:
                self._now -= 1


@pytest.mark.parametrize(
    ("latency_s", "under_way"), [(0.0, 16), (0.02, 64)], ids=["at once", "late"]
)
def test_many_reads_are_under_way_at_once_if_the_disk_answers_late(
    latency_s: float, under_way: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, count = tmp_path / "model.safetensors", 2896  # 32 MiB
    save_file({"weight": torch.zeros(count, count)}, path)
    monkeypatch.setattr(filling, "READ_BYTES", MIB)
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: 0.0)
    if not latency_s:  # as most disks do; but nobody knows how busy this one is
        answering(monkeypatch, 0.06)
    flights = Flights(under_way, latency_s)
    monkeypatch.setattr(os, "preadv", flights.preadv)
    load_streaming(lambda: nn.Linear(count, count, bias=False), path)
    assert flights.most == under_way


def test_the_headers_of_a_zip_file_are_read_at_once_from_a_late_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_many_files_are_read_at_once_if_the_first_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_file_is_opened_once_for_all_formats_that_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(3)}, path)
    opened: list[Path] = []
    opening = Path.open

    def noting(path: Path, *how: Any, **more: Any) -> Any:
        opened.append(path)
        return opening(path, *how, **more)

    monkeypatch.setattr(Path, "open", noting)
    formats.read(path)
    assert opened == [path]
    save_file({"other": torch.zeros(3)}, path)  # nothing is remembered until the next load
    assert [one.name for one in formats.read(path)] == ["other"]
