"""Looking at cached bytes of a file where they lie: the right ones, and given back afterwards."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighin.errors import CheckpointError
from weighin.loader.direct_io import PieceReader
from weighin.loader.open_file import WINDOW_BYTES, Window
from weighin.probes.process import memory_of, read_status
from weighin.units import MIB

SIZE = 24 * MIB + 777
CONTENT = os.urandom(SIZE)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("window") / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def window(file: Path) -> Iterator[Window]:
    descriptor = os.open(file, os.O_RDONLY)
    window = Window(descriptor)
    yield window
    window.close()
    os.close(descriptor)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 1), (4095, 2), (5000, WINDOW_BYTES), (SIZE - 1, 1), (SIZE - 5000, 5000)],
)
def test_it_shows_the_files_bytes(window: Window, offset: int, size: int) -> None:
    with window.looking(offset, size) as found:
        assert bytes(found) == CONTENT[offset : offset + size]


def test_only_what_is_looked_at_takes_memory_and_that_is_file_backed(window: Window) -> None:
    before = memory_of(read_status())
    with window.looking(4096, WINDOW_BYTES):
        during = memory_of(read_status())
    after = memory_of(read_status())
    assert during.file_bytes - before.file_bytes == pytest.approx(WINDOW_BYTES, abs=4 * MIB)
    assert during.anon_bytes - before.anon_bytes < MIB
    assert after.file_bytes - before.file_bytes < MIB


@pytest.mark.parametrize(("offset", "size"), [(SIZE, 1), (SIZE - 1, 2), (SIZE + 9999, 1)])
def test_a_file_that_ends_before_is_an_error_and_no_signal(
    file: Path, offset: int, size: int
) -> None:
    reader = PieceReader()
    with pytest.raises(CheckpointError) as caught, reader.opened(file).looking(offset, size):
        pass
    reader.close()
    assert caught.value.message == f"{file}: truncated: it ends before byte {offset + size:,}"


def test_an_empty_file_has_nothing_to_look_at(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    descriptor = os.open(tmp_path / "empty", os.O_RDONLY)
    window = Window(descriptor)
    with pytest.raises(EOFError), window.looking(0, 1):
        pass
    window.close()
    os.close(descriptor)


def test_a_file_that_became_shorter_is_an_error_and_no_signal(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    window = Window(descriptor)
    os.truncate(tmp_path / "file", 8192)
    with pytest.raises(EOFError), window.looking(4096, 8192):
        pass
    with window.looking(0, 8192) as found:
        assert bytes(found) == CONTENT[:8192]
    window.close()
    os.close(descriptor)
