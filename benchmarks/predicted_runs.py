"""Compare the measurements of a run with predictions of the same loads.

    .venv/bin/python benchmarks/predicted_runs.py results/RUN... [--json predicted.json]

The script executes the code that a run names: its strategies, builders and uses.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console

from weighin.errors import HarnessError, RecordError
from weighin.plan import loads
from weighin.plan.task import Planned
from weighin.predict.client import predict
from weighin.predict.prediction import Prediction
from weighin.probes import environment
from weighin.records import run_folder
from weighin.records.metrics import grouped, middle, use_needed_bytes
from weighin.records.series import name_of
from weighin.result import Outcome, Result
from weighin.settings.definition import Settings, read_plan
from weighin.show.table import Table
from weighin.suite import registry
from weighin.units import MIB

_FIGURES = {
    "host_anon_peak_bytes": "anon_sampled_bytes",
    "host_file_peak_bytes": "file_sampled_bytes",
    "cuda_requested_bytes": "cuda_requested_bytes",
    "cuda_allocated_bytes": "cuda_allocated_bytes",
    "cuda_reserved_bytes": "cuda_reserved_bytes",
}
_ANONYMOUS = ("host_anon_peak_bytes", "host_anon_least_bytes", "host_anon_most_bytes")
_OF_CELL: Final = ("format", "dtype", "device", "ram_limit_bytes", "options", "use")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    checked = [one for run in options.runs for one in check(run)]
    if options.json:
        options.json.write_text(json.dumps({"schema": 1} | as_json(checked), indent=1) + "\n")
    Console().print(check_table(checked), summary_line(checked))


@dataclass(frozen=True, slots=True)
class Checked:
    """One series of a run (the repeats of a measurement), with its prediction.

    ``figures`` are (name, predicted bytes, measured bytes); of the three predicted anonymous peaks of a load
    or use, only the nearest. A RAM limit must have room for ``unreclaimable_bytes``, if they were measured.
    """

    prediction: Prediction
    figures: tuple[tuple[str, int, int], ...]
    unreclaimable_bytes: int | None = None

    @property
    def anonymous_error(self) -> float | None:
        """The larger error of the predicted anonymous peaks of load and use, as a share of the measured."""
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


def summarised(checked: Sequence[Checked]) -> dict[str, float] | None:
    """Return the errors of all series that have one, and how many series their predicted floor would kill."""
    errors = [error for one in checked if (error := one.anonymous_error) is not None]
    if not errors:
        return None
    return {
        "series": len(errors), "median_error": median(errors), "largest_error": max(errors),
        "killed": sum(one.is_killed for one in checked),
    }  # fmt: skip


def summary_line(checked: Sequence[Checked]) -> str:
    if not (summary := summarised(checked)):
        return ""
    share = summary["killed"] / summary["series"]
    return (
        f"{summary['series']:,} series. Anonymous peak: median error {summary['median_error']:.2%}, largest"
        f" {summary['largest_error']:.2%}. A RAM limit of the predicted floor would have killed"
        f" {summary['killed']} ({share:.1%})."
    )


def check_table(checked: Sequence[Checked]) -> Table:
    """Return a table with a row for each peak that was both measured and predicted."""
    rows: list[list[str]] = []
    for series in checked:
        name = name_of(series.prediction.cell)
        if series.prediction.cannot:
            rows.append([f"{name}: {series.prediction.cannot}", *[""] * 4])
        for figure, predicted, measured in series.figures:
            peak = figure.removesuffix("_bytes").replace("_", " ")
            sizes = f"{predicted / MIB:,.1f}", f"{measured / MIB:,.1f}"
            share = f"{predicted / measured - 1:+.2%}" if measured else "-"
            rows.append([name, peak, *sizes, share])
    return Table.of(("cell", "peak", "predicted MiB", "measured MiB", "%"), rows, names=2)


def check(run: Path) -> list[Checked]:
    """Predict each series of a run that has an ok load, and return them with the medians of these loads."""
    results = run_folder.read(run).results
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
    return {
        "summary": summarised(checked),
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
        yield name.replace("host_", "use_"), near, size


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
    """Return the settings in a run's plan, or the default ones if it has none, as a published run."""
    try:
        found = run_folder.read_plan(run)
        settings = read_plan(found.settings, found.cells, run / run_folder.PLAN)
    except HarnessError:
        return Settings()
    return settings.model_copy(update={"mounts": ()})  # a prediction has no container


if __name__ == "__main__":
    main()
