"""The phases of one process of a command, from its own marks and those of its cgroup."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighin.probes.cgroup import MemoryCgroup, PeakMark
from weighin.run.program_track import Begin, End, ProcessTrack


class Group:
    """A v1 cgroup of plain files, in which a reset of the mark shows the usage."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.has(usage=5, peak=9, refaults=1)

    def has(self, *, usage: int, peak: int, refaults: int) -> None:
        (self.path / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (self.path / "memory.max_usage_in_bytes").write_text(f"{peak:<8}")
        (self.path / "memory.stat").write_text(f"workingset_refault_file {refaults}\n")


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits until its standard input ends."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def begin(name: str, number: int = 1) -> Begin:
    return Begin(number, name)


def end(t_ns: int, number: int = 1) -> End:
    return End(number, t_ns)


LATE_NS = 2**62


def test_the_mark_of_a_group_keeps_the_highest_of_all_time(group: Group) -> None:
    mark = PeakMark(MemoryCgroup(group.path))
    assert mark.read() == 9
    group.has(usage=3, peak=4, refaults=2)
    assert mark.read() == 4
    assert mark.highest_bytes == 9
    assert mark.reset()
    group.has(usage=3, peak=70, refaults=2)
    assert mark.read() == 70
    mark.close()
    assert mark.highest_bytes == 70


def test_a_phase_of_the_main_process_has_the_figures_of_the_group(
    group: Group, child: subprocess.Popen[bytes]
) -> None:
    track = ProcessTrack(child.pid, PeakMark(MemoryCgroup(group.path)))
    track.take(begin("read"))
    assert track.is_in_phase
    group.has(usage=7, peak=30, refaults=4)
    track.sample()
    group.has(usage=8, peak=20, refaults=6)
    track.take(end(LATE_NS))
    (phase,) = track.phases
    assert not track.is_in_phase
    assert (phase.name, phase.peak_cgroup_bytes, phase.workingset_refault_file) == ("read", 30, 5)
    assert (phase.end.cgroup_bytes, track.died_in, track.warnings) == (8, None, [])
    assert phase.start_ns < phase.end_ns < LATE_NS  # no later than the message
    assert track.highest_rss_bytes == phase.peak_rss_bytes > 0


def test_a_phase_ends_no_earlier_than_it_began(child: subprocess.Popen[bytes]) -> None:
    track = ProcessTrack(child.pid, None)
    track.take(begin("read"))
    track.take(end(0))
    (phase,) = track.phases
    assert phase.start_ns == phase.end_ns
    assert (phase.peak_cgroup_bytes, phase.end.cgroup_bytes, phase.workingset_refault_file) == (
        None,
        None,
        None,
    )
    track.take(end(0))
    track.take(end(0, 5))
    assert len(track.phases) == 1


def test_a_begin_with_the_number_of_an_open_phase_ends_that(
    child: subprocess.Popen[bytes],
) -> None:
    track = ProcessTrack(child.pid, None)
    track.take(begin("first"))
    track.take(begin("second"))
    track.take(end(LATE_NS))
    first, second = track.phases
    assert [phase.name for phase in track.phases] == ["first", "second"]
    assert first.end_ns <= second.start_ns


def test_phases_that_are_open_end_with_the_watch_and_the_outer_one_comes_first(
    child: subprocess.Popen[bytes],
) -> None:
    track = ProcessTrack(child.pid, None)
    for number, name in enumerate(("outer", "inner"), 1):
        track.take(begin(name, number))
    track.close()
    assert [phase.name for phase in track.phases] == ["outer", "inner"]
    assert track.died_in == "inner"
    assert track.warnings == [
        f"process {child.pid} ended inside its phase 'inner', whose peak RSS is therefore sampled"
    ]
    track.close()
    assert len(track.phases) == 2


def test_a_process_that_ends_inside_a_phase_ends_it_where_it_was_seen_last(
    child: subprocess.Popen[bytes],
) -> None:
    track = ProcessTrack(child.pid, None)
    track.take(begin("read"))
    track.sample()
    assert track.phases == ()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    track.sample()
    assert (len(track.phases), track.died_in) == (1, "read")
    track.take(begin("again"))
    child.wait()
    track.sample()
    track.take(begin("again"))
    assert len(track.phases) == 1
    assert not track.is_in_phase


def test_a_mark_of_a_process_that_cannot_be_reset_is_told(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def refuse(path: Path, text: str) -> int:
        written.append(f"{path} {text}")
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    track = ProcessTrack(child.pid, None)
    track.take(begin("read"))
    track.take(end(LATE_NS))
    assert written == [f"/proc/{child.pid}/clear_refs 5"]
    assert track.warnings == [
        f"the peak RSS of process {child.pid} could not be reset: the value of each phase is the"
        " peak since the process started"
    ]


def test_a_mark_of_the_group_that_cannot_be_reset_gives_no_peak(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    (tmp_path / "memory.current").write_text("5")  # v2 before Linux 5.19 has no memory.peak
    track = ProcessTrack(child.pid, PeakMark(MemoryCgroup(tmp_path)))
    for _ in range(2):
        track.take(begin("read"))
        track.take(end(LATE_NS))
    assert {phase.peak_cgroup_bytes for phase in track.phases} == {None}
    assert track.warnings == [
        "the cgroup's peak could not be reset, so phases have no cgroup peak (cgroup v2 needs Linux"
        " 6.12 for it)"
    ]


def test_of_more_phases_than_a_thousand_each_name_keeps_its_highest(
    child: subprocess.Popen[bytes],
) -> None:
    track = ProcessTrack(child.pid, None)
    for number in range(1003):
        track.take(begin("a" if number < 1001 else "late"))
        track.take(end(LATE_NS))
    assert len(track.phases) == 1000
    assert {phase.name for phase in track.phases} == {"a"}
    assert track.warnings == [
        f"process {child.pid} had more than 1000 phases: 3 are not recorded, but for each name, the"
        " one with the highest peak RSS is"
    ]
