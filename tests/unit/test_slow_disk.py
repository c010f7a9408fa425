"""A disk that a FUSE mount slows down: for whom it works, how long it stays, and what several requests at once get."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fakes
import pytest
from factories import make_result, refused
from fakes import JOB, PlayedIsolation, done, measure, ready

from weighin import slow_disk
from weighin.recommend.candidates import Speeds, behind, rate
from weighin.records.metrics import through_first_pass_ns
from weighin.run import loads
from weighin.slow_disk import Pace

MB, MS = 1e6, 1_000_000
QUICK = Speeds(2e9, 3e9, 1e9, 4e9, 8e9, 1e9, 0.01, 0.001)


def test_a_machine_without_fuse_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_disk, "find_spec", lambda _: True)
    monkeypatch.setattr(slow_disk, "find_library", lambda _: None)
    assert refused(slow_disk.check, in_container=True) == (
        "weighin slows a disk down with FUSE, which does not work here: libfuse 2 is not installed\n"
        "apt-get install libfuse2"
    )


def test_a_slow_disk_ends_with_its_cell(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mock(return_value=Mock(folder=Path("/mounted")))

    def measured(**speed: Any) -> tuple[Any, Any]:
        isolation = PlayedIsolation([fakes.baseline(), fakes.loaded(), ready(), done()])
        job = replace(JOB, cell=replace(JOB.cell, **speed), checkpoint=str(here / "model.pt"))
        result = measure(isolation, here, job, [], None)
        return isolation.jobs[0], result.environment.get("disk")

    monkeypatch.setattr(loads, "Mount", mount)
    (here / "model.pt").touch()
    job, disk = measured(disk_latency_ns=MS)
    assert job.checkpoint == "/mounted/model.pt"
    assert disk == {"means": "fuse", "request_bytes": 128 * 1024}
    mount.assert_called_once_with(here, Pace(None, MS), here / "cache" / "disks")
    mount.return_value.close.assert_called()
    job, disk = measured()
    assert (job.checkpoint, disk) == (str(here / "model.pt"), None)
    mount.assert_called_once()


# -- the model of load times


@pytest.mark.parametrize(
    ("pace", "requests", "mb_per_s"),
    [
        (Pace(200_000_000, 5 * MS), 1, 23.2), (Pace(200_000_000, 5 * MS), 2, 46.4),
        (Pace(200_000_000, 5 * MS), 16, 200.0), (Pace(200_000_000, 20 * MS), 16, 101.5),
        (Pace(200_000_000, 20 * MS), 64, 200.0), (Pace(None, 20 * MS), 64, 419.4), (Pace(50_000_000, None), 1, 50.0),
    ],
)  # fmt: skip
def test_requests_at_once_share_the_rate_and_wait_side_by_side(
    pace: Pace, requests: int, mb_per_s: float
) -> None:
    assert rate(pace, requests) / MB == pytest.approx(mb_per_s, rel=0.01)


def test_a_slow_disk_slows_only_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    slow = behind(QUICK, Pace(200_000_000, 20 * MS))
    assert slow.read_bytes_per_s / MB == pytest.approx(12.7, rel=0.01)
    assert slow.map_bytes_per_s / MB == pytest.approx(25.4, rel=0.01)
    assert slow.read_direct_bytes_per_s / MB == 200
    assert slow.archive_s == pytest.approx(0.13)
    others = set(asdict(QUICK)) - {"read_bytes_per_s", "map_bytes_per_s", "read_direct_bytes_per_s", "archive_s"}  # fmt: skip
    assert all(getattr(slow, name) == getattr(QUICK, name) for name in others)


def test_a_disk_is_never_quicker_than_this_machines() -> None:
    assert behind(QUICK, Pace()) == QUICK
    quick = behind(QUICK, Pace(100_000_000_000, 1))
    assert quick.read_bytes_per_s == QUICK.read_bytes_per_s
    assert quick.map_bytes_per_s == QUICK.map_bytes_per_s


def test_the_first_pass_counts_once() -> None:
    result = make_result()
    forward = next(phase for phase in result.phases if phase.name == "forward")
    assert result.ready_ns
    expected = result.ready_ns + forward.end_ns - forward.start_ns
    assert through_first_pass_ns(result) == expected
    assert through_first_pass_ns(replace(result, phases=(*result.phases, forward))) == expected
    assert through_first_pass_ns(replace(result, ready_ns=None)) is None
