"""Phase marks on this very process: its real /proc, a clock in our hands, and a double for the parent."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fakes
import pytest

from weighin.cell import encode_job
from weighin.phase_reporter import JOB
from weighin.probes.process import read_status
from weighin.units import KIB, MIB
from weighin.worker import phases as module
from weighin.worker.phases import Marks

MS = 1_000_000
HELD = 64 * MIB
SLACK = 2 * MIB  # what the tests' own lines take
Times = list[tuple[str, int, int]]


class Clock:
    """The time, and for how much of it another process ran."""

    now = waited = 0

    def monotonic_ns(self) -> int:
        return self.now

    def process_time_ns(self) -> int:
        return self.now - self.waited


class Told(Marks):
    """Marks of a parent to whom each phase costs 3 ms, and the fields of each event that it is told."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.clock, self.sent = clock, list[dict[str, Any]]()
        super().__init__(str(folder))

    def send(self, event: str, **fields: Any) -> None:
        self.sent.append({"event": event} | fields)
        self.clock.now += 3 * MS * (event == "phase")

    def phases(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(**fields) for fields in self.sent if fields["event"] == "phase"]

    def names(self) -> list[str]:
        return [phase.name for phase in self.phases()]

    def times(self) -> Times:
        return [(phase.name, phase.start_ns, phase.end_ns) for phase in self.phases()]


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    (tmp_path / JOB).write_text(encode_job(fakes.JOB))
    monkeypatch.setattr(module, "end_with_parent", lambda _: None)
    monkeypatch.setattr(module, "time", clock := Clock())
    return Told(tmp_path, clock)


@pytest.fixture
def area() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, HELD, mmap.MAP_PRIVATE) as area:
        area.madvise(mmap.MADV_NOHUGEPAGE)
        yield area


def fill(area: mmap.mmap) -> None:
    for offset in range(0, HELD, mmap.PAGESIZE):
        area[offset] = 1


@pytest.mark.usefixtures("no_garbage")
def test_the_figures_of_a_phase_are_its_own(marks: Told, area: mmap.mmap) -> None:
    with marks.phase("clean"):
        before = read_status()["VmRSS"]
    with marks.phase("take"):
        fill(area)
    with marks.phase("free"):
        area.madvise(mmap.MADV_DONTNEED)
    with marks.phase("after"):
        pass
    clean, take, free, after = marks.phases()
    ends = [phase.end for phase in (clean, take, free)]
    assert take.peak_rss_bytes == pytest.approx(before + HELD, abs=SLACK)
    assert free.peak_rss_bytes == pytest.approx(before + HELD, abs=SLACK)
    assert after.peak_rss_bytes == pytest.approx(before, abs=SLACK)
    assert take.peak_rss_bytes % (4 * KIB) == 0
    assert ends[1]["anon_bytes"] - ends[0]["anon_bytes"] == pytest.approx(HELD, abs=SLACK)
    assert ends[2]["rss_bytes"] == pytest.approx(before, abs=SLACK)
    for end in ends:
        parts = [end[f"{kind}_bytes"] for kind in ("anon", "file", "shmem")]
        assert end["rss_bytes"] == sum(parts)
        assert "cuda_allocated_bytes" not in end
    assert HELD // mmap.PAGESIZE <= take.minor_faults <= HELD // mmap.PAGESIZE + 2000


def test_phases_do_not_nest(marks: Told) -> None:
    with pytest.raises(RuntimeError) as caught, marks.phase("outer"), marks.phase("inner"):
        pass
    assert str(caught.value) == "phase 'inner' begins before 'outer' has ended; phases cannot be nested"  # fmt: skip
    assert marks.names() == ["outer"]


def test_a_phase_that_is_still_open_after_a_strategy_is_refused(marks: Told) -> None:
    with marks.phase("read"):
        pass
    marks.flush()
    held = marks.phase("open")
    held.__enter__()
    with pytest.raises(RuntimeError, match="phase 'open' began and never ended"):
        marks.flush()


def test_a_phase_is_announced_and_marked_even_if_it_fails(marks: Told) -> None:
    with pytest.raises(KeyError), marks.phase("read"):
        assert marks.sent == [{"event": "told", "phase": "read"}]
        marks.clock.now += 5 * MS
        raise KeyError("h.0")
    assert [fields["event"] for fields in marks.sent] == ["told", "phase"]
    assert marks.times() == [("read", 0, 5 * MS)]
    with marks.phase("again"):
        marks.clock.now += 2 * MS
    assert marks.spent_ns == 2 * 3 * MS


@pytest.mark.parametrize(
    ("gap_ns", "waited_ns", "rest"),
    [
        (MS - 1, 0, [("b", 5 * MS, 8 * MS - 1)]),  # goes to the second phase
        (MS, 0, [("other", 5 * MS, 6 * MS), ("b", 9 * MS, 11 * MS)]),
        (MS, 1, [("b", 5 * MS, 8 * MS)]),  # another process ran meanwhile
        (100 * MS, 100 * MS, [("other", 5 * MS, 105 * MS), ("b", 108 * MS, 110 * MS)]),
    ],
    ids=["short", "long enough", "not its own time", "waited long"],
)  # fmt: skip
def test_the_time_between_two_phases(marks: Told, gap_ns: int, waited_ns: int, rest: Times) -> None:
    with marks.phase("a"):
        marks.clock.now += 2 * MS
    marks.clock.now += gap_ns
    marks.clock.waited += waited_ns
    with marks.phase("b"):
        marks.clock.now += 2 * MS
    assert marks.times() == [("a", 0, 2 * MS), *rest]


def test_what_ran_before_a_restart_is_left_out(marks: Told, area: mmap.mmap) -> None:
    fill(area)
    marks.clock.now += 50 * MS
    marks.restart()
    with marks.phase("a"):
        marks.clock.now += 2 * MS
    assert marks.times() == [("a", 50 * MS, 52 * MS)]
    assert marks.phases()[0].minor_faults < 2000


def test_what_ends_or_begins_after_a_tests_body_is_no_phase(marks: Told) -> None:
    with marks.phase("opened before the end"):
        marks.is_over = True
    with marks.phase("begun after it"):
        pass
    marks.close("body")
    assert marks.phases() == []
    marks.is_over = False  # the test runs again
    with marks.phase("again"):
        pass
    assert marks.names() == ["again"]


def test_the_gpu_is_read_before_its_reset(marks: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Mock()
    gpu.allocated.return_value, gpu.take_timeline.return_value = 7, [(1, 2, 3)]
    gpu.peaks.return_value = {"peak_cuda_allocated_bytes": 9}
    marks.cuda = gpu
    monkeypatch.setattr(marks, "send", gpu.send)
    with marks.phase("a"):
        gpu.work()
    assert [name for name, *_ in gpu.mock_calls] == [
        "send", "work", "synchronize", "allocated", "peaks", "take_timeline", "send", "send", "reset",
    ]  # fmt: skip
    assert [call.args[0] for call in gpu.send.call_args_list] == ["told", "told", "phase"]
    assert marks.read()["memory"]["cuda_allocated_bytes"] == 7
