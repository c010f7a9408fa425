"""The floor by bisection, against machines whose floor is known: what is tried, found and said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_cell, refused
from fakes import PlayedIsolation
from hypothesis import given
from hypothesis import strategies as st
from ran_commands import make_command, settings_of
from snapshots import Compare

from weighin.cell import Cell
from weighin.cli.measure import share
from weighin.isolation import cgroup
from weighin.plan import start as plans
from weighin.plan.task import Planned, Progress, Run
from weighin.records import run_folder
from weighin.records.floor import Aim, floors, next_cell
from weighin.result import SCHEMA, Cost, Faults, Memory, Outcome, Peaks, Ran, Result, Stopped
from weighin.run import runner
from weighin.run.runner import said
from weighin.settings.definition import Settings
from weighin.units import GIB, MIB

CELL = make_cell("streaming", ram_limit_bytes=None)
Outcomes = Callable[[int, int], Outcome]
"""What comes of a limit, in bytes, and of its repeat."""


def above(need: int, below: Outcome = Outcome.OOM_KILLED) -> Outcomes:
    return lambda limit, _: Outcome.OK if limit >= need else below


def unsteady(limit: int, repeat: int) -> Outcome:
    """At 1008 MiB it works once."""
    works = limit > 1008 * MIB or (limit == 1008 * MIB and repeat == 0)
    return Outcome.OK if works else Outcome.TIMEOUT


def lived(
    limit: int | None, outcome: Outcome, anon_bytes: int = GIB, repeat: int = 0, message: str = ""
) -> Result:
    return Result(
        SCHEMA,
        replace(CELL, ram_limit_bytes=limit, repeat=repeat),
        outcome,
        message,
        model_bytes=800 * MIB,
        baseline=Memory(230 * MIB, 140 * MIB, 86 * MIB, 4 * MIB),
        peaks=Peaks(rss_bytes=anon_bytes, anon_sampled_bytes=anon_bytes),
        ready_ns=10**9 if outcome is Outcome.OK else None,
        oom_kills=int(outcome is Outcome.OOM_KILLED),
    )


def searched(first: Result, following: Callable[[Cell], Result], aim: Aim = Aim.SURVIVES, *, within: float = 0.01, highest: int = 64 * GIB) -> list[Result]:  # fmt: skip
    """Search as the verb does; every step is asked for with all results so far."""
    results = [first]
    while cell := next_cell(first.cell, results, within, highest, aim):
        assert cell.ram_limit_bytes is not None and 0 < cell.ram_limit_bytes <= highest
        assert cell.id not in {one.cell.id for one in results}
        results.append(following(cell))
        assert len(results) < 60
    return results


def search(outcomes: Outcomes, anon_bytes: int = 1000 * MIB, within: float = 0.01) -> list[Result]:
    def following(cell: Cell) -> Result:
        limit = cell.ram_limit_bytes or 0
        outcome = outcomes(limit, cell.repeat)
        message = "" if outcome is Outcome.OK else "1 tensor differs"
        return lived(limit, outcome, anon_bytes, cell.repeat, message)

    assert next_cell(CELL, [], within, 64 * GIB) == CELL
    return searched(lived(None, Outcome.OK, anon_bytes), following, within=within)


def limits(results: list[Result]) -> list[int]:
    return [(one.cell.ram_limit_bytes or 0) // MIB for one in results]


@given(
    need=st.integers(1, 30_000 * MIB),
    expected=st.integers(MIB, 30_000 * MIB),
    within=st.floats(0.001, 0.1),
)
def test_every_floor_is_found_to_within_what_was_asked(
    need: int, expected: int, within: float
) -> None:
    (floor,) = floors(search(above(need), expected, within))
    if floor.bytes is None:
        assert floor.message.startswith("works even under")
        assert need <= 8 * MIB
        return
    assert floor.step_bytes is not None
    assert floor.bytes - floor.step_bytes < need <= floor.bytes
    assert floor.step_bytes <= max(8 * MIB, within * floor.bytes)
    assert (floor.passed, floor.failed) == (3, 1)


def test_an_interrupted_search_goes_on_where_it_was() -> None:
    whole = search(above(1100 * MIB))
    for done in range(1, len(whole)):
        assert next_cell(CELL, whole[:done], 0.01, 64 * GIB) == whole[done].cell
        floor = floors(whole[:done])[0]
        assert bool(floor.message) == (done < len(whole) - 1)


# -- mapped loads


def mapped(
    limit: int | None, repeat: int = 0, aim: Aim = Aim.SURVIVES, read_ahead_bytes: int = 8 * MIB
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
    def following(cell: Cell) -> Result:
        return mapped(cell.ram_limit_bytes, cell.repeat, aim)

    return searched(mapped(None), following, aim, highest=4 * GIB)


def test_a_search_begins_where_the_pages_in_reading_fit_beside_a_mapped_model() -> None:
    unlimited = mapped(None, read_ahead_bytes=128 * 1024)
    first = next_cell(unlimited.cell, [unlimited], 0.01, 4 * GIB)
    assert first and first.ram_limit_bytes == 248 * MIB
    copied = replace(unlimited, peaks=replace(unlimited.peaks, anon_sampled_bytes=1000 * MIB))
    first = next_cell(copied.cell, [copied], 0.01, 4 * GIB)
    assert first and first.ram_limit_bytes == 1008 * MIB


# -- commands


def search_command(need: int, guess: int, isolation: str = "cgroup") -> list[Result]:
    def result(cell: Cell, needed_bytes: int) -> Result:
        lives = cell.ram_limit_bytes is None or cell.ram_limit_bytes >= need
        # All page cache, which is not needed.
        peaks = Peaks(cgroup_bytes=needed_bytes + 4 * GIB, unreclaimable_sampled_bytes=1)
        outcome, ran = (
            Outcome.OK if lives else Outcome.OOM_KILLED,
            Ran(1, needed_bytes=needed_bytes),
        )
        return Result(SCHEMA, cell, outcome, peaks=peaks, ready_ns=10**9, ran=ran)

    first = result(Cell.of_command("x", ("./x",), isolation), guess)
    return searched(first, lambda cell: result(cell, need))


@given(need=st.integers(3 * MIB, 40 * GIB), missed=st.floats(0.7, 1.3))
def test_the_floor_of_a_command_is_searched_near_what_it_needed(need: int, missed: float) -> None:
    results = search_command(need, int(need * missed))
    assert len(results) < 30
    (floor,) = floors(results)
    assert floor.bytes
    assert need <= floor.bytes <= need + max(2 * MIB, need // 50)


SEARCHES: dict[str, list[Result]] = {
    "as expected": search(above(1005 * MIB)),
    "a step above what is expected": search(above(1010 * MIB)),
    "far above": search(above(1100 * MIB)),
    "far below": search(above(900 * MIB)),
    "a limit under which it works once": search(unsteady),
    "it fails under all that there is": search(above(65 * GIB)),
    **{f"it ends with {outcome} under a limit": search(above(1005 * MIB, outcome))
       for outcome in (Outcome.WRONG_WEIGHTS, Outcome.STRATEGY_FAILED, Outcome.CUDA_OOM)},
    "it fails without a limit": searched(lived(None, Outcome.WRONG_WEIGHTS, message="1 tensor differs"), lambda _: lived(0, Outcome.OK)),
    "a mapped load goes on to the limit that it survives": search_mapped(Aim.SURVIVES),
    "a mapped load, to the limit under which it ends": search_mapped(Aim.ENDS),
    "a command needs next to nothing": search_command(300_000, 300_000),
    "in a container": search_command(300_000, 300_000, "docker"),
}  # fmt: skip


def test_which_limits_are_tried_and_what_is_found(same: Compare) -> None:
    texts = []
    for what, results in SEARCHES.items():
        (floor,) = floors(results)
        tried = [f"{limit or 'no limit'}" for limit in limits(results)]
        lines = [f"MiB tried: {', '.join(tried)}", floor.message]
        if floor.bytes and floor.step_bytes:
            lines = [
                lines[0],
                f"{floor.aim} under {floor.bytes // MIB} MiB, {floor.below} {floor.step_bytes // MIB} MiB below",
                f"passed {floor.passed}, failed {floor.failed}",
            ]
        if typical := floor.at_floor:
            verdict = typical.judgement and typical.judgement.verdict
            lines.append(
                f"{verdict} in {floor.times(typical) or 0:.2f} of the time without a limit"
            )
        texts.append("\n  ".join([what, *lines]))
    same("floor_searches.txt", "\n".join(texts) + "\n")


# -- the verb


def test_floors_are_found_one_after_the_other_and_each_step_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results: list[Result] = []
    told: list[str] = []

    def run(task: Run, _: Progress, following: Any) -> list[Result]:
        while (planned := following(results)) is not None:
            limit = planned.cell.ram_limit_bytes
            outcome = above(1010 * MIB)(limit or GIB, 0)
            outcome = Outcome.SKIPPED if planned.skip else outcome
            one = lived(limit, outcome, 1000 * MIB, planned.cell.repeat)
            results.append(replace(one, cell=planned.cell))
        return results

    monkeypatch.setattr(cgroup, "ram_bytes", lambda _: (64 * GIB, 64 * GIB))
    monkeypatch.setattr(runner, "run", run)
    skipped = Planned(replace(CELL, strategy="broken"), skip="no")
    settings = Settings().model_copy(update={"within": 0.01, "aim": Aim.SURVIVES})
    planned = [skipped, Planned(CELL), Planned(replace(CELL, strategy="baseline"))]
    task = Run(Path("run"), planned, PlayedIsolation([]), settings)
    assert runner.search(task, Progress(narrowed=told.append)) is results
    strategies = [one.cell.strategy for one in results]
    assert strategies == ["broken"] + ["streaming"] * 6 + ["baseline"] * 6
    assert limits(results) == [0] + 2 * [0, 1008, 1016, 1016, 1016, 1118]
    assert len(told) == 12  # after each cell of a search
    assert told[0] == "floor of streaming: not known yet"
    assert told[1] == "floor of streaming: above 1008.000 MiB"
    assert told[5].startswith("floor of streaming: above 1008.000 MiB, at most 1016.000 MiB")
    assert told[-1].startswith("floor of baseline: ")


FIRST = lived(None, Outcome.OK)
WORDS: dict[str, list[Result]] = {
    "not known yet": [FIRST],
    "above 1.000 GiB": [FIRST, lived(GIB, Outcome.OOM_KILLED)],
    "at most 1.000 GiB": [FIRST, lived(GIB, Outcome.OK)],
    "above 1008.000 MiB, at most 1016.000 MiB": search(above(1010 * MIB))[:4],
}


def test_the_bounds_of_a_floor_in_words() -> None:
    for words, results in WORDS.items():
        assert said(Planned(CELL), results, Aim.SURVIVES) == f"floor of streaming: {words}"
    assert said(Planned(CELL), [], Aim.SURVIVES) == "floor of streaming: not known yet"
    wrong = lived(None, Outcome.WRONG_WEIGHTS, message="odd")
    assert said(Planned(CELL), [wrong], Aim.SURVIVES) == (
        "no floor for streaming: wrong_weights without a limit: odd"
    )


def test_a_step_must_be_a_share_of_the_floor() -> None:
    assert (share("1%"), share("0.01"), share("10%")) == (0.01, 0.01, 0.1)
    for within in ("0", "-1%", "10.01%", "abc", "nan%"):
        assert refused(share, within) == (
            f"--within {within}: not a share between 0% and 10%\n"
            "write a percentage in this range, such as --within 1%"
        )


def test_a_search_is_resumed_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is in contract's tables of wrong inputs."""
    monkeypatch.chdir(tmp_path)
    cell = make_command()
    run_folder.write_plan(Path("search"), [cell], settings_of(cell, within=0.01).as_json())
    assert plans.resume(Path("search"), trusted=True, search=True).settings.within == 0.01
