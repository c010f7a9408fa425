"""Export a run for other programs: benchmark dashboards, Prometheus, and data frames.

The Parquet file has a row for each repeat of a measurement. The other exports summarise all repeats
under the measurement's name in ``weighin check``: each figure is the median, the lowest and the
highest value of the ok repeats. Of the other repeats, these exports contain only the number.

The parameter ``missing`` is the number of planned measurements (cells) without a record: 0 for a
complete run, None for a run without a plan. Every export contains this number as ``missing_cells``,
because a run that was stopped would otherwise look complete.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from weighin.cell import Cell
from weighin.errors import extra
from weighin.records.machine import settings_of
from weighin.records.metrics import METRICS, latest
from weighin.records.series import SeriesRun, further_words, name_of, summarise
from weighin.report import operations
from weighin.report.figures import COLUMNS
from weighin.report.rows import LIMITS, OF_CELLS, cells
from weighin.result import Outcome, Result
from weighin.text import one_line

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

_NOT_OK: Final = "not_ok_repeats"
_MISSING: Final = "missing_cells"
_RUN: Final = "run"
"""The name of the entry, beside the measurements, with the number of missing cells of a run."""
_NS: Final = 1e9


def bencher(results: Sequence[Result], missing: int | None = None) -> str:
    """Return Bencher Metric Format: JSON that ``bencher run --adapter json`` reads.

    https://bencher.dev/docs/reference/bencher-metric-format
    """
    benchmarks: dict[str, dict[str, dict[str, int]]] = {}
    if missing is not None:
        benchmarks[_RUN] = {_MISSING: {"value": missing}}
    not_ok = _not_ok(results)
    for name, series in summarise([SeriesRun(_run(results))]).items():
        benchmarks[name] = {_NOT_OK: {"value": not_ok[name]}}
        for key, figure in series.figures.items():
            benchmarks[name][f"{key}_{METRICS[key].unit}"] = {
                "value": figure.median,
                "lower_value": figure.low,
                "upper_value": figure.high,
            }
    return json.dumps(benchmarks, indent=1, ensure_ascii=False) + "\n"


def github_action_benchmark(results: Sequence[Result], missing: int | None = None) -> str:
    """Return the JSON of github-action-benchmark's tool ``customSmallerIsBetter``.

    https://github.com/benchmark-action/github-action-benchmark
    """
    entries: list[dict[str, Any]] = []
    if missing is not None:
        entries.append({"name": f"{_RUN} {_MISSING}", "unit": "cells", "value": missing})
    not_ok = _not_ok(results)
    for name, series in summarise([SeriesRun(_run(results))]).items():
        entries.append({"name": f"{name} {_NOT_OK}", "unit": "repeats", "value": not_ok[name], "extra": f"{series.repeats} repeats: {series.outcome}"})  # fmt: skip
        for key, figure in series.figures.items():
            metric = METRICS[key]
            entry: dict[str, Any] = {
                "name": f"{name} {metric.name}",
                "unit": metric.unit,
                "value": figure.median,
                "extra": f"{'exact' if metric.exact else 'sampled'}, median of the ok ones of {series.repeats} repeats",
            }
            if figure.low != figure.high:
                entry["range"] = f"{figure.low}..{figure.high}"
            entries.append(entry)
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


def openmetrics(results: Sequence[Result], missing: int | None = None) -> str:
    """Return a run as OpenMetrics text, which Prometheus reads; units are bytes and seconds.

    https://prometheus.io/docs/specs/om/open_metrics_spec

    Raises:
        ConfigError: prometheus_client is not installed.
    """
    with extra("dashboards", "openmetrics"):
        from prometheus_client.openmetrics.exposition import generate_latest

    registry = SimpleNamespace(collect=lambda: _families(_run(results), missing))
    text: bytes = generate_latest(registry)
    return text.decode()


def parquet(results: Sequence[Result], missing: int | None = None) -> bytes:
    """Return a Parquet file with the rows of ``rows.cells``: one for each repeat of a measurement.

    The figures are not rounded. The column ``missing_cells`` has the same number in every row.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    with extra("parquet", "parquet"):
        import pyarrow  # noqa: F401  # an optional dependency, because it takes 170 MB
    import pandas as pd  # imported here, because the import takes half a second

    rows = cells(results)
    names = operations.concerning(rows, OF_CELLS)
    # dtype=object: pandas would convert integers beside None to floats, and round 2**53 + 1.
    table = pd.DataFrame(
        [[row[name] for name in names] for row in rows], columns=names, dtype=object
    )
    table[_MISSING] = missing
    types = dict.fromkeys((*LIMITS, "repeat", _MISSING), "Int64")
    types |= {key: "Int64" if one.is_whole else "Float64" for key, one in COLUMNS.items()}
    table = table.astype({name: types.get(name, "object") for name in table.columns})
    file = BytesIO()
    table.to_parquet(file, engine="pyarrow", index=False)
    return file.getvalue()


def _families(results: Sequence[Result], missing: int | None) -> Iterator["Family"]:
    from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

    if missing is not None:
        unmeasured = "cells of the plan that were not measured"
        family = GaugeMetricFamily(f"weighin_{_MISSING}", unmeasured)
        family.add_metric([], missing)
        yield family
    cells = {name_of(result.cell): result.cell for result in results}
    summary = summarise([SeriesRun(results)])
    if not results:
        return
    first = _labels(next(iter(cells.values())))
    for metric in METRICS.values():
        unit = "bytes" if metric.unit == "bytes" else "seconds"
        scale = 1 if metric.unit == "bytes" else _NS
        how = "exact" if metric.exact else "sampled"
        help_text = f"{metric.name.replace('_', ' ')} of the ok repeats, {how}"
        family = GaugeMetricFamily(
            f"weighin_{metric.name}", help_text, labels=[*first, "statistic"], unit=unit
        )
        for name, series in summary.items():
            if figure := series.figures.get(metric.name):
                labels = list(_labels(cells[name]).values())
                for statistic in ("low", "median", "high"):
                    value = getattr(figure, statistic)
                    family.add_metric([*labels, statistic], value if scale == 1 else value / scale)
        if family.samples:
            yield family
    counted = GaugeMetricFamily("weighin_repeats", "repeats of each series by outcome", labels=[*first, "outcome"])  # fmt: skip
    for name, outcomes in _outcomes(results).items():
        for outcome in Outcome:
            counted.add_metric([*_labels(cells[name]).values(), outcome.value], outcomes[outcome])
    yield counted
    run_info = InfoMetricFamily("weighin_run", "machine and software of the run")
    settings = settings_of(result.environment for result in results if result.environment)
    words = {_label_name(key): str(value) for key, value in settings.items() if value is not None}
    run_info.add_metric([], words)
    yield run_info


def _labels(cell: Cell) -> dict[str, str]:
    """Return the labels that identify a measurement in Prometheus; the keys are always the same."""
    return {
        "model": one_line(cell.model.title),
        "strategy": one_line(cell.strategy),
        "format": one_line(cell.format),
        "dtype": cell.dtype,
        "device": cell.device,
        "cache": cell.cache,
        "isolation": cell.isolation,
        "ram_limit_bytes": str(cell.ram_limit_bytes or ""),
        "ram_high_bytes": str(cell.ram_high_bytes or ""),
        "vram_limit_bytes": str(cell.vram_limit_bytes or ""),
        "passes": str(cell.passes),
        "options": one_line(",".join(further_words(cell))),
    }


def _label_name(key: str) -> str:
    return re.sub(r"[^0-9A-Za-z]", "_", key).lstrip("0123456789_") or "setting"


def _run(results: Sequence[Result]) -> list[Result]:
    """Return the last record of each measurement; leave out measurements that were skipped."""
    return [result for result in latest(results) if result.outcome is not Outcome.SKIPPED]


def _outcomes(results: Sequence[Result]) -> dict[str, Counter[Outcome]]:
    counts: dict[str, Counter[Outcome]] = {}
    for result in results:
        counts.setdefault(name_of(result.cell), Counter())[result.outcome] += 1
    return counts


def _not_ok(results: Sequence[Result]) -> dict[str, int]:
    """Return the number of repeats that did not end ok, by the name of the repeated measurement."""
    counts = _outcomes(_run(results))
    return {name: count.total() - count[Outcome.OK] for name, count in counts.items()}
