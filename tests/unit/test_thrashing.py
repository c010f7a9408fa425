"""The proof that a running cell thrashes, and the end of the cell that it brings about."""

from dataclasses import replace
from typing import Any

import pytest
from factories import make_cell, make_result
from fakes import BASELINE, JOB, KILLED, FakeRunning, Silent, Step, begin, followed

from weighin.cell import Cell
from weighin.probes.cgroup import Counters
from weighin.records.verdict import (
    Reference,
    Verdict,
    judge_result,
    proof,
    reference_of,
    why_killed,
)
from weighin.result import Cost, Outcome, Peaks, Ran, Result, Stopped
from weighin.run import measure as watch
from weighin.settings.definition import Settings
from weighin.units import GIB, MIB

SECOND = 10**9
REFERENCE = Reference(4 * SECOND, GIB)


def seen(**changes: int | None) -> Stopped | None:
    usual: dict[str, Any] = {"after_ns": 5 * SECOND, "reread_bytes": 0, "waited_ns": 0}
    return proof(REFERENCE, **usual | changes)


@pytest.mark.parametrize(
    ("figures", "thrashes"),
    [
        (seen(reread_bytes=3 * GIB + 1), True),
        (seen(reread_bytes=3 * GIB), False),
        (seen(reread_bytes=3 * GIB + 1, is_loading=False), False),
        (seen(reread_bytes=None, waited_ns=None, after_ns=400 * SECOND), False),
        (seen(after_ns=40 * SECOND + 1, reread_bytes=GIB // 10 + 1), True),
        (seen(after_ns=40 * SECOND, reread_bytes=GIB // 10 + 1), False),
        (seen(after_ns=40 * SECOND + 1, reread_bytes=GIB // 20), False),
        (seen(after_ns=50 * SECOND, waited_ns=10 * SECOND), True),
        (seen(after_ns=50 * SECOND, reread_bytes=GIB, is_loading=False), True),
        (seen(waited_ns=12 * SECOND + 1, after_ns=20 * SECOND), True),
        (seen(waited_ns=12 * SECOND, after_ns=20 * SECOND), False),
    ],
)
def test_each_proof_is_where_it_is_written(figures: Stopped | None, thrashes: bool) -> None:
    assert (figures is not None) == thrashes


def test_a_proof_has_the_figures_and_says_them() -> None:
    found = seen(reread_bytes=4 * GIB, waited_ns=None)
    assert found == Stopped(
        after_ns=5 * SECOND,
        timeout_s=None,
        reference_ns=4 * SECOND,
        size_bytes=GIB,
        reread_bytes=4 * GIB,
        waited_ns=None,
    )
    assert found
    assert why_killed(found) == (
        "stopped by weighin after 5.00 s, because it thrashes; 4.0x of 1.000 GiB read again"
    )


def test_a_load_is_compared_with_its_model_and_a_small_one_with_the_import() -> None:
    first = make_result(make_cell(ram_limit_bytes=None), cost=Cost(wall_ns=7 * SECOND))
    assert first.model_bytes and first.baseline
    assert reference_of(first) == Reference(7 * SECOND, first.model_bytes)
    tiny = replace(first, model_bytes=MIB)
    assert reference_of(tiny) == Reference(7 * SECOND, first.baseline.file_bytes)
    assert reference_of(None) is None
    assert reference_of(replace(first, cost=None)) is None


def test_a_command_is_compared_with_what_it_needed_and_cached() -> None:
    first = Result(
        1,
        Cell.of_command("x", ("x",), "cgroup"),
        Outcome.OK,
        peaks=Peaks(file_sampled_bytes=300 * MIB),
        ready_ns=2 * SECOND,
        cost=Cost(wall_ns=3 * SECOND),
        ran=Ran(1, needed_bytes=100 * MIB),
    )
    assert reference_of(first) == Reference(2 * SECOND, 400 * MIB)


class Rereading(Silent):
    """An observer of a cell that reads 100 MiB again between two looks, once it ``begins``."""

    def __init__(self, peak_bytes: int | None = 256 * MIB) -> None:
        self.pages, self.peak_bytes = 0, peak_bytes
        self.has_begun = False

    def begins(self) -> None:
        self.has_begun = True

    def counters(self) -> Counters:
        self.pages += 100 * MIB // 4096 * self.has_begun
        return Counters(refaults=self.pages, peak_bytes=self.peak_bytes)


def watched(running: FakeRunning, timeout_s: float = 30) -> Result:
    job = replace(JOB, cell=replace(JOB.cell, ram_limit_bytes=256 * MIB))
    settings, reference = Settings(timeout_s=timeout_s), Reference(SECOND, 200 * MIB)
    return followed(running, job=job, settings=settings, reference=reference)[0]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_TEST_S", 0.0)


def test_a_worker_that_thrashes_is_killed_and_its_outcome_says_by_which_figures() -> None:
    observer = Rereading()
    script: list[Step] = [*BASELINE, begin("read"), observer.begins, *[TimeoutError] * 20]
    running = FakeRunning(script, KILLED, inside=observer)
    result = watched(running)
    assert (result.outcome, running.kills, result.last_phase) == (Outcome.THRASHING, 1, "read")
    assert (result.load_ns, result.ready_ns) == (None, None)
    assert result.stopped and result.stopped.timeout_s is None
    assert result.stopped.reread_bytes and result.stopped.reread_bytes > 600 * MIB
    assert (result.stopped.size_bytes, result.stopped.reference_ns) == (200 * MIB, SECOND)
    assert "it thrashes; " in result.message
    assert result.message.endswith("in phase 'read'")
    under = replace(result, cell=make_cell(ram_limit_bytes=256 * MIB))
    judgement = judge_result(under)
    assert judgement
    assert judgement.verdict is Verdict.THRASHES


def test_a_worker_below_its_limit_goes_on() -> None:
    observer = Rereading(255 * MIB)
    script: list[Step] = [*BASELINE, observer.begins, *[TimeoutError] * 20, begin("read")]
    running = FakeRunning(script, KILLED, inside=observer)
    result = watched(running)
    assert result.outcome is not Outcome.THRASHING
    assert (running.kills, result.stopped) == (0, None)


def test_a_time_out_is_a_field_of_the_record() -> None:
    running = FakeRunning([*BASELINE, TimeoutError], KILLED, inside=Silent())
    result = watched(running, timeout_s=0.001)
    assert (result.outcome, result.stopped and result.stopped.timeout_s) == (Outcome.TIMEOUT, 0.001)
