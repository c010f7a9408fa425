"""Convert results to pandas tables with one row per cell, or one row per series of repeats.

Bytes are integers, times are unrounded seconds, and a figure that was not measured is NA.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path, PurePath
from typing import Any, Final

import pandas as pd

from weighin.cell import Cell
from weighin.record import IMPORT_TRANSFORMERS, NOT_DROPPED, Outcome, Result
from weighin.records import after_load
from weighin.records.rank_growth import sum_of_peaks
from weighin.records.repeats import latest, middle, outcome_of
from weighin.units import format_exact

# Properties that together with the strategy identify a series, in the order of columns.
DIMENSIONS: Final = (
    "operation", "model", "device", "ram_limit_bytes", "vram_limit_bytes",
    "ranks", "use", "format", "dtype", "cache", "isolation", "options",
)  # fmt: skip
BYTES: Final = (
    "peak_rss_bytes", "above_import_bytes", "anon_sampled_bytes", "file_sampled_bytes",
    "peak_cgroup_bytes", "peak_cuda_requested_bytes", "peak_cuda_allocated_bytes",
    "peak_cuda_reserved_bytes", "cuda_driver_sampled_bytes", "peak_pinned_bytes",
    "baseline_rss_bytes", "model_bytes",
    "written_bytes", "written_disk_bytes", "written_files", "unreclaimable_sampled_bytes",
    "pss_bytes", "sum_of_peaks_bytes", "needed_bytes", "shmem_sampled_bytes", "exit_code",
    "use_peak_rss_bytes", "use_peak_cgroup_bytes", "use_anon_bytes", "use_anon_sampled_bytes",
    "use_child_bytes",
)  # fmt: skip
_TIMES: Final = ("import_s", "import_transformers_s", "load_s", "ready_s", "use_s")
_MULTIPLES: Final = ("above_import_per_model", "use_most_per_model", "use_anon_per_model")
NUMBERS: Final = (*_TIMES, *_MULTIPLES)
FIGURES: Final = (*_TIMES, *BYTES, *_MULTIPLES)
_LARGEST: Final = float(2**63)  # no counter of the kernel reaches this value
_LIMITS: Final = ("ram_limit_bytes", "vram_limit_bytes")
_TEXTS: Final = (
    "group", "strategy", *DIMENSIONS, "outcome", "last_phase", "message", "needed_is_sampled",
)  # fmt: skip


def cells(results: Iterable[Result]) -> pd.DataFrame:
    """Return one row per cell, in the order of the records.

    If a cell has several records, the last record is used. ``above_import_bytes`` is the exact peak
    RSS minus the RSS after ``import torch`` (for a save: minus the RSS with the model in memory).
    ``above_import_per_model`` is ``above_import_bytes`` divided by the model's size.
    """
    columns = [*_TEXTS, "repeat", *FIGURES]
    # As objects: pandas would convert integers beside None to floats, which cannot hold 2**53 + 1.
    frame = pd.DataFrame(list(map(_row, latest(results))), columns=columns, dtype=object)
    types = dict.fromkeys((*BYTES, *_LIMITS), "Int64") | dict.fromkeys(NUMBERS, "Float64")
    types |= {"repeat": "Int64"} | {name: "object" for name in _TEXTS if name not in _LIMITS}
    return frame.astype(types)


def series(results: Iterable[Result]) -> pd.DataFrame:
    """Return one row per series: the median of each figure over its repeats, and the range.

    The range of a figure ``x`` is in ``x_min`` and ``x_max``. If only some repeats are ok, the
    figures cover only these repeats, and ``outcome`` counts all repeats: "ok 2, timeout 1".
    """
    groups: dict[str, list[Result]] = {}
    for result in latest(results):
        groups.setdefault(result.cell.series, []).append(result)
    rows = [_summary(group) for group in groups.values()]
    ranges = [f"{name}{end}" for name in FIGURES for end in ("", "_min", "_max")]
    # As objects: pandas would convert limits beside None to floats, of which some are no integers.
    frame = pd.DataFrame(rows, columns=[*_TEXTS, "repeats", "ok", *ranges], dtype=object)
    return frame.astype(
        dict.fromkeys(_TEXTS, "object")
        | dict.fromkeys(("repeats", "ok"), "int64")
        | dict.fromkeys(_LIMITS, "Int64")
        | dict.fromkeys(ranges, "Float64")
    )


def samples(run: Path, result: Result) -> pd.DataFrame | None:
    """Return a cell's samples, or None if no sample can be read.

    Columns are the fields of ``record.Sample``. An incomplete last line and rows with impossible
    values are left out.
    """
    return _samples(run, result.samples_path)


def rank_samples(run: Path, result: Result) -> list[pd.DataFrame]:
    """Return the samples of each rank of a cell; empty if those of a rank cannot be read."""
    tables = [_samples(run, rank.samples_path) for rank in result.ranks]
    known_tables = [table for table in tables if table is not None]
    return known_tables if len(known_tables) == len(tables) else []


def _samples(run: Path, path: str | None) -> pd.DataFrame | None:
    if path is None or not _is_inside(PurePath(path)):
        return None
    try:
        text = (run / path).read_text(encoding="utf-8")
        frame = pd.read_csv(StringIO(text[: text.rfind("\n") + 1]))
    except (OSError, ValueError):  # ValueError: not UTF-8, empty, or no table
        return None
    needed = ["t_ns", "rss_bytes", "anon_bytes", "file_bytes", "shmem_bytes"]
    if not set(needed) <= set(frame.columns):
        return None
    frame = possible(frame).dropna(subset=needed)
    return None if frame.empty else frame.sort_values("t_ns", ignore_index=True)


def possible(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose counters have possible values; missing values are allowed."""
    numbers = frame.apply(pd.to_numeric, errors="coerce")
    kept: pd.DataFrame = numbers[
        (numbers.isna() | (numbers.ge(0) & numbers.lt(_LARGEST))).all(axis=1)
    ]
    return kept


def varying(frame: pd.DataFrame) -> list[str]:
    """Return the dimensions in which the rows of ``frame`` differ.

    The format is left out if each strategy has only one format.
    """
    per_strategy = frame.groupby("strategy")
    return [
        name
        for name in DIMENSIONS
        if frame[name].nunique(dropna=False) > 1
        and (name != "format" or (per_strategy[name].nunique(dropna=False) > 1).any())
    ]


def known(value: Any) -> Any:
    """Return a value of a frame as a Python value: None for NA."""
    return None if pd.isna(value) else value


def is_below_import(frame: pd.DataFrame) -> bool:
    """Return whether every model of these loads is smaller than the memory of ``import torch``.

    Memory above the import, divided by the size of such a model, does not count copies of the model.
    """
    loads = frame[(frame["operation"] == "load") & frame["baseline_rss_bytes"].notna()]
    return len(loads) > 0 and bool((loads["model_bytes"] < loads["baseline_rss_bytes"]).all())


def _is_inside(path: PurePath) -> bool:
    """Return whether a record's path stays in the run's folder; a foreign record is not trusted."""
    return not path.is_absolute() and ".." not in path.parts


def _row(result: Result) -> dict[str, Any]:
    cell, peaks, written = result.cell, result.peaks, result.written
    baseline = result.baseline.rss_bytes if result.baseline else None
    above = None if baseline is None or peaks.rss_bytes is None else peaks.rss_bytes - baseline
    ratio = above / result.model_bytes if above is not None and result.model_bytes else None
    return {
        "group": cell.series,
        "strategy": cell.strategy,
        "operation": cell.operation,
        "model": cell.model.title,
        "device": cell.device,
        "ram_limit_bytes": cell.ram_limit_bytes,
        "vram_limit_bytes": cell.vram_limit_bytes,
        "ranks": str(cell.ranks) if cell.ranks > 1 else None,
        "use": cell.after_load if cell.operation == "load" else None,
        "format": cell.format,
        "dtype": cell.dtype,
        "cache": result.cache,
        "isolation": cell.isolation,
        "options": ", ".join(_options(cell)),
        "outcome": result.outcome.value,
        "last_phase": result.last_phase,
        "message": result.message,
        "repeat": cell.repeat,
        "import_s": _seconds(result.cost.import_ns if result.cost else None),
        "import_transformers_s": _seconds(_duration_ns(result, IMPORT_TRANSFORMERS)),
        "load_s": _seconds(result.load_ns),
        "ready_s": _seconds(result.ready_ns),
        "peak_rss_bytes": peaks.rss_bytes,
        "above_import_bytes": above,
        "above_import_per_model": ratio,
        "anon_sampled_bytes": peaks.anon_sampled_bytes,
        "unreclaimable_sampled_bytes": peaks.unreclaimable_sampled_bytes,
        "file_sampled_bytes": peaks.file_sampled_bytes,
        "peak_cgroup_bytes": peaks.cgroup_bytes,
        "pss_bytes": peaks.pss_bytes,
        "sum_of_peaks_bytes": sum_of_peaks(result),
        "peak_cuda_requested_bytes": peaks.cuda_requested_bytes,
        "peak_cuda_allocated_bytes": peaks.cuda_allocated_bytes,
        "peak_cuda_reserved_bytes": peaks.cuda_reserved_bytes,
        "cuda_driver_sampled_bytes": peaks.cuda_driver_sampled_bytes,
        "peak_pinned_bytes": peaks.pinned_bytes,
        "baseline_rss_bytes": baseline,
        "model_bytes": result.model_bytes,
        "written_bytes": written.file_bytes if written else None,
        "written_disk_bytes": written.disk_bytes if written else None,
        "written_files": written.files if written else None,
        "needed_bytes": result.ran.needed_bytes if result.ran else None,
        "needed_is_sampled": result.ran is not None and result.ran.needed_is_sampled,
        "shmem_sampled_bytes": peaks.shmem_sampled_bytes,
        "exit_code": result.exit_code,
        "use_s": _seconds(after_load.used_ns(result)),
        "use_peak_rss_bytes": after_load.peak_rss_bytes(result),
        "use_peak_cgroup_bytes": after_load.peak_cgroup_bytes(result),
        "use_anon_bytes": after_load.anon_bytes(result),
        "use_anon_sampled_bytes": after_load.most_anon_bytes(result),
        "use_child_bytes": after_load.child_private_bytes(result),
        "use_most_per_model": after_load.per_model(result, after_load.most_anon_bytes(result)),
        "use_anon_per_model": after_load.per_model(result, after_load.anon_bytes(result)),
    }


def _seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e9


def _duration_ns(result: Result, name: str) -> int | None:
    """Return the time of the first phase of this name; None if there is no such phase."""
    phases = (phase.end_ns - phase.start_ns for phase in result.phases if phase.name == name)
    return next(phases, None)


def _summary(group: Sequence[Result]) -> dict[str, Any]:
    rows = [_row(result) for result in group]
    good = [row for row in rows if row["outcome"] == Outcome.OK]
    bad = [row for row in rows if row["outcome"] != Outcome.OK]
    ended = (bad or rows)[0]
    first = next((row for row in rows if row["cache"] == NOT_DROPPED), rows[0])
    row = first | {name: ended[name] for name in ("last_phase", "message")}
    row |= {"outcome": outcome_of(each.outcome for each in group), "repeats": len(rows)}
    row |= {"ok": len(good)}
    for name in FIGURES:
        values = [value for each in good or rows if (value := each[name]) is not None]
        row |= {
            name: middle(values),
            f"{name}_min": min(values, default=None),
            f"{name}_max": max(values, default=None),
        }
    return row


def _options(cell: Cell) -> Iterator[str]:
    """Yield settings that are no dimension: soft limit, strategy options, environment variables."""
    if cell.ram_high_bytes is not None:
        yield f"ram_high={format_exact(cell.ram_high_bytes)}"
    yield from (f"{key}={_short(value)}" for key, value in sorted(cell.options.items()))
    yield from cell.settings


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
