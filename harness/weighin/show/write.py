"""Write the report of a run into the folder of the run, in the requested formats."""

import base64
import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from importlib import resources
from io import StringIO
from itertools import chain
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Final, NamedTuple

from weighin import __version__
from weighin.errors import UnknownName
from weighin.files import write_bytes
from weighin.records import run_folder
from weighin.records.metrics import COLUMNS, METRICS
from weighin.records.run_folder import Records
from weighin.records.series import Figure, Measured, name_of, summarise
from weighin.result import Outcome, Sample
from weighin.show import style, words
from weighin.show.report import FIGURES, csv_columns, document, whole
from weighin.show.table import Table, escape, escaped, markdown

if TYPE_CHECKING:  # the import of each takes half a second
    from pandas import DataFrame

DEFAULT: Final = ("md", "html", "csv", "png")
_FILES: Final = (run_folder.RECORDS, run_folder.PLAN, "summary.csv", "report.md")
# A cell that begins with one of these characters is a formula in a spreadsheet.
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_INTEGERS: Final = ("ram_limit_bytes", "vram_limit_bytes", "repeat", "repeats", "ok", "missing_cells")  # fmt: skip


class Picture(NamedTuple):
    svg: str
    png: bytes


Pictures = Mapping[str, Picture]


def checked(formats: Sequence[str]) -> tuple[str, ...]:
    """Return each requested format once; raise UnknownName if ``FORMATS`` does not contain it."""
    wanted = tuple(dict.fromkeys(formats or DEFAULT))
    if unknown := [name for name in wanted if name not in FORMATS]:
        raise UnknownName("format", unknown[0], FORMATS)
    return wanted


def write(run: Measured, formats: Sequence[str] = ()) -> list[Path]:
    """Write the report of a run into its folder in these ``FORMATS``, and return the written files."""
    wanted, paths = checked(formats), list[Path]()
    drawn = dict(draw(run, wanted)) if {*wanted} & {"html", "png"} else {}
    for name in wanted:
        # report.md shows the PNG files: none where they are not written.
        shown = {} if name == "md" and "png" not in wanted else drawn
        for file, content in FORMATS[name](run, shown).items():
            path = run.folder / file
            repair = "free some space, or copy the run to a writable folder"
            with run_folder.writing(path, repair=repair):
                write_bytes(path, content if isinstance(content, bytes) else content.encode())
            paths.append(path)
    return paths


def draw(run: Measured, formats: Sequence[str] = DEFAULT) -> Iterator[tuple[str, Picture]]:
    """Yield each picture of a run with its name; the timelines need the samples in the run's folder."""
    from weighin.show.plots import pictures
    from weighin.show.timeline import draw_timelines

    timelines = enumerate(draw_timelines(run, 5), 1)
    figures = chain(
        ((name, draw_picture()) for name, draw_picture in pictures(run).items()),
        ((f"timeline-{at}" if at > 1 else "timeline", figure) for at, figure in timelines),
    )
    for name, figure in figures:  # one at a time: a figure keeps its 20 MiB of pixels
        svg = ""
        if "html" in formats:
            svg = style.svg(figure, name)
            figure.set_layout_engine("none")  # as it is: a PNG needs no second layout
        yield name, Picture(svg, style.png(figure) if "png" in formats else b"")


def report_md(run: Measured, pictures: Iterable[str] = ()) -> str:
    """Return the report of a run as Markdown, with the ``pictures`` of these names at the end."""
    shown = [f"![{name}]({name}.png)" for name in pictures]
    head = f"# {escaped(words.title(run.rows))}\n\n{escaped(words.shared(run))}"
    return "\n\n".join([head, markdown(document(run)), *shown]) + "\n"


def report_html(run: Measured, pictures: Mapping[str, str]) -> str:
    """Return the report of a run as one HTML file that needs no network, no other file, and no library. Without
    scripts (``templates/script.js``), a browser shows the same. ``pictures`` are SVGs by name.
    """
    title = escape(words.title(run.rows) if run.rows else "A run without cells")
    about = [[name, " | ".join(values)] for name, values in words.settings(run.results).items()]
    parts = document(run)
    last = [part for part in parts if part.title == FIGURES]
    last.insert(0, Table.of(("setting", "value"), about, names=2, title="Machine and software"))
    drawn = [
        f'<figure id="{name}" class="picture scroll" tabindex="0">{svg}</figure>\n'
        for name, svg in pictures.items()
    ]
    hint = '<p class="hint">Point at a mark to read its figures. Drag over a picture to zoom in; a double click shows all of it.</p>\n'
    others = [part for part in parts if part not in last]
    sections = [(part.title, getattr(part, "kind", ""), part.html()) for part in others]
    sections += [("Pictures", "", hint + "".join(drawn))] if drawn else []
    sections += [(part.title, "", part.html()) for part in last]
    body = ""
    for name, kind, content in sections:
        label, style_class = escape(name), f' class="{kind}"' if kind else ""
        head = f'<section aria-label="{label}"{style_class}>\n<h2>{label}</h2>\n'
        body += f"{head}{content}</section>\n"
    folder = [file for file in _FILES if (run.folder / file).exists()]
    links = ", ".join(f'<a href="{file}">{file}</a>' for file in folder)
    templates = resources.files("weighin.show") / "templates"
    names = ("page.html", "script.js", "style.css")
    page, script, css = ((templates / one).read_text(encoding="utf-8") for one in names)
    return Template(page).substitute(
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        title=title,
        css=css,
        shared=escape(words.shared(run)),
        body=body,
        run=escape(run.folder.resolve().name),
        links=links,
        script=script,
    )


def summary_csv(run: Measured) -> str:
    """Return a CSV line for each measurement; an apostrophe keeps a formula a text."""

    def field(value: object) -> object:
        if value is None or isinstance(value, int | float):
            return "" if value is None else whole(value)
        text = words.plain(str(value))
        return f"'{text}" if text.startswith(_FORMULA_STARTS) else text

    file, names = StringIO(newline=""), csv_columns(run.rows)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*names, "missing_cells"])
    rows = ([*(field(row[name]) for name in names), field(run.missing)] for row in run.rows)
    writer.writerows(rows)
    return file.getvalue()


def _for_dashboards(run: Measured) -> Iterator[tuple[str, str, str, Figure | int, str]]:
    """Yield each number for dashboards: whose it is, its key, its unit, the figure or count, and a remark.

    Planned measurements without a record are counted: a run that was stopped would look complete.
    """
    if run.missing is not None:
        yield "run", "missing_cells", "cells", run.missing, ""
    measured = [one for one in run.results if one.outcome is not Outcome.SKIPPED]
    not_ok = [name_of(one.cell) for one in measured if one.outcome is not Outcome.OK]
    for name, series in summarise([Records(measured)]).items():
        ended = f"{series.repeats} repeats: {series.outcome}"
        yield name, "not_ok_repeats", "repeats", not_ok.count(name), ended
        for key, figure in series.figures.items():
            how = "exact" if METRICS[key].exact else "sampled"
            about = f"{how}, median of the ok ones of {series.repeats} repeats"
            yield name, key, METRICS[key].unit, figure, about


def bencher(run: Measured) -> str:
    """Return Bencher Metric Format (https://bencher.dev/docs/reference/bencher-metric-format)."""
    benchmarks: dict[str, dict[str, dict[str, int]]] = {}
    for name, key, unit, value, _ in _for_dashboards(run):
        ours = benchmarks.setdefault(name, {})
        if isinstance(value, int):
            ours[key] = {"value": value}
        else:
            low, high = value.low, value.high
            ours[f"{key}_{unit}"] = {"value": value.median, "lower_value": low, "upper_value": high}
    return json.dumps(benchmarks, indent=1, ensure_ascii=False) + "\n"


def github_action_benchmark(run: Measured) -> str:
    """Return JSON for https://github.com/benchmark-action/github-action-benchmark."""
    entries = []
    for name, key, unit, value, about in _for_dashboards(run):
        number = value if isinstance(value, int) else value.median
        entry: dict[str, str | int] = {"name": f"{name} {key}", "unit": unit, "value": number}
        if about:
            entry["extra"] = about
        if isinstance(value, Figure) and value.low != value.high:
            entry["range"] = f"{value.low}..{value.high}"
        entries.append(entry)
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


def results(run: str | Path, *, samples: bool = False) -> "DataFrame":
    """Return a run's figures: a row for the repeats of each measurement, with the columns of summary.csv.

    With ``samples``, return instead the memory over time: a row for each sample of each repeat, whose
    column ``series`` has the measurement's name in ``weighin check``.

    Raises:
        RecordError: the folder has no readable records.
    """
    import pandas as pd

    measured = Measured.of(Path(run), run_folder.read(Path(run)))
    if samples:
        return pd.DataFrame(
            [
                {"series": name_of(one.cell), "repeat": one.cell.repeat, **asdict(sample)}
                for one in measured.results
                for sample in run_folder.read_samples(measured.folder, one.samples_path)
            ],
            columns=["series", "repeat", *(each.name for each in fields(Sample))],
        )
    table = pd.DataFrame(measured.rows, columns=csv_columns(measured.rows), dtype=object)
    table["missing_cells"] = measured.missing
    types = dict.fromkeys(_INTEGERS, "Int64")  # integers stay exact, beside missing values too
    for key, figure in COLUMNS.items():
        kind = "Int64" if figure.unit in ("bytes", "") else "Float64"
        types |= dict.fromkeys((key, f"{key}_min", f"{key}_max"), kind)
    return table.astype({name: types[name] for name in table.columns if name in types})


# The function of a format returns the contents of the written files, by file name.
FORMATS: Final[dict[str, Callable[[Measured, Pictures], Mapping[str, str | bytes]]]] = {
    "md": lambda run, pictures: {"report.md": report_md(run, pictures)},
    "html": lambda run, pictures: {
        "report.html": report_html(run, {name: one.svg for name, one in pictures.items()})
    },
    "csv": lambda run, _: {"summary.csv": summary_csv(run)},
    "png": lambda _, pictures: {f"{name}.png": one.png for name, one in pictures.items()},
    "bmf": lambda run, _: {"bmf.json": bencher(run)},
    "gha": lambda run, _: {"gha.json": github_action_benchmark(run)},
}
