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
from weighin.units import KIB, MIB
from weighin.worker import phases as module
from weighin.worker.cuda import CudaMemory
from weighin.worker.phases import Marks

Sent = list[dict[str, Any]]
Clock = SimpleNamespace
Times = list[tuple[str, int, int]]

MS = 1_000_000
HELD = 64 * MIB
SLACK = 2 * MIB  # what the tests' own lines take


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0, waited=0)
    times = {"monotonic_ns": lambda: clock.now, "process_time_ns": lambda: clock.now - clock.waited}
    monkeypatch.setattr(module, "time", SimpleNamespace(**times))
    return clock


@pytest.fixture
def sent() -> Sent:
    """What the parent is told, as the fields of each event; ``event`` is its kind."""
    return []


@pytest.fixture
def marks(clock: Clock, sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Marks:
    """Marks of a parent to whom each phase costs 3 ms."""

    def send(event: str, **fields: Any) -> None:
        sent.append({"event": event} | fields)
        clock.now += 3 * MS * (event == "phase")

    (tmp_path / JOB).write_text(encode_job(fakes.JOB))
    monkeypatch.setattr(module, "end_with_parent", lambda _: None)
    marks = Marks(str(tmp_path))
    monkeypatch.setattr(marks, "send", send)
    return marks


@pytest.fixture
def area() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, HELD, mmap.MAP_PRIVATE) as area:
        area.madvise(mmap.MADV_NOHUGEPAGE)
        yield area


def fill(area: mmap.mmap) -> None:
    for offset in range(0, HELD, mmap.PAGESIZE):
        area[offset] = 1


def phases(sent: Sent) -> list[SimpleNamespace]:
    return [SimpleNamespace(**fields) for fields in sent if fields["event"] == "phase"]


def times(sent: Sent) -> Times:
    return [(phase.name, phase.start_ns, phase.end_ns) for phase in phases(sent)]


@pytest.mark.usefixtures("no_garbage")
def test_the_figures_of_a_phase_are_its_own(marks: Marks, sent: Sent, area: mmap.mmap) -> None:
    with marks.phase("clean"):
        before = read_status()["VmRSS"]
    with marks.phase("take"):
        fill(area)
    with marks.phase("free"):
        area.madvise(mmap.MADV_DONTNEED)
    with marks.phase("after"):
        pass
    clean, take, free, after = phases(sent)
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


def test_phases_do_not_nest(marks: Marks, sent: Sent) -> None:
    with pytest.raises(RuntimeError) as caught, marks.phase("outer"), marks.phase("inner"):
        pass
    assert str(caught.value) == "phase 'inner' begins inside 'outer', but a phase cannot begin before the previous phase has ended"  # fmt: skip
    assert [phase.name for phase in phases(sent)] == ["outer"]


def test_a_phase_that_is_still_open_after_a_strategy_is_refused(marks: Marks) -> None:
    with marks.phase("read"):
        pass
    marks.flush()
    held = marks.phase("open")
    held.__enter__()
    with pytest.raises(RuntimeError, match="phase 'open' began and never ended"):
        marks.flush()


def test_a_phase_is_announced_and_marked_even_if_it_fails(
    marks: Marks, sent: Sent, clock: Clock
) -> None:
    with pytest.raises(KeyError), marks.phase("read"):
        assert sent == [{"event": "told", "phase": "read"}]
        clock.now += 5 * MS
        raise KeyError("h.0")
    assert [fields["event"] for fields in sent] == ["told", "phase"]
    assert times(sent) == [("read", 0, 5 * MS)]
    with marks.phase("again"):
        clock.now += 2 * MS
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
def test_the_time_between_two_phases(
    marks: Marks, sent: Sent, clock: Clock, gap_ns: int, waited_ns: int, rest: Times
) -> None:
    with marks.phase("a"):
        clock.now += 2 * MS
    clock.now += gap_ns
    clock.waited += waited_ns
    with marks.phase("b"):
        clock.now += 2 * MS
    assert times(sent) == [("a", 0, 2 * MS), *rest]


def test_what_ran_before_a_restart_is_left_out(
    marks: Marks, sent: Sent, clock: Clock, area: mmap.mmap
) -> None:
    fill(area)
    clock.now += 50 * MS
    marks.restart()
    with marks.phase("a"):
        clock.now += 2 * MS
    assert times(sent) == [("a", 50 * MS, 52 * MS)]
    assert phases(sent)[0].minor_faults < 2000


def test_what_ends_or_begins_after_a_tests_body_is_no_phase(marks: Marks, sent: Sent) -> None:
    with marks.phase("opened before the end"):
        marks.is_over = True
    with marks.phase("begun after it"):
        pass
    marks.close("body")
    assert phases(sent) == []
    marks.is_over = False  # the test runs again
    with marks.phase("again"):
        pass
    assert [phase.name for phase in phases(sent)] == ["again"]


def test_the_gpu_is_read_before_its_reset(marks: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def called(name: str, answer: object = None) -> Any:
        return lambda: calls.append(name) or answer  # type: ignore[func-returns-value]

    gpu = SimpleNamespace(
        synchronize=called("synchronize"),
        allocated=lambda: 7,
        reset=called("reset"),
        peaks=called("peaks", {"peak_cuda_allocated_bytes": 9}),
        take_timeline=lambda: [(1, 2, 3)],
    )
    marks.cuda = cast(CudaMemory, gpu)
    monkeypatch.setattr(marks, "send", lambda event, **fields: calls.append(event))
    with marks.phase("a"):
        calls.append("work")
    assert calls == ["told", "work", "synchronize", "peaks", "told", "phase", "reset"]
    assert marks.read()["memory"]["cuda_allocated_bytes"] == 7
