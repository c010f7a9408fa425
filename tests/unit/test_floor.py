"""The floor by bisection, against machines whose floor is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_cell
from hypothesis import given
from hypothesis import strategies as st

from weighin.cell import Cell
from weighin.records import run_folder
from weighin.records.floor import KILLED, Aim, floors, next_cell
from weighin.records.verdict import Verdict
from weighin.result import SCHEMA, Cost, Faults, Memory, Outcome, Peaks, Ran, Result, Stopped
from weighin.show.findings import floor_as_dict as as_dict
from weighin.units import GIB, MIB

CELL = make_cell("streaming", ram_limit_bytes=None)
Outcomes = Callable[[int, int], Outcome]
"""What comes of a limit, in bytes, and of its repeat."""


def above(need: int) -> Outcomes:
    return lambda limit, _: Outcome.OK if limit >= need else Outcome.OOM_KILLED


def lived(limit: int | None, outcome: Outcome, anon_bytes: int, repeat: int = 0) -> Result:
    return Result(
        SCHEMA,
        replace(CELL, ram_limit_bytes=limit, repeat=repeat),
        outcome,
        model_bytes=800 * MIB,
        baseline=Memory(230 * MIB, 140 * MIB, 86 * MIB, 4 * MIB),
        peaks=Peaks(rss_bytes=anon_bytes, anon_sampled_bytes=anon_bytes),
        ready_ns=10**9 if outcome is Outcome.OK else None,
        oom_kills=int(outcome is Outcome.OOM_KILLED),
    )


def search(
    outcomes: Outcomes, anon_bytes: int = 1000 * MIB, within: float = 0.01, highest: int = 64 * GIB
) -> list[Result]:
    """Search as the verb does; every step is asked for with all results so far."""
    results = [lived(None, Outcome.OK, anon_bytes)]
    assert next_cell(CELL, [], within, highest) == CELL
    while cell := next_cell(CELL, results, within, highest):
        limit = cell.ram_limit_bytes
        assert limit is not None
        assert 0 < limit <= highest
        assert cell.id not in {one.cell.id for one in results}
        results.append(lived(limit, outcomes(limit, cell.repeat), anon_bytes, cell.repeat))
        assert len(results) < 60
    return results


def limits(results: list[Result]) -> list[int]:
    return [(one.cell.ram_limit_bytes or 0) // MIB for one in results]


def test_a_floor_where_it_was_expected_or_a_step_above_takes_six_cells() -> None:
    assert limits(search(above(1005 * MIB))) == [0, 1008, 1000, 1008, 1008, 1109]
    results = search(above(1010 * MIB))
    assert limits(results) == [0, 1008, 1016, 1016, 1016, 1118]
    (floor,) = floors(results)
    assert (floor.bytes, floor.step_bytes) == (1016 * MIB, 8 * MIB)
    assert (floor.passed, floor.failed, floor.cells, floor.message) == (3, 1, 6, "")
    assert floor.import_bytes == 144 * MIB
    assert floor.at_floor and floor.at_floor.judgement
    assert floor.at_floor.judgement.verdict is Verdict.SURVIVES
    assert floor.with_room and floor.with_room.result.cell.ram_limit_bytes == 1118 * MIB
    assert floor.unlimited and floor.unlimited.judgement is None


def test_a_floor_far_above_and_far_below_is_found_by_longer_steps() -> None:
    assert limits(search(above(1100 * MIB)))[:8] == [0, 1008, 1016, 1024, 1040, 1072, 1136, 1104]
    assert limits(search(above(900 * MIB)))[:8] == [0, 1008, 1000, 992, 976, 944, 880, 912]


@given(
    need=st.integers(1, 30_000 * MIB),
    expected=st.integers(MIB, 30_000 * MIB),
    within=st.floats(0.001, 0.1),
)
def test_every_floor_is_found_to_within_what_was_asked(
    need: int, expected: int, within: float
) -> None:
    (floor,) = floors(search(above(need), expected, within, 64 * GIB))
    if floor.bytes is None:
        assert floor.message.startswith("works even under")
        assert need <= 8 * MIB
        return
    assert floor.step_bytes is not None
    assert floor.bytes - floor.step_bytes < need <= floor.bytes
    assert floor.step_bytes <= max(8 * MIB, within * floor.bytes)
    assert (floor.passed, floor.failed) == (3, 1)


def test_a_limit_that_works_once_and_fails_then_is_below_the_floor() -> None:
    def unsteady(limit: int, repeat: int) -> Outcome:
        works = limit > 1008 * MIB or (limit == 1008 * MIB and repeat == 0)
        return Outcome.OK if works else Outcome.TIMEOUT

    results = search(unsteady)
    assert limits(results) == [0, 1008, 1000, 1008, 1016, 1016, 1016, 1118]
    (floor,) = floors(results)
    assert (floor.bytes, floor.failed) == (1016 * MIB, 1)


def test_what_fails_everywhere_has_no_floor() -> None:
    (floor,) = floors(search(above(65 * GIB)))
    assert (floor.bytes, floor.message) == (None, "fails even under 64.000 GiB")


def test_what_fails_without_a_limit_is_not_searched() -> None:
    wrong = replace(lived(None, Outcome.WRONG_WEIGHTS, MIB), message="1 tensor differs")
    assert next_cell(CELL, [wrong], 0.01, GIB) is None
    (floor,) = floors([wrong])
    assert floor.message == "wrong_weights without a limit: 1 tensor differs"


@pytest.mark.parametrize(
    "outcome", [Outcome.WRONG_WEIGHTS, Outcome.STRATEGY_FAILED, Outcome.CUDA_OOM]
)
def test_what_is_not_about_memory_ends_the_search_and_bounds_no_floor(outcome: Outcome) -> None:
    def broken(limit: int, _: int) -> Outcome:
        return Outcome.OK if limit >= 1005 * MIB else outcome

    results = search(broken)
    assert limits(results) == [0, 1008, 1000]
    results[-1] = replace(results[-1], message="1 tensor differs")
    (floor,) = floors(results)
    assert floor.bytes is None
    assert floor.message == f"{outcome} under 1000MiB: 1 tensor differs"


def test_the_published_floors_say_which_rest_on_thrashing() -> None:
    root = Path(__file__).parents[2] / "results" / "published"
    runs = ["gpt2-medium-floors", "gpt2-medium-floors-again", "gpt2-medium-floors-cgroup", "gpt2-xl-floors"]  # fmt: skip
    ends = [
        {one.cell.strategy: one.below for one in floors(run_folder.read(root / run).results)}
        for run in runs
    ]
    assert [found.pop("mmap_assign") for found in ends] == ["thrashes"] * 4
    assert {end for found in ends for end in found.values()} == {"killed"}


def mapped(
    limit: int | None,
    repeat: int = 0,
    aim: Aim = Aim.SURVIVES,
    read_ahead_bytes: int = 8 * MIB,
) -> Result:
    """A cell of ``mmap_assign`` of gpt2-small, as it was measured: below 288 MiB it thrashes."""
    mib = (limit or 0) // MIB
    tried = {0: (2.45, 0.0), 288: (3.64, 2.02), 280: (5.86, 2.78), 272: (7.79, 3.88),
             264: (9.92, 4.7), 256: (13.11, 7.69), 248: (31.05, 17.49)}  # fmt: skip
    size = 670 * MIB
    if 0 < mib < 248:
        return replace(lived(limit, Outcome.OOM_KILLED, 228 * MIB, repeat), model_bytes=size)
    seconds, again = tried[max(each for each in tried if each <= mib)]
    result = replace(
        lived(limit, Outcome.OK, 228 * MIB, repeat),
        model_bytes=size,
        environment={"read_ahead_bytes": read_ahead_bytes},
        ready_ns=round(seconds * 1e9),
        peaks=Peaks(
            cgroup_bytes=limit or 980 * MIB,
            anon_sampled_bytes=228 * MIB,
            file_sampled_bytes=756 * MIB,
        ),
        faults=Faults(0, 0, round(again * size / 4096)),
        cost=Cost(round((seconds + 2) * 1e9)),
    )
    if aim is Aim.SURVIVES and again > 3:
        stopped = Stopped(5 * 10**9, reread_bytes=3 * size + 1, size_bytes=size)
        return replace(result, outcome=Outcome.THRASHING, ready_ns=None, stopped=stopped)
    return result


def search_mapped(aim: Aim) -> list[Result]:
    results = [mapped(None)]
    while cell := next_cell(results[0].cell, results, 0.01, 4 * GIB, aim):
        results.append(mapped(cell.ram_limit_bytes, cell.repeat, aim))
        assert len(results) < 40
    return results


def test_a_search_goes_on_to_the_limit_that_a_mapped_load_survives() -> None:
    (floor,) = floors(search_mapped(Aim.SURVIVES))
    assert (floor.bytes, floor.aim) == (288 * MIB, Aim.SURVIVES)
    assert (floor.below, floor.passed, floor.step_bytes) == ("thrashes", 3, 8 * MIB)
    assert floor.at_floor and floor.at_floor.judgement
    assert floor.at_floor.judgement.verdict is Verdict.SURVIVES
    assert floor.times(floor.at_floor) == pytest.approx(3.64 / 2.45)


def test_a_search_begins_where_the_pages_in_reading_fit_beside_a_mapped_model() -> None:
    assert limits(search_mapped(Aim.SURVIVES)) == [0, 280, 288, 288, 288, 317]
    unlimited = mapped(None, read_ahead_bytes=128 * 1024)
    first = next_cell(unlimited.cell, [unlimited], 0.01, 4 * GIB)
    assert first and first.ram_limit_bytes == 248 * MIB


def test_the_limit_under_which_a_mapped_load_ends_is_found_if_it_is_asked_for() -> None:
    results = search_mapped(Aim.ENDS)
    assert Outcome.THRASHING not in {one.outcome for one in results}
    (floor,) = floors(results)
    assert (floor.bytes, floor.aim, floor.below) == (248 * MIB, Aim.ENDS, KILLED)
    assert floor.at_floor and floor.at_floor.judgement
    assert floor.at_floor.judgement.verdict is Verdict.THRASHES


def test_an_interrupted_search_goes_on_where_it_was() -> None:
    whole = search(above(1100 * MIB))
    for done in range(1, len(whole)):
        assert next_cell(CELL, whole[:done], 0.01, 64 * GIB) == whole[done].cell
        floor = floors(whole[:done])[0]
        assert bool(floor.message) == (done < len(whole) - 1)


def test_a_floor_for_programs_is_in_bytes_and_nanoseconds() -> None:
    (floor,) = floors(search(above(1010 * MIB)))
    found = as_dict(floor)
    model = found["model_bytes"]
    assert found == {
        "strategy": "streaming", "model": "gpt2-xl", "isolation": "docker", "device": "cpu",
        "dtype": "float32", "format": "pt", "use": "forward", "options": {}, "environment": {},
        "floor_bytes": 1016 * MIB, "message": "", "step_bytes": 8 * MIB,
        "below": "killed", "aim": "survives", "passed": 3, "failed": 1,
        "model_bytes": model, "import_bytes": 144 * MIB,
        "floor_per_model": 1016 * MIB / model, "above_import_per_model": 872 * MIB / model,
        "cells": 6,
        "unlimited": {
            "limit_bytes": None, "ready_ns": 10**9, "times": None, "verdict": None, "reason": "",
        },
        "at_floor": {
            "limit_bytes": 1016 * MIB, "ready_ns": 10**9, "times": 1.0,
            "verdict": "survives",
            "reason": found["at_floor"]["reason"],
        },
        "with_room": {
            "limit_bytes": 1118 * MIB, "ready_ns": 10**9, "times": 1.0,
            "verdict": "survives",
            "reason": found["with_room"]["reason"],
        },
    }  # fmt: skip


def of_command(
    limit: int | None,
    outcome: Outcome,
    needed_bytes: int,
    repeat: int = 0,
    isolation: str = "cgroup",
) -> Result:
    cell = Cell.of_command("x", ("./x",), isolation, ram_limit_bytes=limit, repeat=repeat)
    return Result(
        SCHEMA,
        cell,
        outcome,
        # All page cache, which is not needed.
        peaks=Peaks(cgroup_bytes=needed_bytes + 4 * GIB, unreclaimable_sampled_bytes=1),
        ready_ns=10**9,
        ran=Ran(pid=1, needed_bytes=needed_bytes),
    )


@given(need=st.integers(3 * MIB, 40 * GIB), missed=st.floats(0.7, 1.3))
def test_the_floor_of_a_command_is_searched_near_what_it_needed(need: int, missed: float) -> None:
    results = [of_command(None, Outcome.OK, int(need * missed))]
    cell = results[0].cell
    while found := next_cell(cell, results, 0.01, 64 * GIB):
        limit = found.ram_limit_bytes
        assert limit
        outcome = Outcome.OK if limit >= need else Outcome.OOM_KILLED
        results.append(of_command(limit, outcome, need, found.repeat))
        assert len(results) < 30
    (floor,) = floors(results)
    assert floor.bytes
    assert need <= floor.bytes <= need + max(2 * MIB, need // 50)


@pytest.mark.parametrize(("isolation", "least"), [("cgroup", MIB), ("docker", 6 * MIB)])
def test_a_command_that_needs_next_to_nothing_works_under_the_least_limit(
    isolation: str, least: int
) -> None:
    results = [of_command(None, Outcome.OK, 300_000, isolation=isolation)]
    while found := next_cell(results[0].cell, results, 0.01, 64 * GIB):
        limit = found.ram_limit_bytes
        results.append(of_command(limit, Outcome.OK, 300_000, found.repeat, isolation))
    assert results[-1].cell.ram_limit_bytes == least
    assert floors(results)[0].message == f"works even under {least // MIB}.000 MiB"
