"""Phase marks on this very process: its real /proc, a clock in our hands, and a double for the parent."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fakes
import pytest

from weighin.cell import encode_job
from weighin.phase_reporter import JOB
from weighin.probes.process import read_status
from weighin.result import Memory, Phase
from weighin.units import KIB, MIB
from weighin.worker import phases as module
from weighin.worker.cuda import CudaMemory
from weighin.worker.phases import Marks

MS = 1_000_000
HELD = 64 * MIB
SLACK = 2 * MIB  # what the tests' own lines take


class Parent:
    """Takes down what a worker says; each mark that it takes costs 3 ms."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._clock = clock

    def send(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))
        if event == "phase":
            self._clock.now += 3 * MS

    @property
    def phases(self) -> list[Phase]:
        return [
            Phase(**fields | {"end": Memory(**fields["end"])})
            for event, fields in self.events
            if event == "phase"
        ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0, waited=0)
    times = {"monotonic_ns": lambda: clock.now, "process_time_ns": lambda: clock.now - clock.waited}
    monkeypatch.setattr(module, "time", SimpleNamespace(**times))
    return clock


@pytest.fixture
def parent(clock: SimpleNamespace) -> Parent:
    return Parent(clock)


@pytest.fixture
def marks(parent: Parent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Marks:
    (tmp_path / JOB).write_text(encode_job(fakes.JOB))
    monkeypatch.setattr(module, "end_with_parent", lambda _: None)
    marks = Marks(str(tmp_path))
    monkeypatch.setattr(marks, "send", parent.send)
    return marks


@pytest.fixture
def area() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, HELD, mmap.MAP_PRIVATE) as area:
        yield area


def fill(area: mmap.mmap) -> None:
    for offset in range(0, HELD, mmap.PAGESIZE):
        area[offset] = 1


@pytest.mark.usefixtures("no_garbage")
def test_the_peak_of_a_phase_is_its_own(marks: Marks, parent: Parent, area: mmap.mmap) -> None:
    with marks.phase("clean"):
        before = read_status()["VmRSS"]
    with marks.phase("spike"):
        fill(area)
        area.madvise(mmap.MADV_DONTNEED)
    with marks.phase("after"):
        pass
    _, spike, after = parent.phases
    assert spike.peak_rss_bytes == pytest.approx(before + HELD, abs=SLACK)
    assert spike.end.rss_bytes == pytest.approx(before, abs=SLACK)
    assert after.peak_rss_bytes == pytest.approx(before, abs=SLACK)


@pytest.mark.usefixtures("no_garbage")
def test_what_a_phase_holds_is_in_its_end(marks: Marks, parent: Parent, area: mmap.mmap) -> None:
    with marks.phase("clean"):
        pass
    with marks.phase("take"):
        fill(area)
    clean, take = parent.phases
    assert take.end.anon_bytes - clean.end.anon_bytes == pytest.approx(HELD, abs=SLACK)
    assert take.end.rss_bytes == (take.end.anon_bytes + take.end.file_bytes + take.end.shmem_bytes)
    assert take.peak_rss_bytes % (4 * KIB) == 0


def test_each_page_taken_is_a_fault(marks: Marks, parent: Parent, area: mmap.mmap) -> None:
    area.madvise(mmap.MADV_NOHUGEPAGE)
    with marks.phase("take"):
        fill(area)
    pages = HELD // mmap.PAGESIZE
    assert pages <= parent.phases[0].minor_faults <= pages + 2000


def test_phases_do_not_nest(marks: Marks, parent: Parent) -> None:
    with (
        pytest.raises(RuntimeError) as caught,
        marks.phase("outer"),
        marks.phase("inner"),
    ):
        pass
    assert (
        str(caught.value)
        == "phase 'inner' begins inside 'outer', but a phase cannot begin before the previous phase has ended"
    )
    assert [phase.name for phase in parent.phases] == ["outer"]


def test_a_phase_that_is_still_open_after_a_strategy_is_refused(marks: Marks) -> None:
    with marks.phase("read"):
        pass
    marks.flush()
    held = marks.phase("open")
    held.__enter__()
    with pytest.raises(RuntimeError, match="phase 'open' began and never ended"):
        marks.flush()


def test_a_phase_that_fails_is_marked_and_the_next_may_begin(marks: Marks, parent: Parent) -> None:
    with pytest.raises(KeyError), marks.phase("read"):
        raise KeyError("h.0")
    with marks.phase("again"):
        pass
    assert [phase.name for phase in parent.phases] == ["read", "again"]


def test_a_phase_is_announced_when_it_begins(
    marks: Marks, parent: Parent, clock: SimpleNamespace
) -> None:
    with marks.phase("read"):
        assert parent.events == [("told", {"phase": "read"})]
        clock.now += 5 * MS
    assert [event for event, _ in parent.events] == ["told", "phase"]
    assert (parent.phases[0].start_ns, parent.phases[0].end_ns) == (0, 5 * MS)


@pytest.mark.parametrize(
    ("gap_ns", "waited_ns", "expected"),
    [
        (MS - 1, 0, [("a", 0, 2 * MS), ("b", 5 * MS, 8 * MS - 1)]),  # goes to the second phase
        (MS, 0, [("a", 0, 2 * MS), ("other", 5 * MS, 6 * MS), ("b", 9 * MS, 11 * MS)]),
        (MS, 1, [("a", 0, 2 * MS), ("b", 5 * MS, 8 * MS)]),  # another process ran meanwhile
        (
            100 * MS,
            100 * MS,
            [("a", 0, 2 * MS), ("other", 5 * MS, 105 * MS), ("b", 108 * MS, 110 * MS)],
        ),
    ],
)
def test_the_time_between_two_phases(
    marks: Marks,
    parent: Parent,
    clock: SimpleNamespace,
    gap_ns: int,
    waited_ns: int,
    expected: list[tuple[str, int, int]],
) -> None:
    with marks.phase("a"):
        clock.now += 2 * MS
    clock.now += gap_ns
    clock.waited += waited_ns
    with marks.phase("b"):
        clock.now += 2 * MS
    assert [(p.name, p.start_ns, p.end_ns) for p in parent.phases] == expected


def test_the_time_spent_in_marks_is_kept_apart(marks: Marks, clock: SimpleNamespace) -> None:
    for _ in range(2):
        with marks.phase("a"):
            clock.now += 2 * MS
    assert marks.spent_ns == 2 * 3 * MS


def test_what_ran_before_a_restart_is_left_out(
    marks: Marks, parent: Parent, clock: SimpleNamespace, area: mmap.mmap
) -> None:
    area.madvise(mmap.MADV_NOHUGEPAGE)
    fill(area)
    clock.now += 50 * MS
    marks.restart()
    with marks.phase("a"):
        clock.now += 2 * MS
    (phase,) = parent.phases
    assert (phase.name, phase.start_ns) == ("a", 50 * MS)
    assert phase.minor_faults < 2000


def test_memory_is_this_processs(marks: Marks) -> None:
    memory = marks.read()["memory"]
    assert memory["rss_bytes"] == pytest.approx(read_status()["VmRSS"], abs=SLACK)
    assert "cuda_allocated_bytes" not in memory


class Cuda:
    """The allocator's marks, with the order in which they are asked for."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def synchronize(self) -> None:
        self._calls.append("synchronize")

    def allocated(self) -> int:
        return 7

    def reset(self) -> None:
        self._calls.append("reset")

    def peaks(self) -> dict[str, int | None]:
        self._calls.append("peaks")
        return {"peak_cuda_allocated_bytes": 9}

    def take_timeline(self) -> list[tuple[int, int, int]]:
        return [(1, 2, 3)]


def test_the_gpu_is_waited_for_read_and_only_then_reset(
    marks: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    marks.cuda = cast(CudaMemory, Cuda(calls))
    monkeypatch.setattr(marks, "send", lambda event, **fields: calls.append(event))
    with marks.phase("a"):
        calls.append("work")
    assert calls == ["told", "work", "synchronize", "peaks", "told", "phase", "reset"]
    assert marks.read()["memory"]["cuda_allocated_bytes"] == 7


def test_what_ends_or_begins_after_a_tests_body_is_no_phase(marks: Marks, parent: Parent) -> None:
    with marks.phase("opened before the end"):
        marks.is_over = True
    with marks.phase("begun after it"):
        pass
    marks.close("body")
    assert parent.phases == []
    marks.is_over = False  # the test runs again
    with marks.phase("again"):
        pass
    assert [phase.name for phase in parent.phases] == ["again"]
