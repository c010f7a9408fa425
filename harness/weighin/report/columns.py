"""Choose the number columns of a run's tables, and write their fields as text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from weighin.report import captions, operations
from weighin.report.figures import COLUMNS, Column
from weighin.report.markdown import plain
from weighin.report.operations import ABOVE_IMPORT
from weighin.report.rows import Row, has, is_below_import

LEFT_OUT_FIRST: Final[tuple[str, ...]] = (
    "import", "cgroup peak of use", "forked process", "import transformers", "cgroup peak", "sum of peaks (misleading)", "files", "pinned",
    "CUDA requested", "CUDA driver (sampled)", "unreclaimable (sampled)", "written", "CUDA reserved",
    "above import", "above the model", "page cache (sampled)", "shared (sampled)", "exit code",
    "anonymous (sampled)", "peak RSS of use", "use",
)  # fmt: skip
"""Headings of the columns that a narrow terminal leaves out, the first of them first."""
HEADINGS: Final = {
    "ram_limit_bytes": "RAM limit",
    "vram_limit_bytes": "GPU limit",
    "disk_latency": "disk latency",
}


def figures_of(rows: Sequence[Row]) -> list[Column]:
    """Return the number columns for these series, with the headings of their operation."""
    kinds = operations.of(rows)
    keys = list(dict.fromkeys(key for kind in kinds for key in kind.figures))
    headings = kinds[0].headings if len(kinds) == 1 else {}
    return [
        replace(COLUMNS[key], heading=headings.get(key, COLUMNS[key].heading))
        for key in keys
        if (COLUMNS[key].is_usual or has(rows, key))
        and (key not in operations.OF_USES or captions.has_uses(rows))
        and (key != ABOVE_IMPORT or not is_below_import(rows))
    ]


def name_text(name: str, row: Row) -> str:
    """Return the value of a series in one dimension as text."""
    value = row[name]
    return captions.size(value) if name.endswith("_limit_bytes") else plain(str(value or "-"))


def figure_text(row: Row, figure: Column) -> str:
    """Return a figure of a series as text without its unit, with "≥" if the series needs at least this."""
    text = figure.text(row[figure.key])
    return f"≥ {text}" if figure.at_least and text != "-" and row[figure.at_least] else text


def range_text(row: Row, figure: Column) -> str:
    """Return the range of the repeats' values as text; empty if both ends have the same text."""
    low, high = (figure.text(row[f"{figure.key}{end}"]) for end in ("_min", "_max"))
    return "" if low == high else f"{low}..{high}"
