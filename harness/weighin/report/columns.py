"""Define the number columns of a run's tables: their figures, headings, units and formats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from weighin.report import captions, operations
from weighin.report.markdown import plain
from weighin.report.operations import ABOVE_IMPORT
from weighin.report.rows import Row, has, is_below_import
from weighin.units import GIB


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers: ``key`` is the rows' column, ``scale`` divides its values.

    ``at_least`` names the column that tells whether a figure is only a lower bound.
    """

    key: str
    heading: str
    unit: str
    scale: int = 1
    digits: int = 2
    at_least: str = ""


_COLUMNS: Final = {
    column.key: column
    for column in (
        Column("import_s", "import", "s"),
        Column("import_transformers_s", "import transformers", "s"),
        Column("load_s", "load", "s"),
        Column("ready_s", "ready", "s"),
        Column("ready_and_pass_s", "ready + first pass", "s"),
        Column("needed_bytes", "needs", "GiB", GIB, 3, "needed_is_sampled"),
        Column("peak_rss_bytes", "peak RSS", "GiB", GIB, 3),
        Column(ABOVE_IMPORT, "above import", "x model"),
        Column("anon_sampled_bytes", "anonymous (sampled)", "GiB", GIB, 3),
        Column("shmem_sampled_bytes", "shared (sampled)", "GiB", GIB, 3),
        Column("file_sampled_bytes", "page cache (sampled)", "GiB", GIB, 3),
        Column("unreclaimable_sampled_bytes", "unreclaimable (sampled)", "GiB", GIB, 3),
        Column("peak_cgroup_bytes", "cgroup peak", "GiB", GIB, 3),
        Column("pss_bytes", "PSS of all ranks", "GiB", GIB, 3),
        Column("sum_of_peaks_bytes", "sum of peaks (misleading)", "GiB", GIB, 3),
        Column("peak_cuda_requested_bytes", "CUDA requested", "GiB", GIB, 3),
        Column("peak_cuda_allocated_bytes", "CUDA allocated", "GiB", GIB, 3),
        Column("peak_cuda_reserved_bytes", "CUDA reserved", "GiB", GIB, 3),
        Column("cuda_driver_sampled_bytes", "CUDA driver (sampled)", "GiB", GIB, 3),
        Column("peak_pinned_bytes", "pinned", "GiB", GIB, 3),
        Column("use_s", "use", "s"),
        Column("use_peak_rss_bytes", "peak RSS of use", "GiB", GIB, 3),
        Column("use_peak_cgroup_bytes", "cgroup peak of use", "GiB", GIB, 3),
        Column("use_most_per_model", "most in use", "x model"),
        Column("use_anon_per_model", "after use", "x model"),
        Column("use_child_bytes", "forked process", "GiB", GIB, 3),
        Column("written_bytes", "written", "GiB", GIB, 3),
        Column("written_files", "files", "", 1, 0),
        Column("exit_code", "exit code", "", 1, 0),
    )
}
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
        replace(_COLUMNS[key], heading=headings.get(key, _COLUMNS[key].heading))
        for key in keys
        if (not any(key in kind.measured for kind in kinds) or has(rows, key))
        and (key not in operations.OF_USES or captions.has_uses(rows))
        and (key != ABOVE_IMPORT or not is_below_import(rows))
    ]


def name_text(name: str, row: Row) -> str:
    """Return the value of a series in one dimension as text."""
    value = row[name]
    return captions.size(value) if name.endswith("_limit_bytes") else plain(str(value or "-"))


def figure_text(row: Row, figure: Column) -> str:
    """Return a figure of a series as text without its unit, with "≥" if the series needs at least this."""
    text = number_text(row[figure.key], figure)
    return f"≥ {text}" if figure.at_least and text != "-" and row[figure.at_least] else text


def number_text(value: float | None, figure: Column) -> str:
    """Return a figure as text without its unit; "-" if it is missing."""
    return "-" if value is None else f"{value / figure.scale:.{figure.digits}f}"


def range_text(row: Row, figure: Column) -> str:
    """Return the range of the repeats' values as text; empty if both ends have the same text."""
    low, high = (number_text(row[f"{figure.key}{end}"], figure) for end in ("_min", "_max"))
    return "" if low == high else f"{low}..{high}"
