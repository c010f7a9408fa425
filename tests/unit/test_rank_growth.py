"""How memory grows with the number of ranks, in the report of a run with several numbers of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import MODEL_BYTES, make_cell, make_result

from weighin.records.metrics import charge, sum_of_peaks
from weighin.records.series import Measured
from weighin.result import Memory, Outcome, Peaks, Rank, Result
from weighin.show.findings import unreclaimable
from weighin.units import GIB

BEFORE = 300 * 1024**2


def result(strategy: str, ranks: int, copies: float, *, limit: int | None = None) -> Result:
    """A cell whose cgroup peaks this many models above the imports of all ranks."""
    before = BEFORE * ranks
    cell = make_cell(strategy, ranks=ranks, ram_limit_bytes=limit)
    return replace(
        make_result(cell),
        model_bytes=MODEL_BYTES,
        baseline=Memory(BEFORE, BEFORE, 0, 0, cgroup_bytes=before),
        peaks=Peaks(
            rss_bytes=BEFORE + MODEL_BYTES,
            cgroup_bytes=before + round(copies * MODEL_BYTES),
            anon_sampled_bytes=before + round(copies * MODEL_BYTES),
            pss_bytes=before + MODEL_BYTES if ranks > 1 else None,
        ),
        ranks=(Rank(peak_rss_bytes=BEFORE + MODEL_BYTES),) * ranks if ranks > 1 else (),
    )


@pytest.mark.parametrize(
    ("copies", "growth"),
    [
        ({1: 2.0, 2: 4.0, 4: 8.0}, "linear (2.00x a rank)"),
        ({1: 1.0, 4: 1.1}, "flat (0.03x a rank)"),
        ({2: 1.0, 4: 2.0}, "between (0.50x a rank)"),
        ({4: 1.0}, "-"),
    ],
)
def test_the_growth_is_the_slope_over_the_ranks(copies: dict[int, float], growth: str) -> None:
    (series,) = Measured([result("baseline", ranks, many) for ranks, many in copies.items()]).ranks
    assert series.growth == growth


def test_cells_under_a_limit_and_cells_of_one_process_alone_tell_nothing_of_ranks() -> None:
    alone = [result("baseline", 1, 2.0), result("streaming", 2, 2.0, limit=8 * GIB)]
    assert Measured(alone).ranks == []


@pytest.mark.parametrize(
    ("each", "growth"),
    [(0.24, "flat"), (0.25, "between"), (0.74, "between"), (0.75, "linear")],
)
def test_the_bounds_of_a_growth(each: float, growth: str) -> None:
    sizes = {1: 100, 5: 100 + round(400 * each)}
    (series,) = Measured([result("baseline", ranks, 1.0) for ranks in (1, 5)]).ranks
    exact = replace(series, charges=sizes, model_bytes=100)
    assert exact.growth == f"{growth} ({each:.2f}x a rank)"
    assert replace(exact, model_bytes=None).growth == "-"
    assert replace(exact, charges={2: 5}).growth == "-"


def test_the_charge_of_ranks_is_the_median_above_their_imports() -> None:
    repeats = [
        replace(one, cell=replace(one.cell, repeat=number))
        for number, one in enumerate(result("baseline", 2, many) for many in (3.0, 1.0, 2.0))
    ]
    (series,) = Measured([*repeats, result("baseline", 4, 2.5)]).ranks
    assert series.charges == {2: 2 * MODEL_BYTES, 4: round(2.5 * MODEL_BYTES)}
    assert {ranks: len(found) for ranks, found in series.by_ranks.items()} == {2: 3, 4: 1}
    assert (series.cell.ranks, series.model_bytes) == (1, MODEL_BYTES)
    unknown = replace(repeats[0], peaks=Peaks())
    assert charge(unknown) is charge(replace(repeats[0], baseline=None)) is None
    (alone,) = Measured([unknown]).ranks
    assert alone.charges == {}


def test_memory_that_cannot_be_given_back_is_above_the_imports_of_all_ranks() -> None:
    one = result("baseline", 2, 1.0)
    assert unreclaimable(one) == MODEL_BYTES
    shared = replace(one.peaks, unreclaimable_sampled_bytes=3 * BEFORE)
    assert unreclaimable(replace(one, peaks=shared)) == BEFORE
    small = replace(one.peaks, anon_sampled_bytes=BEFORE)
    assert unreclaimable(replace(one, peaks=small)) == 0
    assert unreclaimable(replace(one, peaks=Peaks())) is None
    assert unreclaimable(replace(one, baseline=None)) is None
    before = Memory(BEFORE, BEFORE - 10, 0, 10, cgroup_bytes=5)
    assert unreclaimable(replace(one, baseline=before)) == MODEL_BYTES


def test_a_sum_of_peaks_needs_the_peak_of_every_rank() -> None:
    one = result("baseline", 2, 1.0)
    assert sum_of_peaks(one) == 2 * (BEFORE + MODEL_BYTES)
    assert sum_of_peaks(replace(one, ranks=())) is None
    assert sum_of_peaks(replace(one, ranks=(*one.ranks, Rank()))) is None


def test_only_loads_that_ended_ok_tell_of_ranks() -> None:
    one = result("baseline", 2, 1.0)
    saved = replace(one, cell=replace(one.cell, operation="save"))
    assert Measured([saved, replace(one, outcome=Outcome.TIMEOUT)]).ranks == []
