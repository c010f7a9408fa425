"""Convert a run, its RAM floors, or the history of a metric to data for ``--json``.

Sizes are integers in bytes. None means that a figure was not measured.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weighin.records.explanation import answer
from weighin.records.floor import floors
from weighin.report import operations
from weighin.report.floors import as_dict
from weighin.report.history import History, HistoryPoint
from weighin.report.rows import OF_SERIES, series
from weighin.result import Result


def of_run(
    run: Path,
    results: Sequence[Result],
    files: Sequence[Path],
    warnings: Sequence[str] = (),
    missing: int | None = None,
) -> dict[str, Any]:
    """Return the rows of summary.csv as ``series``, with the warnings and the written files of a run.

    ``missing`` is the number of planned measurements without a record. If the run has one result, of
    a command, the key ``answer`` explains the command's end and memory in a list of sentences.
    """
    is_one_command = len(results) == 1 and bool(results[0].cell.command)
    rows = series(results)
    names = operations.concerning(rows, OF_SERIES)
    return {
        "run": str(run),
        "series": [{name: _plain(row[name]) for name in names} for row in rows],
        "missing_cells": missing,
        "warnings": list(warnings),
        "files": [str(path) for path in files],
        **({"answer": answer(run, results[0])} if is_one_command else {}),
    }


def of_floors(run: Path, results: Sequence[Result], files: Sequence[Path]) -> dict[str, Any]:
    """Return the smallest RAM limits that a search found, and the paths of the written files."""
    return {
        "run": str(run),
        "floors": [as_dict(floor) for floor in floors(results)],
        "files": [str(path) for path in files],
    }


def of_history(history: History, pictures: Sequence[Path]) -> dict[str, Any]:
    """Return a metric of each run, and the runs at which the metric or an outcome changed."""
    return {
        "metric": history.metric.name,
        "unit": history.metric.unit,
        "runs": [
            {
                "run": moment.name,
                "started_at": moment.started_at,
                "commit": moment.commit,
                "torch": moment.torch,
            }
            for moment in history.moments
        ],
        "series": [
            {
                "series": line.series,
                "points": [_point(point) for point in line.points],
                "steps": [
                    {
                        "run": line.points[step.index].moment.name,
                        "before": step.was,
                        "now": step.now,
                        "changed": [str(difference) for difference in step.moved],
                    }
                    for step in line.steps
                ],
                "outcome_changes": [
                    {"run": line.points[index].moment.name, "before": before, "now": now}
                    for index, before, now in line.turns
                ],
            }
            for line in history.lines
        ],
        "warnings": list(history.warnings),
        "files": [str(path) for path in pictures],
    }


def _plain(value: Any) -> Any:
    """Return a value for JSON: a float without a fraction as an integer, any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _point(point: HistoryPoint) -> dict[str, Any]:
    figure = asdict(point.figure) if point.figure else dict.fromkeys(("low", "median", "high"))
    return {"run": point.moment.name, "outcome": point.outcome} | figure
