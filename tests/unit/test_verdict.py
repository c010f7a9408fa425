"""Survives, thrashes or killed: what decides, and the figures that are said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import SCRIPTS, make_cell, make_result

from weighin.cell import Cell
from weighin.records import run_folder
from weighin.records.verdict import (
    REFAULTS_PER_MODEL,
    SLOWDOWN,
    STALLED_SHARE,
    Judgement,
    Verdict,
    highest_charge,
    judge_all,
    judge_result,
)
from weighin.result import Cost, Faults, Memory, Outcome, Peaks, Pressure, Result
from weighin.units import GIB, MIB

PUBLISHED = Path(__file__).parents[2] / "results" / "published"

MODEL_BYTES = 4096 * 1000
SECOND = 1_000_000_000


def lived(**changes: Any) -> Result:
    """An ok cell that met its limit: 10 s, no refaults, no pressure."""
    base = make_result(
        make_cell(ram_limit_bytes=20 * GIB),
        peaks=Peaks(cgroup_bytes=20 * GIB),
        model_bytes=MODEL_BYTES,
        ready_ns=10 * SECOND,
        faults=Faults(100, 7, 0),
        pressure=Pressure(0, 0),
        cost=Cost(wall_ns=12 * SECOND),
    )
    return replace(base, **changes)


def verdict(result: Result, reference_ns: int | None = None) -> Verdict | None:
    said = judge_result(result, reference_ns)
    return said.verdict if said else None


def test_what_ends_ok_in_good_time_survives_and_says_by_which_figures() -> None:
    assert judge_result(lived(), 9 * SECOND) == Judgement(
        Verdict.SURVIVES,
        "10.0 s, 1.1x the time without a limit: 9.00 s; 0 B read again (0.00x the model); 7 major"
        " faults; waited for memory 0% of the load (all tasks at once 0%)",
    )


def test_refaults_and_lost_time_are_thrashing() -> None:
    thrashing = lived(faults=Faults(100, 900, 2500), pressure=Pressure(4 * SECOND, SECOND))
    assert judge_result(thrashing, 4 * SECOND) == Judgement(
        Verdict.THRASHES,
        "10.0 s, 2.5x the time without a limit: 4.00 s; 9.77 MiB read again (2.50x the model); 900"
        " major faults; waited for memory 40% of the load (all tasks at once 10%)",
    )


def test_a_command_thrashes_if_it_reads_much_of_its_limit_again() -> None:
    cell = Cell.of_command("x", ("x",), "cgroup", ram_limit_bytes=100 * MIB)
    pages = 100 * MIB // 4096
    result = lived(
        cell=cell,
        peaks=Peaks(cgroup_bytes=100 * MIB),
        model_bytes=None,
        faults=Faults(100, 900, pages // 5),
        pressure=Pressure(SECOND, SECOND),
    )
    assert judge_result(result, 4 * SECOND) == Judgement(
        Verdict.THRASHES,
        "10.0 s, 2.5x the time without a limit: 4.00 s; 20.00 MiB read again (0.20x the limit); 900"
        " major faults; waited for memory 10% of the run (all tasks at once 10%)",
    )
    assert verdict(result, 9 * SECOND) is Verdict.SURVIVES
    little = replace(result, faults=Faults(100, 900, pages // 20))
    assert verdict(little, 4 * SECOND) is Verdict.SURVIVES


def test_pages_are_as_large_as_on_the_machine_that_counted_them() -> None:
    large = lived(faults=Faults(100, 900, 250), environment={"page_bytes": 65536})
    assert judge_result(large, 5 * SECOND) == Judgement(
        Verdict.THRASHES,
        "10.0 s, 2.0x the time without a limit: 5.00 s; 15.62 MiB read again (4.00x the model); 900"
        " major faults; waited for memory 0% of the load (all tasks at once 0%)",
    )


@pytest.mark.parametrize(
    ("pages", "some_ns", "reference_ns", "expected"),
    [
        (REFAULTS_PER_MODEL * 1000, 0, 10 * SECOND / SLOWDOWN, Verdict.THRASHES),
        (REFAULTS_PER_MODEL * 1000 - 1, 0, 10 * SECOND / SLOWDOWN, Verdict.SURVIVES),
        (REFAULTS_PER_MODEL * 1000, 0, 10 * SECOND / SLOWDOWN + 1, Verdict.SURVIVES),
        (0, STALLED_SHARE * 10 * SECOND, 10 * SECOND, Verdict.THRASHES),
        (0, STALLED_SHARE * 10 * SECOND - 1, SECOND, Verdict.SURVIVES),
        (None, None, SECOND, Verdict.SURVIVES),
        (REFAULTS_PER_MODEL * 1000, None, None, Verdict.SURVIVES),
        (REFAULTS_PER_MODEL * 1000, STALLED_SHARE * 10 * SECOND, None, Verdict.THRASHES),
        (0, None, None, Verdict.SURVIVES),
    ],
)
def test_each_threshold_is_where_it_is_written(
    pages: float | None, some_ns: float | None, reference_ns: float | None, expected: Verdict
) -> None:
    result = lived(
        faults=Faults(100, 7, None if pages is None else round(pages)),
        pressure=None if some_ns is None else Pressure(round(some_ns), 0),
    )
    assert verdict(result, None if reference_ns is None else round(reference_ns)) is expected


def test_a_timeout_thrashes_where_memory_was_lacking_and_has_no_verdict_elsewhere() -> None:
    late = lived(outcome=Outcome.TIMEOUT, message="still running after 60 s", ready_ns=None)
    assert judge_result(late, SECOND) is None
    assert judge_result(replace(late, faults=Faults(1, 5, 3000)), None) == Judgement(
        Verdict.THRASHES,
        "still running after 60 s; 11.72 MiB read again (3.00x the model); 5 major faults; waited"
        " for memory 0% of the load (all tasks at once 0%)",
    )


def test_a_cell_that_stayed_below_its_limit_does_not_thrash_and_says_so() -> None:
    slow = lived(faults=Faults(100, 900, 2500), pressure=Pressure(4 * SECOND, SECOND))
    assert verdict(slow, 4 * SECOND) is Verdict.THRASHES
    below = replace(slow, peaks=Peaks(cgroup_bytes=20 * GIB - 4096))
    said = judge_result(below, 4 * SECOND)
    assert said
    assert said.verdict is Verdict.SURVIVES
    assert said.reason.startswith(
        "its memory never reached the limit: 20.00 GiB at most; 10.0 s, 2.5x the time without a"
        " limit: 4.00 s"
    )
    late = replace(below, outcome=Outcome.TIMEOUT, message="still running after 60 s")
    assert judge_result(late, 4 * SECOND) is None
    assert verdict(replace(slow, peaks=Peaks()), 4 * SECOND) is Verdict.THRASHES  # peak not known


@pytest.mark.parametrize("run", sorted(path.name for path in PUBLISHED.iterdir() if path.is_dir()))
def test_no_published_cell_below_its_limit_thrashes(run: str) -> None:
    results = run_folder.read(PUBLISHED / run).results
    found = judge_all(results)
    for one in results:
        limit, said = one.cell.ram_limit_bytes, found[one.cell.id]
        if limit is not None and (highest_charge(one) or 0) < limit:
            assert said is None or said.verdict is not Verdict.THRASHES, one.cell.id
            alone = judge_result(one)
            assert alone is None or alone.verdict is not Verdict.THRASHES, one.cell.id


@pytest.mark.parametrize(
    ("run", "floor"),
    [
        ("gpt2-medium-floors", 352 * MIB),
        ("gpt2-medium-floors-again", 320 * MIB),
        ("gpt2-medium-floors-cgroup", 328 * MIB),
    ],
)
def test_a_mapped_load_survives_its_published_floor_and_thrashes_below(
    run: str, floor: int
) -> None:
    results = run_folder.read(PUBLISHED / run).results
    found = judge_all(results)

    def verdicts(limit: int) -> set[Verdict]:
        return {
            one.verdict
            for result in results
            if result.cell.strategy == "mmap_assign"
            and result.cell.ram_limit_bytes == limit
            and (one := found[result.cell.id])
        }

    assert verdicts(floor) == {Verdict.SURVIVES}
    assert Verdict.THRASHES in verdicts(floor - 8 * MIB)


def test_what_the_kernel_killed_is_killed() -> None:
    killed = make_result(make_cell("baseline"), SCRIPTS["baseline"])
    assert judge_result(killed) == Judgement(
        Verdict.KILLED, "killed by the kernel for lack of memory in phase 'read'"
    )
    refused = lived(outcome=Outcome.CUDA_OOM, message="CUDA out of memory")
    assert judge_result(refused) == Judgement(Verdict.KILLED, "CUDA out of memory")
    child = lived(outcome=Outcome.STRATEGY_FAILED, message="BrokenProcessPool", oom_kills=2)
    assert judge_result(child) == Judgement(
        Verdict.KILLED, "the kernel killed 2 of its processes for lack of memory"
    )


def test_a_run_is_judged_against_its_own_cell_without_a_limit_or_the_highest_above() -> None:
    def cell(limit: int | None, seconds: float, strategy: str = "a", repeat: int = 0) -> Result:
        return lived(
            cell=make_cell(strategy, ram_limit_bytes=limit, repeat=repeat),
            ready_ns=round(seconds * SECOND),
            faults=Faults(1, 1, 500),
        )

    results = [
        cell(None, 3, repeat=0), cell(None, 4, repeat=1), cell(None, 9, repeat=2),  # median 4 s
        cell(2 * GIB, 7), cell(GIB, 8),
        cell(2 * GIB, 7, "b"), cell(GIB, 20, "b"),
    ]  # fmt: skip
    found = judge_all(results)
    said = [found[result.cell.id] for result in results]
    assert said[:3] == [None, None, None]
    assert [one.verdict for one in said[3:] if one] == [
        Verdict.SURVIVES,
        Verdict.THRASHES,
        Verdict.SURVIVES,  # nothing above it: refaults alone decide nothing
        Verdict.THRASHES,
    ]
    assert [one.reason.partition(";")[0] for one in said[3:] if one] == [
        "7.00 s, 1.8x the time without a limit: 4.00 s",
        "8.00 s, 2.0x the time without a limit: 4.00 s",
        "7.00 s",
        "20.0 s, 2.9x the time without a limit: 7.00 s",
    ]


def test_a_load_that_reads_the_same_pages_often_thrashes_whatever_its_time() -> None:
    """The model has 1000 pages; three times its size may be read again."""
    base = lived(pressure=None, baseline=None)
    assert verdict(replace(base, faults=Faults(1, 1, 3001))) is Verdict.THRASHES
    assert verdict(replace(base, faults=Faults(1, 1, 3000))) is Verdict.SURVIVES
    large_import = replace(make_result().baseline or Memory(0, 0, 0, 0), file_bytes=2 * MODEL_BYTES)
    imported = replace(base, baseline=large_import)
    assert verdict(replace(imported, faults=Faults(1, 1, 6001))) is Verdict.THRASHES
    assert verdict(replace(imported, faults=Faults(1, 1, 6000))) is Verdict.SURVIVES
    command = replace(base, cell=Cell.of_command("x", ("x",), "cgroup", ram_limit_bytes=20 * GIB))
    assert verdict(replace(command, faults=Faults(1, 1, 9000))) is Verdict.SURVIVES
    unknown = replace(base, model_bytes=None, faults=Faults(1, 1, 9000))
    assert verdict(unknown) is Verdict.SURVIVES


def test_a_cell_that_was_ended_thrashes_with_its_proof() -> None:
    ended = lived(outcome=Outcome.THRASHING, message="ended after 5 s", ready_ns=None)
    assert judge_result(ended) == Judgement(Verdict.THRASHES, "ended after 5 s")
