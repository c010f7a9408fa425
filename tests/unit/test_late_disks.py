"""A disk that answers late is read by many threads, in small reads, with no more buffers than others."""

import copy
import itertools
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_differences import differences
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
from weighin.stream.load_streaming import Granularity, load_streaming

KIB, MIB = 1024, 1024**2
MS = 1_000_000
LATE_MS = (20, 21)
LATE = choose(20 * MS, 21 * MS)


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


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


@pytest.fixture(scope="module", params=["pt", "safetensors"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("late") / f"model.{request.param}"
    state = seeded().state_dict()
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


@pytest.mark.parametrize(("state", "looks"), [("cold", 2), ("cached", 0)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("model", [Layers, Layers()], ids=["fresh memory", "memory that is there"])
def test_a_model_from_a_late_disk_is_right(
    saved: Path, model: Any, dtype: torch.dtype | None, state: str, looks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    right, looked = seeded().to(dtype or torch.float32), answering(monkeypatch, *LATE_MS)
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: float(state == "cached"))
    granularity: Granularity = "tensor" if state == "cold" else "all"
    found = load_streaming(copy.deepcopy(model), saved, dtype=dtype, granularity=granularity)
    assert differences(found, right) == []
    assert len(looked) == looks


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
    times_ms: tuple[float, ...], under_way: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, count = tmp_path / "model.safetensors", 2896  # 32 MiB
    save_file({"weight": torch.zeros(count, count)}, path)
    monkeypatch.setattr(filling, "READ_BYTES", MIB)
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: 0.0)
    answering(monkeypatch, *times_ms)
    flights = Flights(under_way)
    monkeypatch.setattr(os, "preadv", flights.preadv)
    load_streaming(lambda: nn.Linear(count, count, bias=False), path)
    assert flights.most == under_way


def test_headers_of_a_zip_file_on_a_late_disk_are_read_at_once(
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


def test_a_file_is_opened_once_for_all_formats(tmp_path: Path, opened: list[str]) -> None:
    path = tmp_path / "model.safetensors"
    for name in ("weight", "other"):  # nothing is remembered until the next load
        save_file({name: torch.zeros(3)}, path)
        del opened[:]
        assert [one.name for one in formats.read(path)] == [name]
        assert opened.count(str(path)) == 1
