"""The two ways to ask the kernel for a file's cached pages, and what is said where it does not tell."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
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
        assert page_cache.cached_share(source.fileno(), 2 * MIB + 5, MIB - 5) == 1
        assert page_cache.cached_share(source.fileno(), 2 * MIB + 5, MIB) < 1
    for size in (MIB, SIZE):
        found = [ask(file, page_cache._cached_pages), ask(file, page_cache._mincore_pages)]
        assert found == [pages(size)] * 2
        file.read_bytes()


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


# -- files that their reader neither owns nor may write: Linux does not tell what it caches of them

SIZES = (3 * MIB, 70 * MIB + 4, 12)

# Everything is imported, and used once, before: nobody may not be allowed to read the environment.
AS_NOBODY = """
import os, sys
from pathlib import Path
import torch
from weighin.probes import page_cache
from weighin.stream.load_streaming import load_streaming

class Model(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        for number, size in enumerate(sizes):
            self.register_buffer(f"b{number}", torch.zeros(size, dtype=torch.uint8))

own, foreign, sizes = Path(sys.argv[1]), Path(sys.argv[2]), eval(sys.argv[3])
load_streaming(lambda: Model([5]), own)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
"""
LOAD = """
model = load_streaming(lambda: Model(sizes), foreign)
assert [b.sum().item() for b in model.buffers()] == [n * s for n, s in enumerate(sizes, 1)]
"""
ASK = """
with foreign.open("rb") as opened:
    share = page_cache.cached_share(opened.fileno(), 0, 4096)
print(page_cache.cached([foreign]), page_cache.drop([foreign]), share == 1)
"""


@pytest.fixture
def foreign(disk: Path) -> Path:
    """A file of root's that everybody may read and nobody else may write."""
    (folder := disk / "foreign").mkdir(exist_ok=True)
    path = folder / "model.pt"
    tensors = [torch.full((size,), at + 1, dtype=torch.uint8) for at, size in enumerate(SIZES)]
    torch.save({f"b{at}": tensor for at, tensor in enumerate(tensors)}, path)
    disk.chmod(0o755)
    folder.chmod(0o755)
    path.chmod(0o444)
    return path


def as_nobody(script: str, foreign: Path) -> str:
    own = foreign.with_name("own.pt")
    torch.save({"b0": torch.zeros(5, dtype=torch.uint8)}, own)
    command = [sys.executable, "-c", AS_NOBODY + script, str(own), str(foreign), str(SIZES)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.root
def test_a_warm_file_of_another_user_gives_its_values(foreign: Path) -> None:
    foreign.read_bytes()
    as_nobody(LOAD, foreign)


@pytest.mark.root
@tried_again("a file system, or another program that reads it, may keep pages of a file")
def test_loading_a_cold_file_of_another_user_leaves_no_page_in_the_cache(foreign: Path) -> None:
    assert page_cache.drop([foreign]) == 0
    as_nobody(LOAD, foreign)
    # Of the file's directory, which is read as any file; not of the tensors.
    assert (page_cache.cached([foreign]) or 0) < MIB / 2


@pytest.mark.root
def test_what_is_cached_of_a_foreign_file_is_not_known(foreign: Path) -> None:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release < (6, 15):
        pytest.skip(f"Linux {os.uname().release} tells everybody what it caches: 6.15 does not")
    foreign.read_bytes()
    assert as_nobody(ASK, foreign) == "None None False\n"
