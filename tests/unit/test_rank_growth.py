"""How memory grows with the number of ranks, in the report of a run with several numbers of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from factories import MODEL_BYTES, make_cell, make_result

from weighin.records.metrics import charge, sum_of_peaks, unreclaimable
from weighin.records.series import over_ranks
from weighin.report import ranks as report
from weighin.report import sections, writing
from weighin.report.findings import markdown
from weighin.result import Memory, Outcome, Peaks, Rank, Result
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
        ({1: 2.0, 2: 4.0, 4: 8.0}, "linear"),
        ({1: 1.0, 4: 1.1}, "flat"),
        ({2: 1.0, 4: 2.0}, "between"),
        ({4: 1.0}, None),
    ],
)
def test_the_growth_is_the_slope_over_the_ranks(
    copies: dict[int, float], growth: str | None
) -> None:
    (series,) = over_ranks([result("baseline", ranks, many) for ranks, many in copies.items()])
    assert series.growth is growth


def test_cells_under_a_limit_and_cells_of_one_process_alone_tell_nothing_of_ranks() -> None:
    alone = [result("baseline", 1, 2.0), result("streaming", 2, 2.0, limit=8 * GIB)]
    assert over_ranks(alone) == []
    assert not report.found(alone)


def test_the_table_has_every_number_of_ranks_and_the_sum_that_misleads() -> None:
    results = [result("mmap_assign", 1, 1.0), result("mmap_assign", 4, 1.2)]
    *_, first, last = [
        line for line in markdown(report.found(results)).splitlines() if "mmap" in line
    ]
    assert first.startswith("| mmap_assign | 1 |")
    cells = [cell.strip() for cell in last.strip("| ").split("|")]
    sum_of_peaks = 4 * (BEFORE + MODEL_BYTES) / GIB
    assert cells[:2] == ["mmap_assign", "4"]
    assert cells[3:5] == ["1.20", "1.20"]
    assert cells[6] == f"{sum_of_peaks:.3f}"
    assert cells[7] == "flat (0.07x a rank)"


def test_a_run_with_ranks_has_the_section_and_its_picture(tmp_path: Path) -> None:
    results = [result("baseline", ranks, 2.0 * ranks) for ranks in (1, 2, 4)]
    assert "Memory of all ranks" in [one.heading for one in sections.of(results)]
    assert writing.pictures(tmp_path, results)["ranks"]().get_axes()


@pytest.mark.parametrize(
    ("each", "growth"),
    [(0.24, "flat"), (0.25, "between"), (0.74, "between"), (0.75, "linear")],
)
def test_the_bounds_of_a_growth(each: float, growth: str) -> None:
    sizes = {1: 100, 5: 100 + round(400 * each)}
    (series,) = over_ranks([result("baseline", ranks, 1.0) for ranks in (1, 5)])
    exact = replace(series, charges=sizes, model_bytes=100)
    assert (exact.copies_per_rank, exact.growth) == (each, growth)
    assert replace(exact, model_bytes=None).growth is None
    assert replace(exact, charges={2: 5}).growth is None


def test_the_charge_of_ranks_is_the_median_above_their_imports() -> None:
    repeats = [
        replace(one, cell=replace(one.cell, repeat=number))
        for number, one in enumerate(result("baseline", 2, many) for many in (3.0, 1.0, 2.0))
    ]
    (series,) = over_ranks([*repeats, result("baseline", 4, 2.5)])
    assert series.charges == {2: 2 * MODEL_BYTES, 4: round(2.5 * MODEL_BYTES)}
    assert {ranks: len(found) for ranks, found in series.by_ranks.items()} == {2: 3, 4: 1}
    assert (series.cell.ranks, series.model_bytes) == (1, MODEL_BYTES)
    unknown = replace(repeats[0], peaks=Peaks())
    assert charge(unknown) is charge(replace(repeats[0], baseline=None)) is None
    (alone,) = over_ranks([unknown])
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
    assert over_ranks([saved, replace(one, outcome=Outcome.TIMEOUT)]) == []
