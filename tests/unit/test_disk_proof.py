"""The proof that a machine holds the pace of a disk: what is read, and what the figures say."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
from scripts import JOB

from weighin.cell import Cell, Job
from weighin.disk.pace import Pace
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import RunningCommand, Streams
from weighin.isolation.process import ProcessIsolation
from weighin.probes import page_cache
from weighin.run import disk_proof, slow_disk
from weighin.run.disk_proof import PROBE, Proof, check, prove
from weighin.run.slow_disk import SlowDisk
from weighin.units import MIB

MS = 1_000_000
RATE = 100_000_000


class FakeMount:
    """Stands for a mount of FUSE."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


class Probed(ProcessIsolation):
    """Runs another program in place of the probe, and notes what was asked of it."""

    def __init__(self, *scripts: str) -> None:
        self.asked: list[dict[str, Any]] = []
        self.commands: list[Cell] = []
        self.mounts: list[tuple[Sequence[str], str]] = []
        self._scripts = list(scripts)

    def start_command(
        self,
        cell: Cell,
        folder: str,
        streams: Streams,
        mounts: Sequence[str] = (),
        throttled_device: str = "",
    ) -> RunningCommand:
        self.commands.append(cell)
        self.asked.append(json.loads(cell.command[-1]))
        self.mounts.append((mounts, throttled_device))
        script = self._scripts.pop(0)
        return super().start_command(replace(cell, command=("sh", "-c", script)), folder, streams)


def printing(spent_ms: float, latency_ms: float | None = None, read_bytes: int = RATE) -> str:
    """A program that prints the figures of a probe."""
    latency_ns = None if latency_ms is None else latency_ms * MS
    figures = {"bytes": read_bytes, "spent_ns": spent_ms * MS, "latency_ns": latency_ns}
    return f"echo '{json.dumps(figures)}'"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[FakeMount | None]:
    """The mount under which the next cells read; None is the kernel's throttle."""
    mounts: list[FakeMount | None] = [None]

    @contextmanager
    def under(job: Job, _isolation: str) -> Iterator[SlowDisk]:
        yield SlowDisk(replace(job, throttled_device="vda"), {}, mounts[0])  # type: ignore[arg-type]

    monkeypatch.setattr(slow_disk, "under", under)
    return mounts


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were dropped from the page cache."""
    files: list[Path] = []
    monkeypatch.setattr(page_cache, "drop", files.extend)
    return files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    (tmp_path / "1.safetensors").write_bytes(bytes(10))
    (tmp_path / "2.safetensors").write_bytes(bytes(100))
    return tmp_path


def job(path: Path, rate: int | None, latency_ns: int | None = None) -> Job:
    cell = replace(JOB.cell, disk_bytes_per_s=rate, disk_latency_ns=latency_ns)
    return replace(JOB, cell=cell, checkpoint=str(path))


def test_the_largest_file_is_read_directly_with_the_cells_own_disk(
    folder: Path, disk: list[FakeMount | None], dropped: list[Path]
) -> None:
    isolation = Probed(printing(1000))
    proof = prove(isolation, job(folder, RATE))
    (cell,) = isolation.commands
    assert cell.command[1:3] == (str(PROBE), str(folder / "2.safetensors"))
    assert (cell.disk_bytes_per_s, cell.operation) == (RATE, "command")
    assert isolation.mounts == [((str(PROBE), str(folder / "2.safetensors")), "vda")]
    assert {folder / "1.safetensors", folder / "2.safetensors"} <= set(dropped)
    assert proof == Proof(Pace(RATE), RATE, None, "the kernel's throttle")
    mounted = FakeMount()
    disk[0] = mounted
    assert prove(Probed(printing(1000)), job(folder, RATE)).through == "FUSE"
    assert mounted.closed == 1


@pytest.mark.parametrize(
    ("rate", "latency_ns", "options"),
    [
        (RATE, None, {"bytes": 2 * RATE, "before": 30_000_000, "threads": 4, "requests": 0}),
        (None, 5 * MS, {"bytes": 0, "before": 0, "threads": 4, "requests": 30}),
        # Twice the 20 ms of the rate are 4 MB in flight, in requests of 128 KiB.
        (RATE, 20 * MS, {"bytes": 2 * RATE, "before": 30_000_000, "threads": 31, "requests": 30}),
        (10 * RATE, 50 * MS, {"bytes": 256 * MIB, "before": 300_000_000, "threads": 128, "requests": 30}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("disk", "dropped")
def test_as_much_is_read_as_the_pace_needs(
    folder: Path, rate: int | None, latency_ns: int | None, options: dict[str, int]
) -> None:
    isolation = Probed(printing(1000, 5))
    prove(isolation, job(folder, rate, latency_ns))
    assert isolation.asked == [options]


@pytest.mark.usefixtures("disk", "dropped")
def test_the_latency_is_without_the_bytes_and_the_rate_without_the_latency(folder: Path) -> None:
    own_ns = round(PAGESIZE / RATE * 1e9)
    proof = prove(Probed(printing(1020, 20)), job(folder, RATE, 20 * MS))
    assert proof.bytes_per_s == pytest.approx(RATE)
    assert proof.latency_ns == 20 * MS - own_ns
    alone = prove(Probed(printing(1020, 20)), job(folder, None, 20 * MS))
    assert (alone.bytes_per_s, alone.latency_ns) == (None, 20 * MS)


@pytest.mark.parametrize(
    ("pace", "bytes_per_s", "latency_ns", "holds"),
    [
        (Pace(RATE), 1.049 * RATE, None, True),
        (Pace(RATE), 1.051 * RATE, None, False),
        (Pace(RATE), 0.951 * RATE, None, True),
        (Pace(RATE), 0.949 * RATE, None, False),
        (Pace(None, 10 * MS), None, 11 * MS - 1, True),
        (Pace(None, 10 * MS), None, 11 * MS + 1, False),
        (Pace(None, 10 * MS), None, 9 * MS - 1, False),
        (Pace(RATE, 10 * MS), RATE, 20 * MS, False),
        (Pace(RATE, 10 * MS), 2 * RATE, 10 * MS, False),
        (Pace(RATE, 10 * MS), RATE, None, False),
        (Pace(RATE), None, None, False),
    ],
)
def test_a_pace_holds_within_5_percent_of_its_rate_and_10_of_its_latency(
    pace: Pace, bytes_per_s: float | None, latency_ns: int | None, holds: bool
) -> None:
    assert Proof(pace, bytes_per_s, latency_ns, "FUSE").holds == holds


@pytest.mark.parametrize(
    ("bytes_per_s", "latency_ns", "text"),
    [
        (198_300_000.0, 5_040_000, "198.3 MB/s and 5.04 ms through FUSE"),
        (198_300_000.0, None, "198.3 MB/s through FUSE"),
        (None, 5_040_000, "5.04 ms through FUSE"),
    ],
)
def test_a_proof_in_words(bytes_per_s: float | None, latency_ns: int | None, text: str) -> None:
    assert str(Proof(Pace(), bytes_per_s, latency_ns, "FUSE")) == text


@pytest.mark.usefixtures("disk", "dropped")
def test_each_pace_is_tested_once_and_again_if_other_work_disturbed_it(folder: Path) -> None:
    good, bad = printing(1000), printing(2000)
    twice = Probed(good)
    check(twice, [job(folder, RATE), job(folder, RATE)])
    assert len(twice.asked) == 1
    disturbed = Probed(bad, bad, good, printing(500))
    check(disturbed, [job(folder, RATE), job(folder, 2 * RATE)])
    assert len(disturbed.asked) == 4
    with pytest.raises(IsolationUnavailable) as caught:
        check(Probed(bad, bad, bad), [job(folder, RATE)])
    assert str(caught.value) == (
        "this machine cannot provide a disk of 100MB/s: direct reads (O_DIRECT) measured 50.0 MB/s"
        " through the kernel's throttle\nstop other work on this machine, or give --disk a slower"
        " rate"
    )


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo one >&2; echo 'OSError: no O_DIRECT' >&2; exit 1", "OSError: no O_DIRECT"),
        ("exec sleep 60", "the read did not end in 0 s"),
    ],
)
@pytest.mark.usefixtures("disk", "dropped")
def test_a_disk_that_cannot_be_read_directly(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setattr(disk_proof, "_PATIENCE_S", 60.0 if "exit" in script else 0.1)
    with pytest.raises(IsolationUnavailable) as caught:
        prove(Probed(script), job(folder, RATE))
    assert str(caught.value) == (
        f"a disk of 100MB/s could not be tested by direct reads (O_DIRECT): {why}\nput the"
        " checkpoint on a disk that allows direct reads: --storage FOLDER"
    )
