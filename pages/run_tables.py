"""Write the tables that only the project's pages show, each from the records of one or more runs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weighin.errors import RecordError
from weighin.files import parse_json, read_bytes
from weighin.records.floor import floors
from weighin.records.metrics import grouped, middle, outcome_of
from weighin.records.series import Measured
from weighin.records.verdict import Verdict
from weighin.result import Outcome, Result
from weighin.show import words
from weighin.show.table import Table, pivot
from weighin.show.words import scaled
from weighin.text import markdown as escaped
from weighin.units import MIB, format_seconds

_MISSING: Final = "-"
CONVERTING: Final = (
    "load", "strategy", "anonymous (sampled), x result", "peak RSS, x result", "load time",
)  # fmt: skip
PREDICTED: Final = "predicted.json"
USUAL: Final = re.compile(
    r"device cpu|no RAM limit|float32|cold page cache|x86_64|AMD EPYC|Linux .*|cgroup v1|torch .*|saving"
)
"""What a caption leaves out: the pages say it once of all runs."""
CHECKED: Final = ("run", "series", "anonymous MiB", "strategy", "floor MiB", "strategy")


def caption(run: Measured, usual: re.Pattern[str] = USUAL) -> str:
    """Return what all rows share, as Markdown, without what the pages say once of all runs (``usual``)."""
    about = words.shared(run, without=("ram_limit_bytes",) if run.floors else ()).split(" · ")
    text = " · ".join(one for one in about if not usual.fullmatch(one))
    return escaped(re.sub(r"measured (.*) with weighin commits?.*", r"\1", text))


def markdown_checked(runs: Mapping[Path, Sequence[Result]]) -> str:
    """Return the largest difference between prediction and measurement in each run.

    The predictions are in the run's file predicted.json, which is published with the run, because a prediction
    takes minutes, and differs by some MiB between machines.

    Raises:
        RecordError: the file of a run cannot be read.
    """
    rows, made = [], []
    for run, results in runs.items():
        told = _read_predicted(run / PREDICTED)
        made.append((told["environment"], told["predicted_at"]))
        series = [one for one in told["checked"] if not one["cannot"]]
        anonymous = [
            (abs(sizes["predicted"] - sizes["measured"]), one["strategy"])
            for one in series
            for name, sizes in one["figures"].items()
            if name.startswith("host_anon_")
        ]
        predicted = {(one["strategy"], one["format"]): one["floor_bytes"] for one in series}
        apart = [
            (abs(size - floor.bytes), floor.cell.strategy)
            for floor in floors(results)
            if (size := predicted.get((floor.cell.strategy, floor.cell.format))) is not None
            and floor.bytes is not None
            and Verdict.THRASHES not in floor.below  # only a time could predict such a floor
        ]
        row = [run.name, str(len(series))]
        for each in (anonymous, apart):
            size, strategy = max(each, default=(None, _MISSING))
            row += [scaled(size, MIB, 0), strategy]
        rows.append(row)
    note = f"Predicted {words.when_and_what(made)}."
    return f"{Table.of(CHECKED, rows, names=2).markdown()}\n\n{note}"


def _read_predicted(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = parse_json(read_bytes(path))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"cannot read predictions from {path}: {error}",
            f"create the file: .venv/bin/python benchmarks/predicted_runs.py {path.parent} --json {path}",
        ) from error
    return content


def markdown_converting(results: Sequence[Result]) -> str:
    """Return the peaks of loads that change the weights, as multiples of the loaded model's size."""
    measured = [one for one in results if one.outcome is not Outcome.SKIPPED]
    found = Table.of(CONVERTING, _converting(measured), names=2)
    return f"{found.markdown()}\n\n{caption(Measured(measured))}"


def _converting(measured: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    for title, ours in grouped(measured, lambda one: one.cell.model.title).items():
        for repeats in grouped(ours, lambda one: one.cell.series).values():
            good = [one for one in repeats if one.outcome is Outcome.OK]
            cell, size = repeats[0].cell, repeats[0].model_bytes
            options = (f"{name}={value}" for name, value in sorted(cell.options.items()))
            load_ns = middle(one.load_ns for one in good)
            yield (
                title,
                " ".join([cell.strategy, *options]),
                scaled(middle(map(anonymous_bytes, good)), size, 3)
                if good
                else outcome_of(one.outcome for one in repeats),
                scaled(middle(map(resident_bytes, good)), size, 3),
                _MISSING if load_ns is None else format_seconds(load_ns),
            )


def anonymous_bytes(result: Result) -> int | None:
    """Return the sampled maximum of anonymous memory above the memory after all imports."""
    peak = result.peaks.anon_sampled_bytes
    return peak - result.baseline.anon_bytes if peak and result.baseline else None


def resident_bytes(result: Result) -> int | None:
    """Return the peak of resident memory above the memory after all imports."""
    peak = result.peaks.rss_bytes
    return peak - result.baseline.rss_bytes if peak and result.baseline else None


def markdown_models(results: Sequence[Result]) -> str:
    """Return the median times until ready in seconds: a row per strategy, a column per model."""
    run = Measured(results)
    table = pivot(
        "",
        run.rows,
        lambda row: row["strategy"],
        lambda row: f"{row['model']} s",
        lambda rows: scaled(rows[0]["ready_s"], 1, 2),
    )
    return f"{table.markdown()}\n\n{caption(run)}"
