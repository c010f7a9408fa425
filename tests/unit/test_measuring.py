"""One cell, from an isolation's start to a Result: what is written beside the record."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
from fakes import FakeRunning, done, event, ready
from scripts import JOB

from harness.cell import Job
from harness.measuring import Setting, measure


class _Isolation:
    """Starts a worker that plays a script."""

    name = "process"
    limits = False

    def __init__(self, script: list[Any]) -> None:
        self._script = script

    def check(self) -> None: ...

    def prepare(self) -> None: ...

    def start(self, job: Job) -> Any:
        return FakeRunning(self._script)

    def remove_stale(self) -> list[str]:
        return []

    def describe(self) -> dict[str, str]:
        return {}


def traced(requested_peak: int, run: Path) -> Any:
    """A cell whose allocator noted two events, and says this peak."""
    events = [[1, "segment_alloc", 2048], [2, "alloc", 700]]
    script = [
        fakes.baseline(),
        fakes.phase("read", peak_cuda_requested_bytes=requested_peak),
        fakes.loaded(),
        event("trace", requested_bytes=0, reserved_bytes=0, events=events),
        ready(),
        done(),
    ]
    return measure(Setting(_Isolation(script), run, {}), replace(JOB, trace=True), [], None)


def test_a_trace_is_written_beside_the_record(tmp_path: Path) -> None:
    result = traced(700, tmp_path)
    assert result.trace_path == f"traces/{JOB.cell.id}.csv"
    assert (tmp_path / result.trace_path).read_text().splitlines() == [
        "t_ns,action,bytes,requested_bytes,reserved_bytes",
        "1,segment_alloc,2048,0,2048",
        "2,alloc,700,700,2048",
    ]
    assert result.warnings == ()


def test_a_trace_that_disagrees_with_the_allocator_is_doubted(tmp_path: Path) -> None:
    assert traced(701, tmp_path).warnings == (
        "the trace's highest requested bytes, 700, are not the allocator's own peak, 701",
    )


def test_a_cell_without_a_trace_has_no_file(tmp_path: Path) -> None:
    script = [fakes.baseline(), fakes.loaded(), ready(), done()]
    result = measure(Setting(_Isolation(script), tmp_path, {}), JOB, [], None)
    assert result.trace_path is None
    assert list(tmp_path.iterdir()) == []
