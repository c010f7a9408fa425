"""Write the report of a run into the folder of the run, in the requested formats.

The files for dashboards have the median, lowest and highest figures of the ok repeats, by the name in
``weighin check``, and the number of planned measurements without a record: a run that was stopped
would otherwise look complete."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weighin.errors import UnknownName
from weighin.files import write_bytes
from weighin.records import run_folder
from weighin.records.metrics import COLUMNS, METRICS
from weighin.records.run_folder import Records
from weighin.records.series import Measured, Row, Series, name_of, row_of, summarise
from weighin.result import Outcome, Sample
from weighin.show import page, style, words
from weighin.show.report import OF_CELLS, OF_SERIES, csv_columns, document, whole
from weighin.show.table import escaped, markdown

if TYPE_CHECKING:  # the import of each takes half a second
    from matplotlib.figure import Figure
    from pandas import DataFrame

DEFAULT: Final = ("md", "html", "csv", "png")
_PICTURES: Final = ("png", "svg")
_MOST_TIMELINES: Final = 5  # of 12 panels each
# A cell that begins with one of these characters is a formula in a spreadsheet.
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_INTEGERS: Final = ("ram_limit_bytes", "vram_limit_bytes", "repeat", "repeats", "ok", "missing_cells")  # fmt: skip

Figures = Mapping[str, "Figure"]


def checked(formats: Sequence[str]) -> tuple[str, ...]:
    """Return each requested format once; raise UnknownName if ``FORMATS`` does not contain it."""
    wanted = tuple(dict.fromkeys(formats or DEFAULT))
    if unknown := [name for name in wanted if name not in FORMATS]:
        raise UnknownName("format", unknown[0], FORMATS)
    return wanted


def write(run: Measured, formats: Sequence[str] = ()) -> list[Path]:
    """Write the report of a run into its folder in these ``FORMATS``, and return the written files."""
    wanted = checked(formats)
    drawn = dict(draw(run)) if {*wanted} & {"html", *_PICTURES} else {}
    paths = []
    for name in wanted:
        images = next((kind for kind in _PICTURES if kind in wanted), "") if name == "md" else name
        for file, content in FORMATS[name](run, drawn, images).items():
            path = run.folder / file
            repair = "free some space, or copy the run to a writable folder"
            with run_folder.writing(path, repair=repair):
                write_bytes(path, content if isinstance(content, bytes) else content.encode())
            paths.append(path)
    return paths


def draw(run: Measured) -> "Iterator[tuple[str, Figure]]":
    """Yield each picture of a run with its name; the timelines need the samples in the run's folder."""
    from weighin.show.plots import pictures
    from weighin.show.timeline import draw_timelines

    for name, draw_picture in pictures(run).items():
        yield name, draw_picture()
    for number, figure in enumerate(draw_timelines(run, _MOST_TIMELINES), 1):
        yield f"timeline-{number}" if number > 1 else "timeline", figure


def report_md(run: Measured, images: Sequence[str] = ()) -> str:
    """Return the report of a run as Markdown, with the pictures named in ``images`` at the end."""
    shown = [f"![{image.rpartition('.')[0]}]({image})" for image in images]
    head = f"# {escaped(words.title(run.rows))}\n\n{escaped(words.shared(run))}"
    return "\n\n".join([head, markdown(document(run)), *shown]) + "\n"


def summary_csv(run: Measured) -> str:
    """Return a CSV line for each measurement, in bytes and unrounded seconds.

    The last column, missing_cells, is the number of planned measurements without a record. A text
    that a spreadsheet would read as a formula gets a leading apostrophe.
    """

    def field(value: object) -> object:
        if value is None or isinstance(value, int | float):
            return "" if value is None else whole(value)
        text = words.plain(str(value))
        return f"'{text}" if text.startswith(_FORMULA_STARTS) else text

    file, names = StringIO(newline=""), csv_columns(run.rows, OF_SERIES)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*names, "missing_cells"])
    writer.writerows(
        [*(field(row[name]) for name in names), field(run.missing)] for row in run.rows
    )
    return file.getvalue()


def bencher(run: Measured) -> str:
    """Return Bencher Metric Format: JSON that ``bencher run --adapter json`` reads.

    https://bencher.dev/docs/reference/bencher-metric-format
    """
    benchmarks: dict[str, dict[str, dict[str, int]]] = {}
    if run.missing is not None:
        benchmarks["run"] = {"missing_cells": {"value": run.missing}}
    for name, series, not_ok in _summary(run):
        benchmarks[name] = {"not_ok_repeats": {"value": not_ok}} | {
            f"{key}_{METRICS[key].unit}": {
                "value": figure.median,
                "lower_value": figure.low,
                "upper_value": figure.high,
            }
            for key, figure in series.figures.items()
        }
    return json.dumps(benchmarks, indent=1, ensure_ascii=False) + "\n"


def github_action_benchmark(run: Measured) -> str:
    """Return the JSON of github-action-benchmark's tool ``customSmallerIsBetter``.

    https://github.com/benchmark-action/github-action-benchmark
    """
    entries: list[dict[str, Any]] = []

    def add(name: str, unit: str, value: int, **more: str) -> None:
        entries.append({"name": name, "unit": unit, "value": value} | more)

    if run.missing is not None:
        add("run missing_cells", "cells", run.missing)
    for name, series, not_ok in _summary(run):
        ended = f"{series.repeats} repeats: {series.outcome}"
        add(f"{name} not_ok_repeats", "repeats", not_ok, extra=ended)
        for key, figure in series.figures.items():
            metric = METRICS[key]
            how = "exact" if metric.exact else "sampled"
            about = {"extra": f"{how}, median of the ok ones of {series.repeats} repeats"}
            if figure.low != figure.high:
                about["range"] = f"{figure.low}..{figure.high}"
            add(f"{name} {metric.name}", metric.unit, figure.median, **about)
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


def _summary(run: Measured) -> Iterator[tuple[str, Series, int]]:
    """Yield name and summary of each measurement, and how many repeats did not end ok."""
    measured = [one for one in run.results if one.outcome is not Outcome.SKIPPED]
    names = [name_of(one.cell) for one in measured if one.outcome is not Outcome.OK]
    for name, series in summarise([Records(measured)]).items():
        yield name, series, names.count(name)


def _parquet(run: Measured) -> bytes:
    from weighin.errors import extra

    with extra("parquet", "parquet"):
        import pyarrow  # noqa: F401  # an optional dependency, because it takes 170 MB
    file = BytesIO()
    rows = [row_of(result) for result in run.results]
    _frame(rows, csv_columns(rows, OF_CELLS), run.missing).to_parquet(file, index=False)
    return file.getvalue()


def results(run: str | Path, *, samples: bool = False) -> "DataFrame":
    """Return a run's figures: a row for the repeats of each measurement, with the columns of summary.csv.

    With ``samples``, return instead the memory over time: a row for each sample of each repeat, whose
    column ``series`` has the measurement's name in ``weighin check``.

    Raises:
        RecordError: the folder has no readable records.
    """
    measured = Measured.of(Path(run), run_folder.read(Path(run)))
    if not samples:
        return _frame(measured.rows, csv_columns(measured.rows, OF_SERIES), measured.missing)
    import pandas as pd

    return pd.DataFrame(
        [
            {"series": name_of(one.cell), "repeat": one.cell.repeat, **asdict(sample)}
            for one in measured.results
            for sample in run_folder.read_samples(measured.folder, one.samples_path)
        ],
        columns=["series", "repeat", *(each.name for each in fields(Sample))],
    )


def _frame(rows: Sequence[Row], names: Sequence[str], missing: int | None) -> "DataFrame":
    """Return the rows as a table whose integers stay exact, beside missing values too."""
    import pandas as pd

    table = pd.DataFrame([[row[n] for n in names] for row in rows], columns=[*names], dtype=object)
    table["missing_cells"] = missing
    types = dict.fromkeys(_INTEGERS, "Int64")
    for key, figure in COLUMNS.items():
        kind = "Int64" if figure.unit in ("bytes", "") else "Float64"
        types |= dict.fromkeys((key, f"{key}_min", f"{key}_max"), kind)
    return table.astype({name: types[name] for name in table.columns if name in types})


def _drawn(_: Measured, figures: Figures, kind: str) -> dict[str, str | bytes]:
    save: Callable[[Figure], str | bytes] = style.png if kind == "png" else style.svg
    return {f"{name}.{kind}": save(figure) for name, figure in figures.items()}


# The function of a format returns the contents of the written files, by file name. Its last argument
# is the kind of pictures to write, or for report.md, to show.
FORMATS: Final[dict[str, Callable[[Measured, Figures, str], Mapping[str, str | bytes]]]] = {
    "md": lambda run, figures, kind: {
        "report.md": report_md(run, [f"{name}.{kind}" for name in figures if kind])
    },
    "html": lambda run, figures, _: {"report.html": page.render(run, figures)},
    "csv": lambda run, *_: {"summary.csv": summary_csv(run)},
    "png": _drawn,
    "svg": _drawn,
    "bmf": lambda run, *_: {"bmf.json": bencher(run)},
    "gha": lambda run, *_: {"gha.json": github_action_benchmark(run)},
    "parquet": lambda run, *_: {"cells.parquet": _parquet(run)},
}
