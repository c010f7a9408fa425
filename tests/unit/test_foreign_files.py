"""Files that their reader neither owns nor may write: Linux does not tell what it caches of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weighin.probes import page_cache
from weighin.units import MIB

pytestmark = pytest.mark.root

NOBODY = 65534
SIZES = (3 * MIB, 70 * MIB + 4, 12)

# Everything is imported, and used once, before: nobody may not be allowed to read the environment.
AS_NOBODY = """
import os, sys
from pathlib import Path
import torch
from weighin.probes import page_cache
from weighin.stream.model import load_streaming

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
print(page_cache.cached([foreign]), page_cache.drop([foreign]))
with foreign.open("rb") as opened:
    print(page_cache.cached_share(opened.fileno(), 0, 4096) == 1)
"""


@pytest.fixture(scope="module")
def foreign(disk: Path) -> Path:
    """A file of root's that everybody may read and nobody else may write."""
    folder = disk / "foreign"
    folder.mkdir()
    disk.chmod(0o755)
    folder.chmod(0o755)
    path = folder / "model.pt"
    torch.save(
        {f"b{at}": torch.full((size,), at + 1, dtype=torch.uint8) for at, size in enumerate(SIZES)},
        path,
    )
    path.chmod(0o444)
    return path


def as_nobody(script: str, foreign: Path, tmp_path: Path) -> str:
    own = tmp_path / "own.pt"
    torch.save({"b0": torch.zeros(5, dtype=torch.uint8)}, own)
    command = [sys.executable, "-c", AS_NOBODY + script, str(own), str(foreign), str(SIZES)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_loading_a_cold_file_of_another_user_leaves_no_page_in_the_cache(
    foreign: Path, tmp_path: Path
) -> None:
    assert page_cache.drop([foreign]) == 0
    as_nobody(LOAD, foreign, tmp_path)
    # Of the file's directory, which is read as any file; not of the tensors.
    assert (page_cache.cached([foreign]) or 0) < MIB / 2


def test_loading_a_warm_file_of_another_user_gives_its_values(
    foreign: Path, tmp_path: Path
) -> None:
    foreign.read_bytes()
    as_nobody(LOAD, foreign, tmp_path)


def test_the_cache_of_another_users_file_is_not_known_where_linux_does_not_tell(
    foreign: Path, tmp_path: Path
) -> None:
    foreign.read_bytes()
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release < (6, 15):
        pytest.skip(f"Linux {os.uname().release} tells everybody what it caches: 6.15 does not")
    assert as_nobody(ASK, foreign, tmp_path).splitlines()[0].startswith("None None")
    assert as_nobody(ASK, foreign, tmp_path).splitlines()[1] == "False"
