"""Fixtures of the command line's tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
from commands import CommandLine


@pytest.fixture(scope="session")
def shared_cache(disk: Path) -> Path:
    """A cache that keeps its checkpoints from one test to the next."""
    return disk / "shared cache"


@pytest.fixture
def command(disk: Path, shared_cache: Path, tmp_path: Path) -> Iterator[CommandLine]:
    """The command line in an empty folder. Whatever still runs at the end is an error."""
    folder = disk / tmp_path.name
    folder.mkdir()
    yield CommandLine(folder, shared_cache)
    assert leftovers.processes(str(shared_cache)) == []
    shutil.rmtree(folder)
