"""The two ways to ask the kernel for a file's cached pages, and what is said where it does not tell."""

import ctypes
import mmap
import os
import subprocess
import sys
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
    monkeypatch.setattr(
        page_cache._libc,
        "mincore",
        lambda _, size, residency: ctypes.memset(residency, 1, len(residency)) and 0,
    )
    assert page_cache.cached([file]) is None
    assert page_cache.drop([file]) is None
    with file.open("rb") as source:
        assert page_cache.cached_share(source.fileno(), 0, SIZE) < 1


@tried_again(EVICTED)
@pytest.mark.skipif(os.geteuid() != 0, reason="root mounts a folder read-only")
def test_root_is_told_of_another_users_file_where_nobody_may_write(file: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare -m: root may not mount here")
    os.chown(file, 12345, 12345)
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    code = (
        "from pathlib import Path; from weighin.probes import page_cache;"
        f" page_cache._SYS_CACHESTAT = 9999; print(page_cache.cached([Path({str(file)!r})]))"
    )
    here = str(file.parent)
    command = ("unshare", "-m", "sh", "-c", mount, here, sys.executable, "-P", "-c", code)
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(printed) == pages(SIZE) * mmap.PAGESIZE
