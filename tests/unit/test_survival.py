"""The survival matrix: which cell stands in each field, and what a reader sees of it."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from factories import MODEL_BYTES, make_cell
from rich.console import Console
from sweeps import a_sweep, swept

from weighin.records import run_folder
from weighin.records.series import matrices
from weighin.records.verdict import Verdict
from weighin.report import passes, survival
from weighin.report.findings import markdown
from weighin.report.sections import terminal_table
from weighin.report.survival_plots import FILLS, draw_survival, draw_times
from weighin.report.writing import write_report
from weighin.result import Faults, Outcome, Result
from weighin.units import GIB


def terminal(results: list[Result]) -> list[str]:
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(terminal_table(results))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def words(results: list[Result]) -> dict[str, list[str]]:
    (matrix,) = matrices(results)
    return {
        matrix.label(row): [
            field.words if (field := matrix.fields.get((row, column))) else "-"
            for column in range(len(matrix.limits))
        ]
        for row in range(len(matrix.rows))
    }


def test_the_matrix_of_a_sweep() -> None:
    (matrix,) = matrices(a_sweep()[::-1])
    assert matrix.limits == (None, 16 * GIB, 8 * GIB, 4 * GIB, GIB)
    assert matrix.model_bytes == MODEL_BYTES
    assert words(a_sweep()) == {
        "baseline": ["25.0 s", "26.0 s", "killed", "killed", "killed"],
        "mmap_assign": ["5.00 s", "5.20 s", "6.00 s", "9.00 s", "41.0 s thrashes"],
        "streaming": ["7.00 s", "7.50 s", "7.00 s", "killed", "killed"],
    }


def test_a_run_with_one_limit_has_no_matrix() -> None:
    assert matrices([swept("a", None, (5, 0)), swept("a", 8, (5, 0))]) == []


def test_models_have_matrices_of_their_own_and_layouts_rows() -> None:
    other = replace(make_cell().model, name="gpt2")
    results = [
        swept("a", limit, (5, 0), **changes)
        for changes in ({}, {"format": "dcp"}, {"options": {"x": 1}}, {"model": other})
        for limit in (8, 4)
    ]
    first, second = matrices(results)
    assert [first.label(row) for row in range(3)] == ["a pt", "a dcp", "a pt x=1"]
    assert [second.label(row) for row in range(len(second.rows))] == ["a"]


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


def test_a_field_that_was_not_measured_is_empty() -> None:
    results = [swept("a", 8, (5, 0)), swept("a", 4, (5, 0)), swept("b", 4, (5, 0))]
    assert words(results)["b"] == ["-", "5.00 s"]
    assert "| b | - | 🟢 5.00 s |" in markdown(survival.found(results))


def test_the_sweep_in_a_terminal() -> None:
    lines = terminal(a_sweep())
    start = next(n for n, line in enumerate(lines) if "no limit  16 GiB" in line)
    assert lines[start:] == [
        " strategy     no limit  16 GiB   8 GiB   4 GiB            1 GiB",
        " ──────────────────────────────────────────────────────────────",
        " baseline       25.0 s  26.0 s  killed  killed           killed",
        " mmap_assign    5.00 s  5.20 s  6.00 s  9.00 s  41.0 s thrashes",
        " streaming      7.00 s  7.50 s  7.00 s  killed           killed",
        "",
        "mmap_assign under 1 GiB thrashes: 41.0 s, 8.2x the time without a limit: 5.00 s; 34.59 GiB read",
        "again (5.50x the model); 5500 major faults; waited for memory 0% of the load (all tasks at once 0%)",
        "Time: for the load until every byte was read and for one forward pass. killed: by the kernel, for",
        "lack of memory.",
        "thrashes: the cell's memory reached the limit, and it either waited for memory for 20% of the time",
        "or more, or read at least 10% of the model again and took at least 2x the time without a limit, or",
        "read more than 3x the model again.",
        "gpt2-xl (6.290 GiB) · device cpu · float32 · cold page cache · isolation docker · testbench ·",
        "Example CPU · Linux 6.18.0 · cgroup v2 · torch 2.13.0 · measured on an unknown day with weighin",
        "commit unknown",
    ]


def test_the_sweep_as_markdown() -> None:
    assert markdown(survival.found(a_sweep()), reasons=False).splitlines() == [
        "| strategy | no limit | 16 GiB | 8 GiB | 4 GiB | 1 GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| baseline | 25.0 s | 🟢 26.0 s | 🔴 killed | 🔴 killed | 🔴 killed |",
        "| mmap_assign | 5.00 s | 🟢 5.20 s | 🟢 6.00 s | 🟢 9.00 s | 🟡 41.0 s thrashes |",
        "| streaming | 7.00 s | 🟢 7.50 s | 🟢 7.00 s | 🔴 killed | 🔴 killed |",
        "",
        "Time: for the load until every byte was read and for one forward pass. killed: by the kernel, for lack of memory."
        " thrashes: the cell's memory reached the limit, and it either waited for memory for 20% of the time or more, or read at least 10% of the model again and took at least 2x the time without a limit, or read more than 3x the model again.",
        "",
        "gpt2-xl (6.290 GiB) · device cpu · float32 · cold page cache · isolation docker · testbench · Example CPU · Linux 6.18.0 · cgroup v2 · torch 2.13.0 · measured on an unknown day with weighin commit unknown",
    ]


def test_the_passes_of_each_series_as_markdown() -> None:
    results = [
        swept("mmap_assign", limit, (9, again), passes=2) for limit, again in ((None, 0), (4, 1.2))
    ]
    assert markdown(passes.found([*results, swept("broken", 4, None, passes=2)])).splitlines() == [
        "| strategy | RAM limit | pass 1 | pass 2 |",
        "| --- | --- | ---: | ---: |",
        "| mmap_assign | none | 2.00 s, 0 faults, 0.00x reread | 2.00 s, 0 faults, 0.00x reread |",
        "| mmap_assign | 4 GiB | 2.00 s, 120 faults, 0.60x reread | 2.00 s, 120 faults, 0.60x reread |",
        "",
        passes.NOTE,
        "",
        "gpt2-xl (6.290 GiB) · device cpu · format pt · float32 · cold page cache · isolation docker · testbench · Example CPU · Linux 6.18.0 · cgroup v2 · torch 2.13.0 · measured on an unknown day with weighin commit unknown",
    ]


def test_the_report_of_a_sweep_has_its_pictures(tmp_path: Any) -> None:
    for result in a_sweep():
        run_folder.append(tmp_path, result)
    names = [path.name for path in write_report(tmp_path)]
    assert names == [
        "report.md", "report.html", "summary.csv", "survival.png", "time-over-limit.png", "peaks.png",
        "timeline.png",
    ]  # fmt: skip
    text = (tmp_path / "report.md").read_text()
    assert (
        "- streaming under 4 GiB killed: killed by the kernel for lack of memory in phase" in text
    )
    assert text.index("## Survival") < text.index("## All results") < text.index("survival.png")


def test_the_picture_of_the_matrix_says_what_the_matrix_says() -> None:
    (axes,) = draw_survival(a_sweep()).axes
    from matplotlib.colors import to_hex

    colours = [to_hex(patch.get_facecolor()).upper() for patch in axes.patches]
    green, yellow, red = (FILLS[verdict] for verdict in Verdict)
    white = "#F2F2F2"
    assert colours == [
        white, green, red, red, red,
        white, green, green, green, yellow,
        white, green, green, red, red,
    ]  # fmt: skip
    said = [text.get_text() for text in axes.texts if text.get_text()]
    assert said[-1] == " limit below the model's 6.29 GiB →"
    assert said[6:12] == ["killed", "in read", "5.00 s", "5.20 s", "6.00 s", "9.00 s"]
    assert said[12:15] == ["1.2x reread", "41.0 s", "thrashes\n5.5x reread"]


def test_the_curve_ends_where_a_strategy_is_killed() -> None:
    (axes,) = draw_times(a_sweep()).axes
    drawn: list[Any] = list(axes.lines)
    lines = {line.get_label(): line for line in drawn}
    assert list(lines["mmap_assign"].get_ydata()) == pytest.approx([5, 5.2, 6, 9, 41])
    assert list(lines["streaming"].get_xdata()) == [0, 1, 2]
    crosses = [line.get_xdata()[0] for line in drawn if line.get_marker() == "x"]
    assert crosses == [2, 3]
    assert [line.get_marker() for line in axes.lines].count("^") == 1
