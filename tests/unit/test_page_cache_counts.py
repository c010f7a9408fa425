"""The two ways to ask the kernel for a file's cached pages, and what is said where it does not tell."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from again import EVICTED, tried_again

from weighin.probes import page_cache
from weighin.units import MIB

SIZE = 8 * MIB + 100  # no whole number of pages


@pytest.fixture
def file(disk: Path) -> Path:
    path = disk / "counted pages.bin"
    path.write_bytes(os.urandom(SIZE))
    return path


def ask(file: Path, how: Callable[[int, int, int], int | None]) -> int | None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return how(descriptor, 0, file.stat().st_size)
    finally:
        os.close(descriptor)


def pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE)


@tried_again(EVICTED)
def test_both_ways_to_ask_agree(file: Path) -> None:
    page_cache.drop([file])
    with file.open("rb") as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        os.pread(source.fileno(), MIB, 2 * MIB)
    assert ask(file, page_cache._cached_pages) == ask(file, page_cache._mincore_pages) == pages(MIB)
    with file.open("rb") as source:
        assert page_cache.cached_share(source.fileno(), 2 * MIB + 5, MIB - 5) == 1
        assert page_cache.cached_share(source.fileno(), 2 * MIB + 5, MIB) < 1
    file.read_bytes()
    assert (
        ask(file, page_cache._cached_pages) == ask(file, page_cache._mincore_pages) == pages(SIZE)
    )


@tried_again(EVICTED)
@pytest.mark.parametrize("cachestat", [True, False], ids=["cachestat", "mincore"])
def test_a_stretch_behind_the_files_end_is_not_cached(
    file: Path, cachestat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cachestat:
        monkeypatch.setattr(page_cache, "_SYS_CACHESTAT", 9999)
    file.read_bytes()
    with file.open("rb") as source:
        assert page_cache.cached_share(source.fileno(), SIZE - 5000, 5000) == 1
        assert page_cache.cached_share(source.fileno(), SIZE - 5000, 5000 + 64 * MIB) < 1
        assert page_cache.cached_share(source.fileno(), SIZE + 64 * MIB, 5000) < 1


def test_where_nobody_tells_it_is_not_known(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Linux 6.5, where mincore says of another user's file that all of it is there."""
    monkeypatch.setattr(page_cache, "_SYS_CACHESTAT", 9999)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert page_cache.cached([file]) is None
    assert page_cache.drop([file]) is None
    with file.open("rb") as source:
        assert page_cache.cached_share(source.fileno(), 0, SIZE) < 1
