"""A slow disk is as slow as it was asked to be, and a read without an answer ends as a time-out."""

import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from again import BUSY, tried_again
from cells import (
    LARGE,
    MIB,
    Bench,
    Mount,
    Outcome,
    Pace,
    Watched,
    known,
    prepared_isolation,
    remove_stale,
)

pytestmark = pytest.mark.fuse

SLOW = Pace(50_000_000, 5_000_000)
FEW_BYTES = 16 * MIB
REQUEST_BYTES = 128 * 1024
READ_BYTES = 100 * MIB  # 2 s at the rate of SLOW
TRIES = 3
GRACE_S = 30.0  # for a container's end on a busy machine


@contextmanager
def mounted(folder: Path, pace: Pace, root: Path) -> Iterator[Path]:
    with closing(Mount(folder, pace, root)) as mount:
        yield mount.folder


@pytest.fixture
def source(disk: Path) -> Path:
    folder = disk / "slow source"  # a blank in a path is written as a number in the kernel's list
    folder.mkdir(exist_ok=True)
    (folder / "known.bin").write_bytes(os.urandom(FEW_BYTES) + b"the end")
    return folder


@tried_again(BUSY)
def test_a_rate_and_a_latency_hold_for_direct_reads(bench: Bench, isolation: Watched) -> None:
    """Other programs can only make a direct read slower: the best of a few tries counts."""
    found = []
    for _ in range(TRIES):
        result = bench("reads_directly", isolation, disk=SLOW, mib=READ_BYTES // MIB)
        assert (result.outcome, result.message) == (Outcome.OK, "")
        took_s = {one.name: (one.end_ns - one.start_ns) / 1e9 for one in result.phases}
        rate = READ_BYTES / (took_s["together"] - 0.005)
        page_s = mmap.PAGESIZE / 50e6  # a read of one page also takes the page's time at the rate
        latency_s = median(took_s[f"page {number}"] for number in range(30)) - page_s
        found.append((rate, latency_s))
        if rate == pytest.approx(50e6, rel=0.05) and latency_s == pytest.approx(0.005, rel=0.1):
            break
    print(found)
    assert rate == pytest.approx(50e6, rel=0.1)
    assert latency_s == pytest.approx(0.005, rel=0.2)


def test_direct_buffered_and_mapped_reads_see_the_same_bytes(source: Path, disk: Path) -> None:
    whole = (source / "known.bin").read_bytes()
    with mounted(source, Pace(latency_ns=1_000_000), disk / "mounts") as folder:
        path = folder / "known.bin"
        assert path.stat().st_size == len(whole)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == whole
        assert path.read_bytes() == whole
        descriptor, area = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, MIB)
        places = range(0, len(whole), MIB)
        assert whole == b"".join(area[: os.preadv(descriptor, [area], at)] for at in places)
        os.close(descriptor)
        with pytest.raises(OSError, match="Read-only file system"):
            path.write_bytes(b"")
    assert not folder.exists()


@tried_again(BUSY)
def test_requests_share_the_rate_and_wait_for_the_latency_side_by_side(
    source: Path, disk: Path
) -> None:
    with mounted(source, Pace(40_000_000, 20_000_000), disk / "mounts") as folder:
        descriptor = os.open(folder / "known.bin", os.O_RDONLY | os.O_DIRECT)

        def read(at: int) -> int:
            return os.preadv(descriptor, [mmap.mmap(-1, REQUEST_BYTES)], at)

        start = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(read, range(0, FEW_BYTES, REQUEST_BYTES))) == FEW_BYTES
        took_s = time.monotonic() - start
        os.close(descriptor)
    # One after the other, 128 requests of 20 ms would take 2.6 s beside the bytes' 0.42 s.
    assert FEW_BYTES / 40e6 <= took_s < 2.6


def test_a_slow_load_takes_at_least_as_long_as_its_bytes(bench: Bench, process: Watched) -> None:
    result = bench("streaming", process, spec=LARGE, disk=SLOW)
    assert (result.outcome, result.message) == (Outcome.OK, "")
    assert known(result.ready_ns) / 1e9 >= 0.95 * known(result.model_bytes) / 50e6
    assert result.environment["disk"] == {"means": "fuse", "request_bytes": REQUEST_BYTES}
    assert result.environment["storage"].keys() == {"file_system"}


READS = [
    # Buffered reads, the last bytes first; page faults; direct reads.
    pytest.param("baseline", "process", marks=pytest.mark.nightly),
    pytest.param("safetensors_mmap", "cgroup", marks=[pytest.mark.cgroup, pytest.mark.nightly]),
    pytest.param("streaming", "docker", marks=pytest.mark.docker),
]


@pytest.mark.parametrize(("strategy", "name"), READS)
def test_a_read_without_an_answer_ends_as_a_timeout(
    strategy: str, name: str, bench: Bench, seconds_to_load: Callable[[Watched], float]
) -> None:
    isolation = prepared_isolation(name)
    timeout_s = 5 + 2 * seconds_to_load(isolation)
    stalling = Pace(stall_from_bytes=32 * MIB)
    result = bench(strategy, isolation, spec=LARGE, disk=stalling, timeout_s=timeout_s)
    assert result.outcome is Outcome.TIMEOUT
    assert not [text for text in result.warnings if "SIGKILL did not end it" in text]
    assert result.cost
    assert result.cost.wall_ns / 1e9 < timeout_s + GRACE_S  # bench itself sees that nothing is left


@pytest.mark.root
def test_another_user_cannot_read_through_a_mount(disk: Path) -> None:
    (closed := disk / "closed").mkdir(mode=0o700)
    # Everybody may read it, but for the folder above.
    (source := closed / "models").mkdir(mode=0o755)
    (source / "weights.bin").write_bytes(b"w")
    disk.chmod(0o755)
    with mounted(source, Pace(latency_ns=1_000_000), disk / "open mounts") as folder:
        path = folder / "weights.bin"
        assert path.read_bytes() == b"w"
        nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
        ended = subprocess.run(["cat", path], capture_output=True, check=False, **nobody)
    assert (ended.stdout, b"Permission denied" in ended.stderr) == (b"", True)


def test_a_mount_whose_processes_were_killed_is_taken_away(source: Path, disk: Path) -> None:
    root = disk / "killed mounts"
    ended = os.fork()
    if ended == 0:  # a run that dies with all its processes
        mount = Mount(source, Pace(latency_ns=1_000_000), root)
        os.kill(mount.pid, 9)
        os._exit(0)
    os.waitpid(ended, 0)
    (left,) = root.iterdir()
    with pytest.raises(OSError, match="Transport endpoint is not connected"):
        list((left / source.name).iterdir())
    assert remove_stale(root) == [f"slow disk at {left / source.name}"]
    assert list(root.iterdir()) == []
    assert remove_stale(root) == []
