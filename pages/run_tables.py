"""Write the tables that only the project's pages show, each from the records of one or more runs.

``markdown_relative`` shows times as multiples, for runs on shared machines: memory figures are
comparable between machines, but times are comparable only within one run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from weighin.errors import RecordError
from weighin.files import parse_json, read_bytes
from weighin.records.floor import KILLED, Aim, Floor, floors
from weighin.records.metrics import COLUMNS, grouped, middle, outcome_of
from weighin.records.series import Measured, Row, varying
from weighin.records.verdict import Verdict
from weighin.result import Outcome, Result
from weighin.show import words
from weighin.show.findings import multiple
from weighin.show.report import figures_of, table
from weighin.show.table import Table, pivot
from weighin.show.words import BEFORE_LOAD, scaled
from weighin.text import markdown as escaped
from weighin.units import MIB, format_seconds

_TIMES: Final = ("load_s", "ready_s")
_SAME: Final = ("operation", "model", "device")  # times are compared where these are equal
_MISSING: Final = "-"
CONVERTING: Final = (
    "load", "strategy", "outcome", "result MiB", "anonymous (sampled), x result", "peak RSS, x result",
    "load time",
)  # fmt: skip
PREDICTED: Final = "predicted.json"
CHECKED: Final = (
    "run", "code", "series", "largest difference of anonymous MiB", "strategy",
    "largest difference of floors MiB", "strategy",
)  # fmt: skip
_NOTE_FLOORS: Final = (
    "One step below its floor, a load was killed for lack of memory, unless the table names another"
    " outcome."
)


def markdown_agreement(runs: Mapping[Path, Sequence[Result]]) -> str:
    """Return a table with the RAM floors of several searches side by side, and their differences."""
    searches = [
        {floor.cell.strategy: floor for floor in floors(results)} for results in runs.values()
    ]
    rows = []
    for strategy in dict.fromkeys(name for search in searches for name in search):
        of_strategy = [search.get(strategy) for search in searches]
        sizes = [size for floor in of_strategy if floor and (size := floor.bytes) is not None]
        difference = _MISSING
        if len(sizes) > 1:
            apart = max(sizes) - min(sizes)
            difference = f"{apart / MIB:.0f} ({apart / min(sizes):.1%})"
        rows.append([strategy, *map(_floor_text, of_strategy), difference])
    everything = Measured([result for results in runs.values() for result in results])
    shared = words.shared(everything, without=("ram_limit_bytes",))
    names = (run.name for run in runs)
    found = Table.of(["floor, MiB", *names, "difference, MiB"], rows)
    return "\n\n".join([found.markdown(), _NOTE_FLOORS, escaped(shared)])


def _floor_text(floor: Floor | None) -> str:
    """Return a floor in MiB, with the outcome one step below the floor unless that is "killed"."""
    if floor is None or floor.bytes is None:
        return _MISSING
    mark = " (ends)" if floor.aim is Aim.ENDS else ""
    below = f" ({floor.below})" if floor.below != KILLED else ""
    return f"{floor.bytes / MIB:.0f}{mark}{below}"


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
        row = [run.name, words.code(results), str(len(series))]
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
    found = Table.of(CONVERTING, _converting(measured), names=3)
    return f"{found.markdown()}\n\n{escaped(words.shared(Measured(measured)))}"


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
                outcome_of(one.outcome for one in repeats),
                scaled(size, MIB, 0),
                scaled(middle(map(_anonymous_bytes, good)), size, 3),
                scaled(middle(map(_resident_bytes, good)), size, 3),
                _MISSING if load_ns is None else format_seconds(load_ns),
            )


def _anonymous_bytes(result: Result) -> int | None:
    """Return the sampled maximum of anonymous memory above the memory after all imports."""
    peak = result.peaks.anon_sampled_bytes
    return peak - result.baseline.anon_bytes if peak and result.baseline else None


def _resident_bytes(result: Result) -> int | None:
    peak = result.peaks.rss_bytes
    return peak - result.baseline.rss_bytes if peak and result.baseline else None


def markdown_models(results: Sequence[Result]) -> str:
    """Return the median times until ready in seconds: a row per strategy, a column per model."""
    run = Measured(results)
    return pivot(
        "",
        run.rows,
        lambda row: row["strategy"],
        lambda row: f"{row['model']} s",
        lambda rows: scaled(rows[0]["ready_s"], 1, 2),
        notes=[words.shared(run)],
    ).markdown()


def markdown_relative(results: Sequence[Result]) -> str:
    """Return the table of a run with times as multiples of its first line, whose seconds are below."""
    run = Measured(results)
    if not run.rows:
        return words.shared(run)
    figures = [one for one in figures_of(run.rows) if one.key not in BEFORE_LOAD]
    first, headings = run.rows[0], words.kind_of(run.rows).headings
    seconds = (
        f"{headings.get(figure.key, figure.heading)} {scaled(first[figure.key], 1, 1)} s"
        for figure in figures
        if figure.key in _TIMES
    )
    note = f"Times are multiples of the first line's: {', '.join(seconds)}."
    found = table("", _divided(run.rows), varying(run.rows), figures, [note, words.shared(run)])
    columns = [replace(one, unit="x") if one.unit == "s" else one for one in found.columns]
    return replace(found, columns=columns).markdown()


def _divided(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with each time divided by the time of the first comparable row."""
    firsts: dict[tuple[str, ...], float] = {}
    for row in rows:
        for name in _TIMES:
            if row[name] is not None:
                firsts.setdefault((name, *(row[key] for key in _SAME)), row[name])
    return [
        row
        | {
            f"{name}{end}": row[f"{name}{end}"] / firsts[name, *(row[key] for key in _SAME)]
            for name in _TIMES
            for end in ("", "_min", "_max")
            if row[name] is not None
        }
        for row in rows
    ]


def markdown_trained(results: Sequence[Result]) -> str:
    """Return one line per model: the memory of each strategy until ready, and in a step of AdamW."""
    trained = [one for one in results if one.cell.use == "adamw" and one.outcome is Outcome.OK]
    lines = [
        f"{model}: {'; '.join(map(_step, grouped(ours, lambda one: one.cell.strategy).values()))}"
        for model, ours in grouped(trained, lambda one: one.cell.model.title).items()
    ]
    shared = escaped(words.shared(Measured(trained)))
    return "\n".join([*(f"* {escaped(line)}" for line in lines), "", shared])


def _step(repeats: Sequence[Result]) -> str:
    names = ("anon_sampled_bytes", "use_anon_sampled_bytes")
    before, after = (multiple(repeats, COLUMNS[name]) for name in names)
    return f"{repeats[0].cell.strategy} {before} → {after}"
