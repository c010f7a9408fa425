"""What a file asks for of reads past the page cache, and that they keep to it."""

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from weighin.loader import open_file
from weighin.loader.direct_io import PIECE_BYTES, PieceReader, address_of
from weighin.loader.open_file import ALIGNMENT, LARGEST_ALIGNMENT, alignment_of
from weighin.probes import page_cache

SIZE = 3 * PIECE_BYTES + 12_345
CONTENT = os.urandom(SIZE)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alignment") / "file"
    path.write_bytes(CONTENT)
    return path


class Libc:
    """A kernel that tells this; ``mask`` 0: it does not know the question."""

    def __init__(self, memory: int, offset: int, mask: int = 0x2000, failed: int = 0) -> None:
        self._says, self._failed = (mask, memory, offset), failed

    def statx(self, _file: int, path: bytes, flags: int, mask: int, found: object) -> int:
        assert (path, flags, mask) == (b"", 0x1000, 0x2000)
        mask, memory, offset = self._says
        statx = found._obj  # type: ignore[attr-defined]
        statx.mask, statx.dio_mem_align, statx.dio_offset_align = mask, memory, offset
        return self._failed


@pytest.mark.parametrize(
    ("libc", "alignment_bytes"),
    [
        (Libc(512, 512), ALIGNMENT),
        (Libc(4, 4096), ALIGNMENT),
        (Libc(512, 16384), 16384),
        (Libc(512, 65536), 65536),
        (Libc(512, 128 * 1024), 0),
        (Libc(65536, 65536), 0),
        (Libc(0, 0), 0),
        (Libc(0, 0, mask=0x17FF), ALIGNMENT),
        (Libc(0, 0, failed=-1), ALIGNMENT),
        (object(), ALIGNMENT),
    ],
)
def test_the_alignment_is_what_the_kernel_says_of_the_file(
    libc: object, alignment_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_file, "_libc", libc)
    assert alignment_of(0) == alignment_bytes


def test_this_kernel_is_asked_as_it_wants_to_be(file: Path) -> None:
    with file.open("rb") as source:
        assert alignment_of(source.fileno()) in (0, *(ALIGNMENT << n for n in range(5)))
    assert ctypes.sizeof(open_file._Statx) == 256


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("lead", [0, 5, 4096])
@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (5, 9), (70_000, 2_500_001), (4096, 4096)])
def test_a_file_with_large_blocks_is_read_in_these(
    file: Path, offset: int, size: int, lead: int, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk refuses what is aligned otherwise."""
    monkeypatch.setattr(open_file, "alignment_of", lambda _: LARGEST_ALIGNMENT)
    os_preadv = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], at: int) -> int:
        aligned = at % LARGEST_ALIGNMENT == 0 and all(
            len(buffer) % LARGEST_ALIGNMENT == 0 and address_of(buffer) % ALIGNMENT == 0
            for buffer in buffers
        )
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and not aligned:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        direct.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return os_preadv(descriptor, buffers, at)

    direct: list[bool] = []
    monkeypatch.setattr(os, "preadv", preadv)
    # What is cached in truth may change at any moment.
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: float(not cold))
    reader = PieceReader()
    with mmap.mmap(-1, SIZE + ALIGNMENT) as area, memoryview(area) as whole:
        with whole[lead : lead + size] as target:
            reader.read(file, target, offset)
            assert target == CONTENT[offset : offset + size]
        piece = min(size, reader.piece_bytes)
        assert bytes(reader.piece(file, offset, piece)) == CONTENT[offset : offset + piece]
    reader.close()
    assert set(direct) == {cold}


def test_a_file_that_must_go_through_the_cache_is_dropped_behind(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_file, "alignment_of", lambda _: 0)
    page_cache.drop([file])
    reader, target = PieceReader(), bytearray(SIZE - 777)
    reader.read(file, memoryview(target), 777)
    reader.close()
    assert bytes(target) == CONTENT[777:]
    assert page_cache.cached([file]) == 0
