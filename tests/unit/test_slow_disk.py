"""A disk that a FUSE mount slows down: for whom it works, how long it stays, and what waits for it."""

from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

import fakes
import pytest
from fakes import PlayedIsolation, done, ready
from scripts import JOB, measure

from weighin import slow_disk
from weighin.errors import IsolationUnavailable
from weighin.run import loads
from weighin.slow_disk import Mount, Pace

MS = 1_000_000


def test_a_machine_without_fuse_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_disk, "find_spec", lambda _: True)
    monkeypatch.setattr(slow_disk, "find_library", lambda _: None)
    with pytest.raises(IsolationUnavailable) as caught:
        slow_disk.check(in_container=True)
    assert str(caught.value) == (
        "weighin slows a disk down with FUSE, which does not work here: libfuse 2 is not installed\n"
        "apt-get install libfuse2"
    )


class Answering:
    """Stands for the FUSE process, in which reads of /a wait for so many ns; None: it is silent."""

    def __init__(self, *waited_ns: int | None) -> None:
        self._waited_ns = waited_ns

    def send(self, event: str) -> None:
        assert event == "waiting"

    def receive(self, _timeout_s: float) -> dict[str, Any]:
        reads = []
        for one in self._waited_ns:
            if one is None:
                raise TimeoutError
            reads.append(["/a", 4096, monotonic_ns() - one])
        return {"event": "waiting", "reads": reads}


def stalled(latency_ns: int | None, *waited_ns: int | None) -> str:
    disk: Any = Mount.__new__(Mount)
    disk._source, disk._pace, disk._child = Path("/m"), Pace(5, latency_ns), Answering(*waited_ns)
    return str(disk.stalled())


def test_a_read_stalls_half_a_second_after_its_latency() -> None:
    assert stalled(None) == stalled(None, 400 * MS) == stalled(200 * MS, 600 * MS) == ""
    said = "the read of /m/a at offset 4096 has had no answer for 5"
    assert stalled(None, 501 * MS, 1000 * MS).startswith(said)
    assert stalled(20 * MS, 521 * MS).startswith(said)
    assert stalled(None, None) == ""


def test_a_slow_disk_ends_with_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted: list[tuple[Any, ...]] = []
    closed: list[str] = []

    class Mounted:
        folder = Path("/mounted")

        def __init__(self, *asked: Any) -> None:
            mounted.append(asked)

        def close(self) -> None:
            closed.append("closed")

    def measured(**speed: Any) -> tuple[Any, Any]:
        isolation = PlayedIsolation([fakes.baseline(), fakes.loaded(), ready(), done()])
        job = replace(JOB, cell=replace(JOB.cell, **speed), checkpoint=str(tmp_path / "model.pt"))
        result = measure(isolation, tmp_path, job, [], None, stall_from_bytes=None)
        return isolation.jobs[0], result.environment.get("disk")

    monkeypatch.setattr(loads, "Mount", Mounted)
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.pt").touch()
    job, disk = measured(disk_latency_ns=MS)
    assert job.checkpoint == "/mounted/model.pt"
    assert disk == {"means": "fuse", "request_bytes": 128 * 1024}
    assert mounted == [(tmp_path, Pace(None, MS), tmp_path / "cache" / "disks")]
    assert set(closed) == {"closed"}
    job, disk = measured()
    assert (job.checkpoint, disk) == (str(tmp_path / "model.pt"), None)
    assert len(mounted) == 1
