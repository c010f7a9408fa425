"""The CUDA allocator's events become a timeline whose highest point is the allocator's own peak."""

from pathlib import Path

import pytest

from weighin.probes import gpu_memory
from weighin.probes.gpu_memory import Trace, write_trace

EVENTS = [
    (10, "segment_alloc", 2_097_152),
    (11, "alloc", 300),
    (12, "alloc", 1000),
    (13, "free_requested", 300),
    (14, "free_completed", 300),
    (15, "oom", 9999),
    (16, "snapshot", 0),
    (17, "segment_free", 2_097_152),
]


def test_requests_count_until_the_device_is_done_with_them() -> None:
    steps = list(Trace(512, 1024, [*EVENTS]).steps())
    assert [step[:3] for step in steps] == EVENTS
    assert [step[3] for step in steps] == [512, 812, 1812, 1812, 1512, 1512, 1512, 1512]
    assert [step[4] - 1024 for step in steps] == [2_097_152] * 7 + [0]


def test_segments_that_grow_are_counted_as_they_are_mapped() -> None:
    events = [(1, "segment_map", 20), (2, "segment_map", 20), (3, "segment_unmap", 20)]
    assert [step[4] for step in Trace(0, 0, events).steps()] == [20, 40, 20]


def test_the_file_has_a_line_for_each_event(tmp_path: Path) -> None:
    write_trace(tmp_path / "traces" / "a.csv", Trace(0, 0, EVENTS[:2]))
    assert (tmp_path / "traces" / "a.csv").read_text().splitlines() == [
        "t_ns,action,bytes,requested_bytes,reserved_bytes",
        "10,segment_alloc,2097152,0,2097152",
        "11,alloc,300,300,2097152",
    ]


def test_a_trace_that_agrees_with_the_allocator_leaves_no_doubt() -> None:
    assert Trace(512, 0, [*EVENTS]).doubts(1812) == []
    assert Trace(512, 0, [(1, "free_completed", 500)]).doubts(512) == []
    assert Trace(0, 0, []).doubts(None) == []


def test_what_speaks_against_a_trace_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "TRACE_EVENTS", 2)
    events = [(5, "alloc", 100), (4, "alloc", 100)]
    assert Trace(0, 0, events).doubts(999) == [
        "the allocator kept only its last 2 events: the trace lacks its start",
        "the trace's largest requested bytes, 200, differ from the allocator's own peak, 999",
        "the machine's clock was set during the trace: its times jump",
    ]
