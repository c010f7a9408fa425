"""The survival matrix: which cell stands in each field, and what a reader sees of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from factories import MODEL_BYTES, make_cell
from sweeps import a_sweep, swept

from weighin.records.series import Measured
from weighin.result import Faults, Outcome, Result
from weighin.show.findings import slow_disks, survival
from weighin.units import GIB


def words(results: list[Result]) -> dict[str, list[str]]:
    (matrix,) = Measured(results).matrices
    return {
        matrix.labels[row]: [
            field.words if (field := matrix.fields.get((row, column))) else "-"
            for column in range(len(matrix.limits))
        ]
        for row in range(len(matrix.labels))
    }


def test_the_matrix_of_a_sweep() -> None:
    (matrix,) = Measured(a_sweep()[::-1]).matrices
    assert matrix.limits == (None, 16 * GIB, 8 * GIB, 4 * GIB, GIB)
    assert words(a_sweep()) == {
        "baseline": ["25.0 s", "26.0 s", "killed", "killed", "killed"],
        "mmap_assign": ["5.00 s", "5.20 s", "6.00 s", "9.00 s", "41.0 s thrashes"],
        "streaming": ["7.00 s", "7.50 s", "7.00 s", "killed", "killed"],
    }


def test_a_run_with_one_limit_has_no_matrix() -> None:
    assert Measured([swept("a", None, (5, 0)), swept("a", 8, (5, 0))]).matrices == []


def test_models_have_matrices_of_their_own_and_layouts_rows() -> None:
    other = replace(make_cell().model, name="gpt2")
    results = [
        swept("a", limit, (5, 0), **changes)
        for changes in ({}, {"format": "dcp"}, {"options": {"x": 1}}, {"model": other})
        for limit in (8, 4)
    ]
    first, second = Measured(results).matrices
    assert first.labels == ["a pt", "a dcp", "a pt x=1"]
    assert second.labels == ["a"]


def test_the_worst_of_the_repeats_is_shown_with_its_number_else_the_median() -> None:
    def repeats(*lives: tuple[float, float] | None) -> list[Result]:
        return [swept("a", 4, lived, repeat=number) for number, lived in enumerate(lives)]

    ends = [swept("a", None, (5, 0)), swept("a", 8, (5, 0))]
    assert words([*ends, *repeats((6, 0), (9, 0), (7, 0))])["a"][2] == "7.00 s"
    assert words([*ends, *repeats((6, 0), None, (30, 2))])["a"][2] == "killed (1 of 3)"
    assert words([*ends, *repeats((6, 0), (40, 2), (30, 2))])["a"][2] == "30.0 s thrashes (2 of 3)"


@pytest.mark.parametrize(
    ("outcome", "pages", "said"),
    [
        (Outcome.TIMEOUT, MODEL_BYTES // 4096, "timeout thrashes"),
        (Outcome.TIMEOUT, 0, "timeout"),
        (Outcome.STRATEGY_FAILED, 0, "strategy_failed"),
        (Outcome.SKIPPED, 0, "skipped"),
    ],
)
def test_what_is_not_ok_is_named(outcome: Outcome, pages: int, said: str) -> None:
    bad = replace(
        swept("a", 4, (5, 0)), outcome=outcome, ready_ns=None, faults=Faults(1, 1, pages), phases=()
    )
    assert words([swept("a", 8, (5, 0)), bad])["a"] == ["5.00 s", said]


@pytest.mark.parametrize(
    "pair",
    [
        ({"options": {"map_location": "1"}}, {"options": {"map_location": 1}}),
        ({"command": ("a", "1")}, {"command": ("a", "2")}),
    ],
)
def test_rows_with_one_label_stay_two_rows(pair: tuple[dict[str, Any], ...]) -> None:
    lives = ((8, (5, 0)), (4, None))
    results = [swept("a", limit, lived, **one) for one in pair for limit, lived in lives]
    (table,) = survival(Measured(results))
    assert [[entry.text for entry in row[1:]] for row in table.entries] == [
        ["5.00 s", "killed"]
    ] * 2


def test_limits_and_disks_with_one_label_stay_two_columns() -> None:
    more, *_ = limits = [swept("a", limit, (5, 0)) for limit in (8, 4)]
    more = replace(more, cell=replace(more.cell, ram_limit_bytes=8 * GIB + 1))
    (table,) = survival(Measured([more, *limits]))
    assert len(table.columns) == 1 + 3
    disks = [
        swept("a", None, (seconds, 0), disk_bytes_per_s=rate, options={"x": x})
        for x, rate, seconds in (("1", 10**8, 5), (1, 10**8, 6), ("1", 10**8 + 1, 7))
    ]
    (table,) = slow_disks(Measured(disks))
    assert [row[1:] for row in table.rows] == [["5.00 s", "7.00 s"], ["6.00 s", "-"]]
