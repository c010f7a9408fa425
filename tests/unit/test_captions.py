"""Each table says of which commit its figures are, and of which days."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from factories import ENVIRONMENT, make_cell, make_result, make_skipped
from sweeps import a_sweep, swept
from test_floors_report import a_search
from test_notebook import foretold, gpu_cell

from pages import notebook
from pages.run_tables import markdown_agreement, markdown_relative
from weighin.records import run_folder
from weighin.report import captions, floors, passes, rows, survival
from weighin.report.findings import markdown
from weighin.report.tables import markdown_table
from weighin.result import Outcome, Result
from weighin.units import GIB, MIB

PUBLISHED = sorted((Path(__file__).parents[2] / "results" / "published").glob("*/records.jsonl"))
FIRST = "d71778a29df10d4156e90df353546738e2f4fe82"
SECOND = "f3e40feab4d3f8a62a1f5a3f3a8f2a5e0c4b1d2e"


def of_commit(result: Result, commit: str | None, day: str, **environment: object) -> Result:
    known = ENVIRONMENT | {"git_commit": commit} | environment
    return replace(result, environment=known, started_at=f"{day}T03:04:05+00:00" if day else "")


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (
            [of_commit(make_result(), FIRST, "2026-11-23")],
            "measured 2026-11-23 with weighin commit d71778a29d",
        ),
        (
            [of_commit(make_result(), FIRST, day) for day in ("2026-11-23", "2026-11-21")],
            "measured 2026-11-21 to 2026-11-23 with weighin commit d71778a29d",
        ),
        (
            [of_commit(make_result(), commit, "2026-11-23") for commit in (FIRST, SECOND)],
            "measured 2026-11-23 with weighin commits d71778a29d, f3e40feab4",
        ),
        (
            [of_commit(make_result(), FIRST, "2026-11-23", git_dirty=True)],
            "measured 2026-11-23 with weighin commit d71778a29d with changes",
        ),
        ([make_result()], "measured 2025-01-02 with weighin commit unknown"),
        (
            [of_commit(make_result(), FIRST, "")],
            "measured on an unknown day with weighin commit d71778a29d",
        ),
        (
            [of_commit(make_result(), FIRST, "2026-11-23"), make_skipped()],
            "measured 2026-11-23 with weighin commit d71778a29d",
        ),
        ([make_skipped()], "measured on an unknown day with weighin commit unknown"),
    ],
)
def test_what_was_measured_is_said_by_commit_and_days(results: list[Result], said: str) -> None:
    assert captions.code(results) == said
    assert markdown_table(results).endswith(f" · {said}")


@pytest.mark.parametrize(
    "tell",
    [
        markdown_table,
        markdown_relative,
        lambda results: markdown(survival.found(results), reasons=False),
        lambda results: markdown(floors.found(results), reasons=False),
        lambda results: markdown_agreement({"a": results, "b": results}),
    ],
)
@pytest.mark.parametrize("make", [a_sweep, a_search])
def test_every_table_says_commit_and_day(
    tell: Callable[[list[Result]], str], make: Callable[[], list[Result]]
) -> None:
    results = [of_commit(one, FIRST, "2026-11-23") for one in make()]
    assert " · measured 2026-11-23 with weighin commit d71778a29d" in tell(results)


def test_the_table_of_passes_says_them() -> None:
    results = [of_commit(swept("mmap_assign", None, (9, 0), passes=2), FIRST, "2026-11-23")]
    assert markdown(passes.found(results)).endswith(
        " · measured 2026-11-23 with weighin commit d71778a29d"
    )


def test_the_notebooks_table_says_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "predict", foretold)
    results = [of_commit(gpu_cell("baseline", 12.832), FIRST, "2026-11-23")]
    assert notebook.markdown_notebook(results).endswith(
        " · measured 2026-11-23 with weighin commit d71778a29d"
    )


@pytest.mark.parametrize("records", PUBLISHED, ids=lambda path: path.parent.name)
def test_the_commit_of_every_published_table_is_known(records: Path) -> None:
    results: Sequence[Result] = run_folder.read(records.parent).results
    assert "unknown" not in captions.code(results)


@pytest.mark.parametrize(
    ("limit_bytes", "says"), [(100 * MIB, True), (64 * GIB, False), (None, False)]
)
def test_a_peak_rss_above_the_limit_is_explained(limit_bytes: int | None, says: bool) -> None:
    measured = make_result(outcome=Outcome.OK)
    peaks = replace(measured.peaks, rss_bytes=101 * MIB)
    result = replace(measured, cell=make_cell(ram_limit_bytes=limit_bytes), peaks=peaks)
    notes = captions.note_figures(rows.series([result]))
    assert any("above the RAM limit" in note for note in notes) == says
