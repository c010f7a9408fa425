"""Fixtures of the command line's tests."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
from typed import CommandLine


@pytest.fixture(scope="session")
def shared_cache(disk: Path) -> Path:
    """A cache that keeps its checkpoints from one test to the next."""
    return disk / "shared cache"


@pytest.fixture
def command(disk: Path, shared_cache: Path, tmp_path: Path) -> Iterator[CommandLine]:
    """The command line in an empty folder. Whatever still runs at the end is an error."""
    folder = disk / tmp_path.name
    folder.mkdir()
    line = CommandLine(folder, shared_cache)
    yield line
    line.close()
    left = leftovers.processes(str(shared_cache))
    leftovers.end(left)  # or the tests that follow fail of it, too
    assert left == []
    shutil.rmtree(folder)


@pytest.fixture
def small(command: CommandLine) -> Iterator[Path]:
    """A disk of 2 MiB in the command's folder."""
    folder = command.folder / "small disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "weighin-test", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
