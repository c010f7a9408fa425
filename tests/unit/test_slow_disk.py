"""A disk that a FUSE mount slows down: for whom it works, how long it stays, and what waits for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fakes
import pytest
from factories import refused
from fakes import JOB, PlayedIsolation, done, measure, ready

from weighin import slow_disk
from weighin.run import loads
from weighin.slow_disk import Pace

MS = 1_000_000


def test_a_machine_without_fuse_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_disk, "find_spec", lambda _: True)
    monkeypatch.setattr(slow_disk, "find_library", lambda _: None)
    assert refused(slow_disk.check, in_container=True) == (
        "weighin slows a disk down with FUSE, which does not work here: libfuse 2 is not installed\n"
        "apt-get install libfuse2"
    )


def test_a_slow_disk_ends_with_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mock(return_value=Mock(folder=Path("/mounted")))

    def measured(**speed: Any) -> tuple[Any, Any]:
        isolation = PlayedIsolation([fakes.baseline(), fakes.loaded(), ready(), done()])
        job = replace(JOB, cell=replace(JOB.cell, **speed), checkpoint=str(tmp_path / "model.pt"))
        result = measure(isolation, tmp_path, job, [], None)
        return isolation.jobs[0], result.environment.get("disk")

    monkeypatch.setattr(loads, "Mount", mount)
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.pt").touch()
    job, disk = measured(disk_latency_ns=MS)
    assert job.checkpoint == "/mounted/model.pt"
    assert disk == {"means": "fuse", "request_bytes": 128 * 1024}
    mount.assert_called_once_with(tmp_path, Pace(None, MS), tmp_path / "cache" / "disks")
    mount.return_value.close.assert_called()
    job, disk = measured()
    assert (job.checkpoint, disk) == (str(tmp_path / "model.pt"), None)
    mount.assert_called_once()
