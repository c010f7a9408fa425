"""A conversion that is killed never touches its source and leaves no target, or the whole target."""

import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
import torch
from fork_server import ForkServer

from weighin.stream import formats

SETUP: Final = "import torch; import weighin.checkpoint.convert, weighin.checkpoint.reader, weighin.stream.sharded_files"

KILLED: Final = """
import os, signal, sys
from pathlib import Path
import torch
from weighin.checkpoint import reader
from weighin.checkpoint.convert import Conversion

source, target, moment = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[4])
folder, passed = str(source.parent), 0


def end_here():
    global passed
    passed += 1
    if passed == moment:
        os.kill(os.getpid(), signal.SIGKILL)


def before_each_file_operation(event, arguments):
    if event.split(".")[0] in ("open", "os", "shutil") and folder in str(arguments):
        end_here()


def after_each_piece(where):
    for piece in read_pieces(where):
        yield piece
        end_here()


read_pieces, reader.read_pieces = reader.read_pieces, after_each_piece
conversion = Conversion(source, target, sys.argv[3], verify=True)
sys.addaudithook(before_each_file_operation)
conversion.write()
"""


NAMES: Final = {"layers.0.weight", "head"}


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with closing(ForkServer(SETUP)) as server:
        yield server


@pytest.mark.parametrize(
    ("fmt", "name"), [("safetensors", "new.safetensors"), ("per_param", "new")]
)
def test_a_conversion_that_is_killed_at_any_moment_keeps_its_source(
    forks: ForkServer, tmp_path: Path, fmt: str, name: str
) -> None:
    """Kill at the first file operation, then at the second ..., until a conversion ends by itself."""
    source, target = tmp_path / "model.pt", tmp_path / name
    torch.save({"layers.0.weight": torch.randn(40, 30), "head": torch.randn(7)}, source)
    before = source.read_bytes(), source.stat().st_mtime_ns
    killed = whole = 0
    while True:
        ended = forks.run(KILLED, source, target, fmt, killed + 1)
        assert (source.read_bytes(), source.stat().st_mtime_ns) == before
        if target.exists():
            assert {where.name for where in formats.read(target)} == NAMES
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        killed += 1
        whole += target.exists()
        _remove(tmp_path.glob("new*"))
    assert killed > 15  # among them the renames and the pieces
    assert 0 < whole < killed / 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", name]


def _remove(targets: Iterable[Path]) -> None:
    """Remove what a killed conversion has completed; what it began is left to the next conversion."""
    for target in targets:
        shutil.rmtree(target) if target.is_dir() else target.unlink()
