"""What a watch reads from its worker's cgroup: plain files here, whose numbers a script changes."""

from collections.abc import Callable
from pathlib import Path

import fakes
import pytest
from fakes import (
    BASELINE,
    DONE,
    KILLED,
    FakeRunning,
    FakeSampler,
    Step,
    begin,
    done,
    fake_sampler,
    phase,
    ready,
    watched,
)

from weighin.probes.cgroup import Cgroup
from weighin.result import Outcome, Pressure

__all__ = ["fake_sampler"]


class Group:
    """A cgroup of plain files whose numbers a script changes; as v2, it is before Linux 5.19."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self._v1 = version == 1

    def start(self, **figures: int) -> Path:
        self.folder.mkdir(exist_ok=True)
        self._write("memory.limit_in_bytes" if self._v1 else "memory.max", 100)
        self.has(
            **{"usage": 1, "peak": 1, "refaults": 0, "pressure_us": 0, "oom_kills": 0} | figures
        )()
        assert Cgroup(self.folder).version == (1 if self._v1 else 2)
        return self.folder

    def has(self, **figures: int) -> Callable[[], None]:
        """Return a step of a script that sets figures."""

        def step() -> None:
            for name, value in figures.items():
                getattr(self, f"_set_{name}")(value)

        return step

    def vanish(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()

    def _write(self, name: str, text: object) -> None:
        (self.folder / name).write_text(f"{text}\n")

    def _set_usage(self, value: int) -> None:
        self._write("memory.usage_in_bytes" if self._v1 else "memory.current", value)

    def _set_peak(self, value: int) -> None:
        if self._v1:  # padded, because a reset writes over the beginning of a plain file
            self._write("memory.max_usage_in_bytes", f"{value:<8}")

    def _set_refaults(self, value: int) -> None:
        self._write("memory.stat", f"file 0\nworkingset_refault_file {value}")

    def _set_pressure_us(self, value: int) -> None:
        line = f"avg10=0.00 avg60=0.00 avg300=0.00 total={value}"
        self._write("memory.pressure", f"some {line}\nfull {line}")

    def _set_oom_kills(self, value: int) -> None:
        name = "memory.oom_control" if self._v1 else "memory.events.local"
        self._write(name, f"oom_kill {value}")


def test_pressure_is_what_the_load_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: type[FakeSampler]
) -> None:
    group = Group(tmp_path, 2)
    monkeypatch.setattr(
        "weighin.probes.cgroup.pressure_file_of", lambda pid: tmp_path / "memory.pressure"
    )
    used: list[Step] = [begin("forward"), group.has(pressure_us=20), phase("forward"), done()]
    script: list[Step] = [
        *BASELINE,
        begin("touch"),
        group.has(pressure_us=9),
        phase("touch"),
        ready(),
        *used,
    ]
    result = watched(FakeRunning(script, pid=1, cgroup=group.start(pressure_us=4)))
    assert result.pressure == Pressure(some_ns=5000, full_ns=5000)  # until ready


def test_the_refaults_and_the_pressure_of_a_killed_load_are_all_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: type[FakeSampler]
) -> None:
    group = Group(tmp_path, 2)
    monkeypatch.setattr(
        "weighin.probes.cgroup.pressure_file_of", lambda pid: tmp_path / "memory.pressure"
    )
    script: list[Step] = [
        *BASELINE,
        begin("read"),
        phase("read"),
        begin("apply"),
        group.has(refaults=7, pressure_us=9),
    ]
    result = watched(FakeRunning(script, KILLED, pid=1, cgroup=group.start(pressure_us=4)))
    assert result.pressure == Pressure(some_ns=5000, full_ns=5000)
    assert result.faults and result.faults.workingset_refault_file == 7


def test_where_psi_is_off_there_is_no_pressure(tmp_path: Path, sampler: type[FakeSampler]) -> None:
    assert watched(FakeRunning([*DONE], pid=1, cgroup=Group(tmp_path, 2).start())).pressure is None


def test_a_mark_that_cannot_be_reset_gives_the_total_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: type[FakeSampler]
) -> None:
    monkeypatch.setattr(Cgroup, "reset_peak", lambda _: False)  # v2 before Linux 6.12
    group = Group(tmp_path, 1)
    script: list[Step] = [
        begin("import"), group.has(peak=40), phase("import"), fakes.baseline(),
        begin("read"), group.has(peak=70), phase("read"), ready(),
        begin("forward"), group.has(peak=99), phase("forward"), done(),
    ]  # fmt: skip
    result = watched(FakeRunning(script, pid=1, cgroup=group.start()))
    assert [one.peak_cgroup_bytes for one in result.phases] == [None, None, None]
    assert result.peaks.cgroup_bytes == 70


def test_a_killed_cells_total_is_read_after_its_death(
    tmp_path: Path, sampler: type[FakeSampler]
) -> None:
    group = Group(tmp_path, 1)
    script: list[Step] = [*BASELINE, begin("read"), group.has(peak=80, oom_kills=1)]
    result = watched(FakeRunning(script, KILLED, pid=1, cgroup=group.start()))
    assert result.outcome is Outcome.OOM_KILLED
    assert result.message == (
        "killed by the kernel for lack of memory in phase 'read': the load reached the limit of an"
        " outer cgroup, or the end of the machine's memory"
    )
    assert (result.peaks.cgroup_bytes, result.oom_kills, result.warnings) == (80, 1, ())


def test_a_cgroup_that_went_with_its_worker_leaves_what_the_sampler_saw(
    tmp_path: Path, sampler: type[FakeSampler]
) -> None:
    group = Group(tmp_path / "group", 2)
    sampler.oom_kills = 2
    script: list[Step] = [*BASELINE, begin("read"), group.vanish]
    result = watched(FakeRunning(script, KILLED, pid=1, cgroup=group.start()))
    assert (result.outcome, result.oom_kills) == (Outcome.OOM_KILLED, 2)


def test_the_limit_is_lifted_before_a_thrashing_worker_is_killed(
    tmp_path: Path, sampler: type[FakeSampler]
) -> None:
    group = Group(tmp_path, 2)
    watched(FakeRunning([*BASELINE, TimeoutError], KILLED, pid=1, cgroup=group.start()))
    assert (tmp_path / "memory.max").read_text() == "max"
