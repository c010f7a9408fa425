"""A load from a disk that answers late has many requests under way, and the values are right."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weighin.errors import CheckpointError
from weighin.slow_disk import Mount, Pace
from weighin.stream.model import load_streaming

LATENCY_NS = 20_000_000
PATIENCE_S = 60.0

pytestmark = pytest.mark.fuse


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1000, 1003) for _ in range(10)))


def small() -> nn.Module:
    return nn.Sequential(*(nn.Linear(110, 100) for _ in range(900)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def waiting(disk: Mount) -> int:
    """Return the number of requests without an answer, which the kernel counts."""
    device = os.minor(disk.folder.stat().st_dev)
    return int(Path(f"/sys/fs/fuse/connections/{device}/waiting").read_text())


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("build", [large, small])
def test_a_load_from_a_late_disk_is_right(
    build: Callable[[], nn.Module], suffix: str, folder: Path
) -> None:
    right, path = build().state_dict(), folder / f"model{suffix}"
    torch.save(right, path) if suffix == ".pt" else save_file(right, path)
    with closing(Mount(folder, Pace(None, LATENCY_NS), folder.parent)) as disk:
        found = load_streaming(build, disk.folder / path.name).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in right.items())


@pytest.mark.nightly  # on a machine with much other work, fewer were under way
@pytest.mark.parametrize("build", [large, small])
@pytest.mark.parametrize(("threads", "under_way"), [(None, 64), (4, 4)])
def test_a_late_disk_has_64_requests_under_way_unless_the_caller_wants_fewer_threads(
    threads: int | None, under_way: int, build: Callable[[], nn.Module], folder: Path
) -> None:
    """The last third of the file is never answered, so that each thread waits with its request."""
    path = folder / "model.safetensors"
    save_file(build().state_dict(), path)
    pace = Pace(None, LATENCY_NS, stall_from_bytes=path.stat().st_size * 2 // 3)

    def load() -> None:
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_streaming(build, disk.folder / path.name, threads=threads)

    with closing(Mount(folder, pace, folder.parent)) as disk:
        loading = threading.Thread(target=load)
        loading.start()
        deadline = time.monotonic() + PATIENCE_S
        while waiting(disk) < under_way and time.monotonic() < deadline:
            time.sleep(0.05)
        # The kernel may divide the read of a thread into two requests.
        assert under_way <= waiting(disk) <= 2 * under_way
    loading.join()
