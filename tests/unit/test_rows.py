"""Results as rows: a row a cell, a row a series, nothing rounded and nothing invented."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from factories import (
    LIMIT,
    MODEL_BYTES,
    make_cell,
    make_result,
    make_samples,
    make_skipped,
    notebook_run,
    write_samples,
)

from weighin.records.metrics import COLUMNS
from weighin.records.run_folder import Records, read_samples
from weighin.records.series import Measured, Row, row_of, varying
from weighin.result import Outcome, Peaks, Result


def cells(results: Sequence[Result]) -> list[Row]:
    return [row_of(result) for result in results]


def series(results: Sequence[Result]) -> list[Row]:
    return Measured.of(Path(), Records(tuple(results))).rows


def test_a_cell_is_a_row_in_the_records_order() -> None:
    rows = cells(notebook_run())
    assert [row["strategy"] for row in rows] == [
        "baseline", "sequential", "meta_copy", "mmap_assign", "per_param", "streaming",
    ]  # fmt: skip
    assert [row["outcome"] for row in rows] == ["oom_killed"] * 3 + ["ok"] * 3


def test_figures_keep_the_records_units_and_digits() -> None:
    result = make_result()
    (row,) = cells([result])
    assert result.peaks.rss_bytes is not None and result.baseline is not None
    above = result.peaks.rss_bytes - result.baseline.rss_bytes
    assert row["peak_rss_bytes"] == result.peaks.rss_bytes
    assert row["above_import_bytes"] == above
    assert row["above_import_per_model"] == above / MODEL_BYTES
    assert row["load_s"] == 0.44
    assert row["ready_s"] == 5.44
    assert row["ram_limit_bytes"] == LIMIT


def test_what_was_not_measured_is_none() -> None:
    (row,) = cells([make_skipped()])
    assert all(row[name] is None for name in COLUMNS)


def test_a_series_has_the_median_and_the_range_of_its_repeats() -> None:
    repeats = [
        make_result(make_cell("streaming", repeat=repeat), load_ns=load_ns)
        for repeat, load_ns in enumerate([3_000_000_000, 1_000_000_000, 2_500_000_000])
    ]
    other = make_result(make_cell("baseline"))
    rows = series([repeats[0], other, *repeats[1:]])
    assert [(row["strategy"], row["repeats"]) for row in rows] == [
        ("streaming", 3),
        ("baseline", 1),
    ]
    assert [rows[0][name] for name in ("load_s", "load_s_min", "load_s_max")] == [2.5, 1.0, 3.0]


def test_the_figures_of_a_mixed_series_are_those_of_its_ok_repeats() -> None:
    good = make_result(make_cell("streaming"))
    bad = make_result(
        make_cell("streaming", repeat=1),
        outcome=Outcome.TIMEOUT,
        peaks=Peaks(rss_bytes=1),
        message="slow",
    )
    (row,) = series([bad, good])
    assert row["outcome"] == "timeout 1, ok 1"
    assert row["message"] == "slow"
    assert row["peak_rss_bytes_min"] == good.peaks.rss_bytes


def test_a_cell_measured_again_counts_once() -> None:
    first = make_result(outcome=Outcome.MEASUREMENT_FAILED)
    (row,) = series([first, make_result()])
    assert (row["repeats"], row["outcome"]) == (1, "ok")


def test_cells_of_different_kwargs_are_different_series() -> None:
    cell = make_cell()
    smaller = replace(cell, model=replace(cell.model, kwargs={"n_layer": 2}))
    assert len(series([make_result(cell), make_result(smaller)])) == 2


def test_varying_dimensions_are_named_in_the_order_of_columns() -> None:
    results = [make_result(), make_result(make_cell(ram_limit_bytes=None, dtype="bfloat16"))]
    assert varying(series(results)) == ["ram_limit_bytes", "dtype"]


def test_samples_are_read_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    result = make_result()
    path = write_samples(tmp_path, result)
    with path.open("a") as file:
        file.write("400000")
    assert read_samples(tmp_path, result.samples_path) == make_samples(result)


@pytest.mark.parametrize(
    "row", ["5,1,2,3", "5,1,2,3,4,5,6,-7", "5,1,2,3,4,5,6,x", f"5,1,2,3,4,5,6,{2**63}"]
)
def test_a_row_with_missing_or_impossible_figures_is_left_out(tmp_path: Path, row: str) -> None:
    head = "t_ns,rss_bytes,anon_bytes,file_bytes,shmem_bytes,swap_bytes,minor_faults,major_faults"
    (tmp_path / "x.csv").write_text(f"{head}\n9,1,2,3,4,5,6,7\n{row}\n8,1,2,3,4,5,6,7\n")
    assert [sample.t_ns for sample in read_samples(tmp_path, "x.csv")] == [8, 9]
    assert read_samples(tmp_path / "y", "../x.csv") == []


@pytest.mark.parametrize("text", [None, "", "t_ns\n", "t_ns,rss_bytes\n1,2\n", "\x00"])
def test_samples_that_cannot_be_read_are_none(tmp_path: Path, text: str | None) -> None:
    result = make_result()
    if text is not None:
        assert result.samples_path is not None
        (tmp_path / result.samples_path).parent.mkdir()
        (tmp_path / result.samples_path).write_text(text)
    assert read_samples(tmp_path, result.samples_path) == []
    assert read_samples(tmp_path, make_skipped().samples_path) == []
