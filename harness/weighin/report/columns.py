"""Define the number columns of a run's tables: their figures, headings, units and formats."""

from dataclasses import dataclass, replace
from typing import Any, Final

import pandas as pd

from weighin.report import captions
from weighin.report.dataframe import is_below_import, known
from weighin.report.markdown import plain
from weighin.units import GIB


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers: ``key`` is the frame's column, ``scale`` divides its values."""

    key: str
    heading: str
    unit: str
    scale: int = 1
    digits: int = 2


_ABOVE_IMPORT: Final = "above_import_per_model"
_FIGURES: Final = (
    Column("import_s", "import", "s"),
    Column("import_transformers_s", "import transformers", "s"),
    Column("load_s", "load", "s"),
    Column("ready_s", "ready", "s"),
    Column("peak_rss_bytes", "peak RSS", "GiB", GIB, 3),
    Column(_ABOVE_IMPORT, "above import", "x model"),
    Column("anon_sampled_bytes", "anonymous (sampled)", "GiB", GIB, 3),
    Column("unreclaimable_sampled_bytes", "unreclaimable (sampled)", "GiB", GIB, 3),
    Column("peak_cgroup_bytes", "cgroup peak", "GiB", GIB, 3),
    Column("pss_bytes", "PSS of all ranks", "GiB", GIB, 3),
    Column("sum_of_peaks_bytes", "sum of peaks (misleading)", "GiB", GIB, 3),
    Column("peak_cuda_requested_bytes", "CUDA requested", "GiB", GIB, 3),
    Column("peak_cuda_allocated_bytes", "CUDA allocated", "GiB", GIB, 3),
    Column("peak_cuda_reserved_bytes", "CUDA reserved", "GiB", GIB, 3),
    Column("cuda_driver_sampled_bytes", "CUDA driver (sampled)", "GiB", GIB, 3),
    Column("peak_pinned_bytes", "pinned", "GiB", GIB, 3),
    Column("written_bytes", "written", "GiB", GIB, 3),
    Column("written_files", "files", "", 1, 0),
)
# Times of imports, which end before a load begins.
BEFORE_LOAD: Final = ("import_s", "import_transformers_s")
LEFT_OUT_FIRST: Final[tuple[str, ...]] = (
    "import", "import transformers", "cgroup peak", "sum of peaks (misleading)", "files", "pinned",
    "CUDA requested", "CUDA driver (sampled)", "unreclaimable (sampled)", "written", "CUDA reserved",
    "above import", "above the model", "anonymous (sampled)",
)  # fmt: skip
"""Headings of the columns that a narrow terminal leaves out, the first of them first."""
# A column in this set is left out if no cell has the figure.
_WHERE_MEASURED: Final = frozenset(
    [
        "unreclaimable_sampled_bytes",
        *BEFORE_LOAD,
        "pss_bytes",
        "sum_of_peaks_bytes",
        *(figure.key for figure in _FIGURES[-7:]),
    ]
)
# Headings of figures that have another heading for saves.
_OF_SAVES: Final = {
    "load_s": "save",
    "ready_s": "on the disk",
    _ABOVE_IMPORT: "above the model",
}
HEADINGS: Final = {"ram_limit_bytes": "RAM limit", "vram_limit_bytes": "GPU limit"}


def figures_of(frame: pd.DataFrame) -> list[Column]:
    """Return the number columns for these series, with the headings for loads or for saves."""
    saves = captions.doing(frame) == "saving"
    headings = _OF_SAVES if saves else {}
    left_out = BEFORE_LOAD if saves else ()  # a save begins with the model in memory
    return [
        replace(figure, heading=headings.get(figure.key, figure.heading))
        for figure in _FIGURES
        if figure.key not in left_out
        and (figure.key not in _WHERE_MEASURED or frame[figure.key].notna().any())
        and (figure.key != _ABOVE_IMPORT or not is_below_import(frame))
    ]


def name_text(name: str, row: "pd.Series[Any]") -> str:
    """Return the value of a series in one dimension as text."""
    value = known(row[name])
    return captions.size(value) if name in HEADINGS else plain(str(value or "-"))


def number_text(value: Any, figure: Column) -> str:
    """Return a figure as text without its unit; "-" if it is missing."""
    value = known(value)
    return "-" if value is None else f"{value / figure.scale:.{figure.digits}f}"


def range_text(row: "pd.Series[Any]", figure: Column) -> str:
    """Return the range of the repeats' values as text; empty if both ends have the same text."""
    low, high = (number_text(row[f"{figure.key}{end}"], figure) for end in ("_min", "_max"))
    return "" if low == high else f"{low}..{high}"
