"""A run that is not complete: it passes no gate, unless only its measured part is to be judged."""

from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_cell, make_result

from weighin.errors import HarnessError
from weighin.gate.baseline import Baseline, default_rules
from weighin.gate.budgets import parse
from weighin.gate.check import MeasuredRuns, check, narrowed, read_runs, update
from weighin.gate.lines import LineVerdict
from weighin.records import run_folder
from weighin.records.series import Series, name_of

MEASURED, PENDING = make_cell("streaming"), make_cell("baseline")
BUDGET = "streaming: peak_rss <= 10 x model"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_folder.write_plan(tmp_path / "run", [MEASURED, PENDING])
    run_folder.append(tmp_path / "run", make_result(MEASURED))
    return tmp_path / "run"


@pytest.fixture
def measured(run: Path) -> MeasuredRuns:
    return read_runs([run])


def test_a_run_that_is_not_complete_fails_and_says_what_measures_the_rest(
    run: Path, measured: MeasuredRuns
) -> None:
    [line] = check(measured, None, extra_budgets=[BUDGET]).failed
    assert (line.verdict, line.series, line.what) == (LineVerdict.MISSING, "run", "cells")
    assert line.text == (
        f"{run}: 1 of 2 cells measured; weighin bench --resume {run} measures the rest,"
        " --partial judges only this part"
    )


def test_a_part_is_judged_if_it_is_asked_for_and_a_note_says_so(
    run: Path, measured: MeasuredRuns
) -> None:
    budgets = [BUDGET, "baseline: peak_rss <= 1 x model"]  # of which one has no measured cell
    judgement = check(measured, None, extra_budgets=budgets, partial=True)
    assert judgement.failed == ()
    assert judgement.notes == (f"{run}: 1 of 2 cells measured",)
    assert [line.what for line in judgement.lines if line.is_budget] == [BUDGET]


def test_a_part_becomes_no_baseline_unless_it_is_asked_for(
    tmp_path: Path, measured: MeasuredRuns
) -> None:
    path = tmp_path / "baseline.yaml"
    with pytest.raises(HarnessError, match="cannot make a baseline from an incomplete run"):
        update(measured, path, accept=lambda _: True)
    assert not path.exists()
    assert update(measured, path, partial=True, accept=lambda _: True)


def test_what_concerns_only_cells_that_are_pending_is_left_out(measured: MeasuredRuns) -> None:
    ok = Series("ok", 1)
    other = "gpt2-xl gone pt"  # which the run does not plan
    known = dict.fromkeys((name_of(MEASURED), name_of(PENDING), other), ok)
    texts = ("peak_rss <= 1g", "base*: peak_rss <= 1g", "gone: peak_rss <= 1g")
    rules = replace(default_rules(), budgets=tuple(map(parse, texts)))
    baseline, judged = narrowed(Baseline(rules, {}, known), rules, measured)
    assert baseline and list(baseline.series) == [name_of(MEASURED), other]
    assert [budget.pattern for budget in judged.budgets] == ["*", "gone"]
    assert narrowed(None, rules, replace(measured, incomplete={})) == (None, rules)


def test_the_measured_part_of_a_run_that_is_not_complete_is_judged_too(
    measured: MeasuredRuns,
) -> None:
    budgets = [BUDGET, "baseline: peak_rss <= model", "gone: peak_rss <= 1B"]
    whole = check(measured, None, extra_budgets=budgets, expected=["lost=timeout"])
    assert [line.what for line in whole.lines] == ["cells", *budgets[1:], BUDGET]
    part = check(measured, None, extra_budgets=budgets, expected=["lost=timeout"], partial=True)
    assert [line.what for line in part.lines] == [budgets[2], BUDGET]
    assert part.notes[1:] == tuple(note for note in part.notes if "1 of 2 cells measured" in note)
    assert "lost=timeout" in part.notes[0]


def test_of_several_runs_that_are_not_complete_each_is_named(run: Path, tmp_path: Path) -> None:
    run_folder.write_plan(tmp_path / "other", [MEASURED, PENDING])
    run_folder.append(tmp_path / "other", make_result(MEASURED))
    measured = read_runs([run, tmp_path / "other"])
    failed = check(measured, None, extra_budgets=[BUDGET]).failed
    assert [line.text.partition(":")[0] for line in failed] == [str(run), f"{tmp_path}/other"]
