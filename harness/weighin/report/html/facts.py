"""List, for report.html, the machine and software of a run, and the meaning of each figure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from weighin.records.machine import settings_of
from weighin.report import operations
from weighin.report.figures import COLUMNS
from weighin.report.rows import Row
from weighin.report.tables import figures_of
from weighin.result import Result


def environment(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """Return each recorded key of the machine and software with its value.

    A key whose value differs between measurements has all of its values, each with the number of
    measurements that had this value.
    """
    counts_of: dict[str, Counter[str]] = {}
    for result in results:
        for key, value in settings_of([result.environment]).items():
            counts_of.setdefault(key, Counter())[_text(value)] += 1
    return [(key, _counted(counts)) for key, counts in counts_of.items()]


def figures(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Return the name, unit, meaning and accuracy of each figure in the report."""
    if not rows:
        return []
    explained: dict[tuple[str, str, str, str], None] = {}
    columns, files = figures_of(rows), COLUMNS["file_sampled_bytes"]
    for kind in operations.of(rows):
        for column in columns:
            if column.key in kind.figures:
                heading = kind.headings.get(column.key, column.heading)
                meaning = kind.meanings.get(column.key, column.meaning)
                explained[heading, column.unit, meaning, column.accuracy] = None
        if files.key not in kind.figures:  # tables lack the column, but the bars show the figure
            explained["file-backed", files.unit, files.meaning, files.accuracy] = None
        explained["outcome", "", kind.outcome, "exact"] = None
    return list(explained)


def when(results: Sequence[Result]) -> str:
    """Return the times at which the first and the last measurement of a run started."""
    starts = sorted(result.started_at[:16].replace("T", " ") for result in results if result.started_at)  # fmt: skip
    if not starts:
        return ""
    first, last = starts[0], starts[-1]
    zone = " UTC" if all(r.started_at.endswith("+00:00") for r in results if r.started_at) else ""
    return (first if first == last else f"{first} to {last}") + zone


def _text(value: object) -> str:
    if value is None or value == "":
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _counted(counts: Mapping[str, int]) -> list[str]:
    if len(counts) == 1:
        return list(counts)
    return [f"{value} ({number} {'cell' if number == 1 else 'cells'})" for value, number in counts.items()]  # fmt: skip
