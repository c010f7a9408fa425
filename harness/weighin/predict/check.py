"""Compare the measurements of a run with predictions of the same loads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from weighin.errors import HarnessError, RecordError
from weighin.plan import loads, start
from weighin.plan.task import Planned
from weighin.predict.client import predict
from weighin.predict.prediction import Prediction
from weighin.probes import environment
from weighin.records import run_folder
from weighin.records.metrics import middle, use_needed_bytes
from weighin.result import Outcome, Result
from weighin.settings.definition import Settings, read_plan
from weighin.suite import registry, user_code
from weighin.suite.registry import StrategyInfo

_FIGURES = {
    "host_anon_peak_bytes": "anon_sampled_bytes",
    "host_file_peak_bytes": "file_sampled_bytes",
    "cuda_requested_bytes": "cuda_requested_bytes",
    "cuda_allocated_bytes": "cuda_allocated_bytes",
    "cuda_reserved_bytes": "cuda_reserved_bytes",
}
_ANONYMOUS = ("host_anon_peak_bytes", "host_anon_least_bytes", "host_anon_most_bytes")
_USED = "use_"
"""The prefix that replaces "host_" in the names of peaks during a use (after the load)."""
_CHILDREN = "children_private_bytes"


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


def check(
    run: Path, records: run_folder.Records | None = None, *, trusted: bool = False
) -> list[Checked]:
    """Predict each series of a run, and return the predictions with the medians of its ok loads.

    A series (the repeats of a measurement) without an ok load is left out. ``records`` are those of
    the run, if they have been read.

    Raises:
        RecordError: the folder has no run, or no load of the run is ok.
        HarnessError: for the same reasons as ``predict``.
        ConfigError: the run names code from outside of weighin, and ``trusted`` is False.
    """
    series: dict[str, list[Result]] = {}
    for result in (records or run_folder.read(run)).results:
        if result.outcome is Outcome.OK and result.cell.operation == "load":
            series.setdefault(result.cell.series, []).append(result)
    if not series:
        raise RecordError(
            f"{run} has no load whose outcome is ok", "predict the model: weighin predict MODEL"
        )
    settings = _settings(run)
    cells = [results[0].cell for results in series.values()]
    # A folder on the path may hide any module, so only a foreign builder gets the folders.
    if all(user_code.is_ours(cell.model.builder) for cell in cells):
        settings = settings.model_copy(update={"python_path": ()})
    paths = settings.strategy_paths
    if not trusted:
        used = {cell.strategy: paths[cell.strategy] for cell in cells if cell.strategy in paths}
        named = settings.model_copy(update={"strategy_paths": used, "engine": {}})
        again = f"weighin predict --check {quote(str(run))}"
        start.check_trust(start.foreign(cells, named), run, again, "or predict the model itself")
    by_checkpoint: dict[Path | None, list[Planned]] = {}
    for cell in cells:
        planned = loads.plan_cell(cell, _strategy(cell.strategy, paths))
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
            {
                "strategy": series.prediction.strategy,
                "model": series.prediction.cell.model.title,
                "format": series.prediction.cell.format,
                "dtype": series.prediction.cell.dtype,
                "device": series.prediction.cell.device,
                "ram_limit_bytes": series.prediction.cell.ram_limit_bytes,
                "options": series.prediction.cell.options,
                "use": series.prediction.cell.use,
                "cannot": series.prediction.cannot,
                "floor_bytes": series.prediction.floor_bytes,
                "figures": {
                    name: {"predicted": predicted, "measured": measured}
                    for name, predicted, measured in series.figures
                },
            }
            for series in checked
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
    if size := middle(sum(use.children_private_bytes) for use in uses):
        yield _CHILDREN, sum(prediction.use.children_private_bytes), size


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


def _strategy(name: str, paths: Mapping[str, str]) -> StrategyInfo:
    return registry.read_strategy(Path(paths[name])) if name in paths else registry.strategy(name)
