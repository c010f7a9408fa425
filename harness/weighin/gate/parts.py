"""Judge a run that is not complete: it fails, or with ``--partial`` only its measured cells count."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from weighin.gate.baseline import Baseline, Rules
from weighin.gate.lines import Line, LineVerdict
from weighin.records.coverage import Coverage
from weighin.records.series import Series, name_of


def lines(incomplete: Mapping[Path, Coverage]) -> Iterator[Line]:
    """Yield a failing line for each run that lacks records of planned cells."""
    for run, covered in incomplete.items():
        text = (
            f"{run}: {covered}; {covered.again} measures the rest, --partial judges only this part"
        )
        yield Line(LineVerdict.MISSING, "run", "cells", text)


def notes(incomplete: Mapping[Path, Coverage]) -> Iterator[str]:
    """Yield a note for each run that is judged in part."""
    yield from (f"{run}: {covered}" for run, covered in incomplete.items())


def narrowed(
    baseline: Baseline | None,
    rules: Rules,
    series: Mapping[str, Series],
    incomplete: Mapping[Path, Coverage],
) -> tuple[Baseline | None, Rules]:
    """Leave out what concerns only series that the runs plan and of which no cell was measured."""
    planned = {name_of(cell) for covered in incomplete.values() for cell in covered.pending}
    left = planned - series.keys()
    budgets = tuple(
        budget
        for budget in rules.budgets
        if any(map(budget.covers, series)) or not any(map(budget.covers, left))
    )
    if baseline:
        kept = {name: one for name, one in baseline.series.items() if name not in left}
        baseline = replace(baseline, series=kept)
    return baseline, replace(rules, budgets=budgets)
