"""How memory grows with the number of ranks, in the report of a run with several numbers of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from factories import MODEL_BYTES, make_cell, make_result

from weighin.records.rank_growth import Growth, over_ranks
from weighin.report import ranks as report
from weighin.report import sections, writing
from weighin.report.findings import markdown
from weighin.result import Memory, Peaks, Rank, Result
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
        ({1: 2.0, 2: 4.0, 4: 8.0}, Growth.LINEAR),
        ({1: 1.0, 4: 1.1}, Growth.FLAT),
        ({2: 1.0, 4: 2.0}, Growth.BETWEEN),
        ({4: 1.0}, None),
    ],
)
def test_the_growth_is_the_slope_over_the_ranks(
    copies: dict[int, float], growth: Growth | None
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
