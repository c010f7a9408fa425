"""Compare the measurements of a run with predictions of the same loads.

    .venv/bin/python benchmarks/predicted_runs.py results/RUN... [--json predicted.json]

The script executes the code that a run names: its strategies, builders and uses.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console

from weighin.cell import Cell
from weighin.errors import HarnessError, RecordError
from weighin.plan import loads
from weighin.plan.task import Planned
from weighin.predict.client import predict
from weighin.predict.prediction import Prediction
from weighin.probes import environment
from weighin.records import run_folder
from weighin.records.metrics import grouped, middle, use_needed_bytes
from weighin.result import Outcome, Result
from weighin.settings.definition import Settings, read_plan
from weighin.show.table import Column, Table
from weighin.suite import registry
from weighin.units import MIB

_PEAKS: Final = {
    "host_anon_peak_bytes": "anonymous",
    "host_anon_least_bytes": "anonymous, low",
    "host_anon_most_bytes": "anonymous, high",
    "host_file_peak_bytes": "mapped files",
    "cuda_requested_bytes": "CUDA requested",
    "cuda_allocated_bytes": "CUDA allocated",
    "cuda_reserved_bytes": "CUDA reserved",
    "use_anon_peak_bytes": "anonymous in use",
    "use_anon_least_bytes": "anonymous in use, low",
    "use_anon_most_bytes": "anonymous in use, high",
}
_FIGURES = {
    "host_anon_peak_bytes": "anon_sampled_bytes",
    "host_file_peak_bytes": "file_sampled_bytes",
    "cuda_requested_bytes": "cuda_requested_bytes",
    "cuda_allocated_bytes": "cuda_allocated_bytes",
    "cuda_reserved_bytes": "cuda_reserved_bytes",
}
_ANONYMOUS = ("host_anon_peak_bytes", "host_anon_least_bytes", "host_anon_most_bytes")
_OF_CELL: Final = ("format", "dtype", "device", "ram_limit_bytes", "options", "use")
_USED = "use_"
"""The prefix that replaces "host_" in the names of peaks during a use (after the load)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    checked = [one for run in options.runs for one in check(run)]
    if options.json:
        options.json.write_text(json.dumps({"schema": 1} | as_json(checked), indent=1) + "\n")
    summary = summarised(checked)
    Console().print(check_table(checked), summary_line(summary) if summary else "")


@dataclass(frozen=True, slots=True)
class Checked:
    """One series of a run (the repeats of a measurement), with its prediction.

    Attributes:
        figures: tuples of (name, predicted bytes, measured bytes). Three anonymous peaks are
            predicted for the load and three for the use; of each three, only the one nearest to the
            measured peak is included.
        unreclaimable_bytes: the largest measured sum of anonymous and shared memory, for which a
            RAM limit must have room; None if the series has no such measurement.
    """

    prediction: Prediction
    figures: tuple[tuple[str, int, int], ...]
    unreclaimable_bytes: int | None = None

    @property
    def anonymous_error(self) -> float | None:
        """The absolute error of the predicted anonymous peak, as a share of the measured peak.

        If the cell has a use, the result is the larger error of the load and the use.
        """
        errors = (
            abs(predicted - measured) / measured
            for name, predicted, measured in self.figures
            if "_anon_" in name and measured
        )
        return max(errors, default=None)

    @property
    def is_killed(self) -> bool:
        """Whether the predicted floor (sufficient RAM limit) is too small for the measured memory."""
        floor, needed = self.prediction.floor_bytes, self.unreclaimable_bytes
        return floor is not None and needed is not None and needed > floor


@dataclass(frozen=True, slots=True)
class Summary:
    """The errors of all series together.

    Attributes:
        series: the number of series with a predicted and a measured anonymous peak.
        median_error, largest_error: the median and the largest ``Checked.anonymous_error``.
        killed: the number of series that needed more memory than the predicted floor (RAM limit).
    """

    series: int
    median_error: float
    largest_error: float
    killed: int


def summarised(checked: Sequence[Checked]) -> Summary | None:
    """Return the summary of all series; None if no series has an ``anonymous_error``."""
    errors = [one.anonymous_error for one in checked]
    known = [error for error in errors if error is not None]
    if not known:
        return None
    return Summary(len(known), median(known), max(known), sum(one.is_killed for one in checked))


def check(run: Path, records: run_folder.Records | None = None) -> list[Checked]:
    """Predict each series of a run, and return the predictions with the medians of its ok loads.

    A series (the repeats of a measurement) without an ok load is left out. ``records`` are those of
    the run, if they have been read.
    """
    results = (records or run_folder.read(run)).results
    good = [one for one in results if one.outcome is Outcome.OK and one.cell.operation == "load"]
    series = grouped(good, lambda one: one.cell.series)
    if not series:
        raise RecordError(
            f"{run} has no load whose outcome is ok", "predict the model: weighin predict MODEL"
        )
    settings = _settings(run)
    cells = [results[0].cell for results in series.values()]
    paths = settings.strategy_paths
    by_checkpoint: dict[Path | None, list[Planned]] = {}
    for cell in cells:
        name = cell.strategy
        info = (
            registry.read_strategy(Path(paths[name])) if name in paths else registry.strategy(name)
        )
        planned = loads.plan_cell(cell, info)
        by_checkpoint.setdefault(settings.checkpoint_of(cell.model), []).append(planned)
    predictions = {
        prediction.cell.series: prediction
        for checkpoint, of_one in by_checkpoint.items()
        for prediction in predict(
            of_one,
            checkpoint=checkpoint,
            selection=settings.selection,
            python_path=settings.python_path,
            use_paths=settings.use_paths,
        )
    }
    return [
        Checked(
            predictions[name], tuple(_figures(predictions[name], results)), _unreclaimable(results)
        )
        for name, results in series.items()
    ]


def as_json(checked: Sequence[Checked]) -> dict[str, Any]:
    summary = summarised(checked)
    return {
        "summary": asdict(summary) if summary else None,
        "predicted_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment.code(),
        "checked": [
            {"strategy": one.prediction.strategy, "model": one.prediction.cell.model.title}
            | {key: getattr(one.prediction.cell, key) for key in _OF_CELL}
            | {
                "cannot": one.prediction.cannot,
                "floor_bytes": one.prediction.floor_bytes,
                "figures": {
                    name: {"predicted": predicted, "measured": measured}
                    for name, predicted, measured in one.figures
                },
            }
            for one in checked
        ],
    }


def _figures(prediction: Prediction, results: list[Result]) -> Iterator[tuple[str, int, int]]:
    for name, measured in _FIGURES.items():
        if prediction.cell.ranks > 1 and name == "host_file_peak_bytes":
            continue  # several ranks: the measured figure is the page cache of their cgroup
        size: int | None = middle(getattr(result.peaks, measured) for result in results)
        alternatives = _ANONYMOUS if name in _ANONYMOUS else (name,)
        predicted = {one: getattr(prediction, one) for one in alternatives}
        if size is not None and None not in predicted.values():
            yield _nearest(predicted, size)
    uses = [result.use for result in results if result.use]
    if prediction.use is None or not uses:
        return
    if (size := middle(use.anon_sampled_bytes for use in uses)) is not None:
        name, near, size = _nearest({one: getattr(prediction.use, one) for one in _ANONYMOUS}, size)
        yield name.replace("host_", _USED), near, size


def _nearest(predicted: dict[str, int], size: int) -> tuple[str, int, int]:
    """Return (name, bytes) of the prediction nearest to ``size``, and ``size`` (measured bytes)."""
    near = min(predicted, key=lambda one: abs(predicted[one] - size))
    return near, predicted[near], size


def _unreclaimable(results: list[Result]) -> int | None:
    sizes = [
        result.peaks.unreclaimable_sampled_bytes or result.peaks.anon_sampled_bytes
        for result in results
    ]
    sizes += [use_needed_bytes(result) for result in results if result.cell.use]
    return max((size for size in sizes if size is not None), default=None)


def _settings(run: Path) -> Settings:
    """Return the settings in a run's plan, without those of containers (a prediction uses none).

    If the run has no readable plan, as a published run, return the default settings.
    """
    try:
        found = run_folder.read_plan(run)
        settings = read_plan(found.settings, found.cells, run / run_folder.PLAN)
    except HarnessError:
        return Settings()
    return settings.model_copy(update={"mounts": ()})


def check_table(checked: Sequence[Checked]) -> Table:
    """Return a table with a row for each peak that was both measured and predicted.

    The title has the properties that all cells share.
    """
    names = [_parts(series.prediction.cell) for series in checked]
    common = [len({*parts}) == 1 for parts in zip(*names, strict=True)]
    title = " · ".join(part for part, same in zip(names[0], common, strict=True) if same and part)
    rows: list[list[str]] = []
    for series, parts in zip(checked, names, strict=True):
        name = " ".join(part for part, same in zip(parts, common, strict=True) if part and not same)
        if series.prediction.cannot:
            rows.append([f"{name}: {series.prediction.cannot}", *[""] * 5])
        for figure, predicted, measured in series.figures:
            more = predicted - measured
            sizes = f"{predicted / MIB:,.1f}", f"{measured / MIB:,.1f}", f"{more / MIB:+,.1f}"
            share = f"{more / measured:+.2%}" if measured else "-"
            rows.append([name, _PEAKS[figure], *sizes, share])
            name = ""
    heads = [Column("cell", is_name=True), Column("peak", is_name=True)]
    numbers = [Column(one, "MiB") for one in ("predicted", "measured", "difference")]
    return Table(title, [*heads, *numbers, Column("", "%")], rows)


def summary_line(summary: Summary) -> str:
    share = summary.killed / summary.series
    return (
        f"{summary.series:,} series. Anonymous peak: median error {summary.median_error:.2%}, largest"
        f" {summary.largest_error:.2%}. A RAM limit of the predicted floor would have killed"
        f" {summary.killed} ({share:.1%})."
    )


def _parts(cell: Cell) -> tuple[str, ...]:
    words = [f"{key}={value}" for key, value in sorted(cell.options.items())]
    words += [f"ranks={cell.ranks}"] if cell.ranks > 1 else []
    options = " ".join([*words, *([f"use={cell.use}"] if cell.use else [])])
    fmt = cell.format if cell.format != cell.strategy else ""
    return cell.model.title, cell.strategy, options, fmt, cell.dtype, f"device {cell.device}"


if __name__ == "__main__":
    main()
