"""Reading past the page cache gives the file's bytes, wherever they begin and whatever is cached."""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import Mock

import pytest
from again import EVICTED, tried_again
from harms import complaint
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch

from weighin.probes import page_cache
from weighin.stream.bytes import ALIGNMENT, PIECE_BYTES, Reader, address_of

SIZE = 3 * PIECE_BYTES + 12_345
CONTENT = os.urandom(SIZE)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


def read(reader: Reader, file: Path, offset: int, size: int) -> bytes:
    """Return a stretch, read into place and, which must be the same, into the reader's buffer."""
    target = bytearray(size)
    reader.read(file, memoryview(target), offset)
    piece = reader.piece(file, offset, size)
    assert bytes(piece) == bytes(target)
    return bytes(target)


@tried_again(EVICTED)
@pytest.mark.parametrize("cached_bytes", [0, PIECE_BYTES, SIZE])
def test_a_stretch_longer_than_a_piece_whatever_of_it_is_cached(
    reader: Reader, file: Path, cached_bytes: int
) -> None:
    page_cache.drop([file])
    with file.open("rb", buffering=0) as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        source.read(cached_bytes)
    target = bytearray(SIZE - 5)
    reader.read(file, memoryview(target), 5)
    assert bytes(target) == CONTENT[5:]
    assert (page_cache.cached([file]) or 0) >= cached_bytes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offset=st.integers(0, SIZE - 1),
    size=st.integers(1, SIZE),
    start=st.none() | st.integers(0, ALIGNMENT),
    cold=st.booleans(),
)
@example(offset=5, size=SIZE - 5, start=None, cold=True)
@example(offset=5, size=SIZE - 5, start=3, cold=True)
def test_any_stretch_cold_or_cached_into_any_memory(
    reader: Reader, file: Path, offset: int, size: int, start: int | None, cold: bool
) -> None:
    """Memory that lies as in the file, and other; a disk wants large reads, and what is beside is left alone."""
    start = offset % ALIGNMENT if start is None else start
    wanted = CONTENT[offset : offset + size]
    size, read_bytes, os_preadv = len(wanted), list[int](), os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], at: int) -> int:
        read_bytes.append(os_preadv(descriptor, buffers, at))
        return read_bytes[-1]

    if cold:
        page_cache.drop([file])
    with MonkeyPatch.context() as patch, mmap.mmap(-1, size + 2 * ALIGNMENT) as area:
        patch.setattr(os, "preadv", preadv)
        with memoryview(area) as whole, whole[start : start + size] as target:
            reader.read(file, target, offset)
        assert area[start : start + size] == wanted
        assert not any(area[:start])
        assert not any(area[start + size :])
    if size >= 2 * PIECE_BYTES:
        assert max(read_bytes) > size - 4 * ALIGNMENT
    if size <= PIECE_BYTES:
        assert read(reader, file, offset, size) == wanted


@pytest.mark.parametrize("cold", [True, False])
def test_what_cannot_be_read_is_named(
    reader: Reader, file: Path, cold: bool, monkeypatch: MonkeyPatch
) -> None:
    """Also the end of a file within an aligned read."""

    def refusal(path: Path, offset: int, size: int) -> str:
        target = memoryview(mmap.mmap(-1, size))
        return str(complaint(reader.read, path, target, offset))

    page_cache.drop([file]) if cold else file.read_bytes()
    assert read(reader, file, SIZE - 5, 5) == CONTENT[-5:]
    for beyond in (1, 5 * ALIGNMENT):
        for offset in (SIZE - 5, SIZE // ALIGNMENT * ALIGNMENT - 2 * ALIGNMENT):
            said = refusal(file, offset, SIZE - offset + beyond)
            assert f"ends before byte {SIZE + beyond:,}\n" in said
    gone = file.with_name("gone")
    assert f"{gone}: cannot be read: No such file or" in refusal(gone, 0, 5)
    monkeypatch.setattr(os, "preadv", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    assert f"{file}: cannot be read: Input/output error" in refusal(file, 0, PIECE_BYTES)


def test_where_the_file_system_refuses_direct_reads(file: Path, monkeypatch: MonkeyPatch) -> None:
    opened = os.open

    def refusing(path: Any, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags)

    monkeypatch.setattr(os, "open", refusing)
    page_cache.drop([file])
    reader = Reader()
    assert read(reader, file, 777, PIECE_BYTES) == CONTENT[777 : 777 + PIECE_BYTES]
    reader.close()
    # What was read ahead of the stretch may stay.
    with file.open("rb") as source:
        assert page_cache.cached_share(source.fileno(), 4096, PIECE_BYTES // 2) < 1


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_tmpfs_reads_as_any_other(reader: Reader) -> None:
    with NamedTemporaryFile(dir="/dev/shm") as there:
        there.write(CONTENT[:100_000])
        there.flush()
        assert read(reader, Path(there.name), 3, 99_997) == CONTENT[3:100_000]


def test_a_thousand_files_take_no_more_descriptors_and_buffers_than_one(
    reader: Reader, tmp_path: Path
) -> None:
    for number in range(50):
        file = tmp_path / str(number)
        file.write_bytes(CONTENT[number : number + 10_000])
        page_cache.drop([file])
        assert read(reader, file, 1, 9_999) == CONTENT[number + 1 : number + 10_000]
    found = {descriptor.resolve() for descriptor in Path("/proc/self/fd").iterdir()}
    assert [path for path in found if path.is_relative_to(tmp_path)] == [file]


@pytest.mark.parametrize("short_bytes", [512, 4096, 4608, 100_352, 131_072, 3])
@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (5, SIZE - 5), (4096, 70_000)])
def test_a_disk_may_give_less_than_it_was_asked_for(
    file: Path, short_bytes: int, offset: int, size: int, monkeypatch: MonkeyPatch
) -> None:
    """Wherever a read ends, the next one begins where the disk lets it, or goes through the cache."""
    os_preadv = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], at: int) -> int:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return os_preadv(descriptor, buffers, at)
        assert at % ALIGNMENT == 0
        assert all(address_of(buffer) % ALIGNMENT == 0 for buffer in buffers)
        return min(os_preadv(descriptor, buffers, at), short_bytes)

    page_cache.drop([file])
    reader = Reader()
    with MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with mmap.mmap(-1, SIZE + ALIGNMENT) as area, memoryview(area) as whole:
            with whole[offset % ALIGNMENT :][:size] as target:
                reader.read(file, target, offset)
                assert target == CONTENT[offset : offset + size]
            assert bytes(reader.piece(file, offset, 5000)) == CONTENT[offset : offset + 5000]
    reader.close()


@tried_again(EVICTED)  # as what maps a page of the file, or writes it back, keeps it
@pytest.mark.parametrize("most_bytes", [SIZE, 100_352], ids=["whole", "short"])
def test_a_cold_read_leaves_no_page_in_the_cache(
    file: Path, reader: Reader, most_bytes: int, monkeypatch: MonkeyPatch
) -> None:
    os_preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *how: min(os_preadv(*how), most_bytes))
    page_cache.drop([file])
    for start, first in ((0, 0), (3, 777)):  # memory that lies as in the file, and other
        target = memoryview(mmap.mmap(-1, SIZE + ALIGNMENT))[start:][: SIZE - first]
        reader.read(file, target, first)
        assert target == CONTENT[first:]
    for offset in range(0, 3 * PIECE_BYTES, PIECE_BYTES):
        read(reader, file, offset, PIECE_BYTES)
    assert page_cache.cached([file]) == 0
