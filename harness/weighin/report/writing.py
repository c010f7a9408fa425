"""Write the report of a run into the folder of the run, in the requested formats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from weighin.errors import UnknownName
from weighin.files import write_bytes
from weighin.records import run_folder
from weighin.records.run_folder import Records
from weighin.report import (
    captions,
    exports,
    html_page,
    peaks_plot,
    sections,
    style,
    tables,
    timeline,
)
from weighin.report.markdown import plain
from weighin.report.rows import series
from weighin.result import Result
from weighin.text import markdown as escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT: Final = ("md", "html", "csv", "png")
TIMELINE: Final = "timeline"


@dataclass(frozen=True, slots=True)
class _Run:
    """The records of a run, and the formats in which to write its report."""

    folder: Path
    records: Records
    formats: Sequence[str]

    @property
    def results(self) -> Sequence[Result]:
        return self.records.results


def write_report(
    run: Path, formats: Sequence[str] = (), records: Records | None = None
) -> list[Path]:
    """Write the report of a run into the run's folder, and return the paths of the written files.

    ``formats`` are keys of ``FORMATS``; an empty sequence means ``DEFAULT``. ``records`` are the
    run's records, if the caller has already read them. If a part of records.jsonl is damaged, the
    report contains the undamaged records.

    Raises:
        ConfigError: a format needs a package that is not installed.
        RecordError: the run's records cannot be read, or the run's folder cannot be written.
        UnknownName: ``FORMATS`` does not contain a requested format.
    """
    wanted = tuple(dict.fromkeys(formats or DEFAULT))
    for name in wanted:
        if name not in FORMATS:
            raise UnknownName("format", name, FORMATS)
    material = _Run(run, records or run_folder.read_whole(run), wanted)
    paths = []
    for name in wanted:
        paths += [_write(run / file, text) for file, text in FORMATS[name](material).items()]
    return paths


def write_markdown(
    results: Sequence[Result],
    file: TextIO,
    *,
    warnings: Sequence[str] = (),
    images: Sequence[str] = (),
) -> None:
    """Write the report of a run as Markdown, with the pictures named in ``images`` at the end."""
    rows = series(results)
    title = escaped(plain(captions.title(rows)))
    print(f"# {title}\n\n{escaped(captions.shared(rows, results))}", file=file)
    for section in sections.of(results, warnings):
        print(f"\n## {escaped(section.heading)}\n\n{section.markdown()}", file=file)
    for image in images:
        print(f"\n![{image.rpartition('.')[0]}]({image})", file=file)


def _markdown(run: _Run) -> dict[str, bytes]:
    file = StringIO()
    kinds = [kind for kind in ("png", "svg") if kind in run.formats]
    drawn = pictures(run.folder, run.results) if kinds else {}
    images = [f"{name}.{kinds[0]}" for name in drawn]
    write_markdown(run.results, file, warnings=run.records.warnings, images=images)
    return {"report.md": file.getvalue().encode()}


def _page(run: _Run) -> dict[str, bytes]:
    return {"report.html": html_page.render(run.folder, run.results, run.records.warnings).encode()}


def _csv(run: _Run) -> dict[str, bytes]:
    file = StringIO(newline="")
    tables.write_summary(run.results, file, run.records.missing)
    return {"summary.csv": file.getvalue().encode()}


def _drawn(run: _Run, kind: str) -> dict[str, bytes]:
    drawn = {}
    for name, draw in pictures(run.folder, run.results).items():
        file = BytesIO()
        style.save(draw(), file, kind)
        drawn[f"{name}.{kind}"] = file.getvalue()
    return drawn


def pictures(folder: Path, results: Sequence[Result]) -> "dict[str, Callable[[], Figure]]":
    """Return, by the name of each picture of a run, a function that draws the picture.

    The functions need only the records, except that the timeline also reads the samples in
    ``folder``.
    """
    found = dict(picture for one in sections.findings(results) for picture in one.pictures)
    return found | {
        "peaks": lambda: peaks_plot.draw_peaks(results),
        TIMELINE: lambda: timeline.draw_timeline(folder, results),
    }


# The function of a format returns the contents of the written files, by file name.
FORMATS: Final[dict[str, Callable[[_Run], dict[str, bytes]]]] = {
    "md": _markdown,
    "html": _page,
    "csv": _csv,
    "png": lambda run: _drawn(run, "png"),
    "svg": lambda run: _drawn(run, "svg"),
    "bmf": lambda run: {"bmf.json": exports.bencher(run.results, run.records.missing).encode()},
    "gha": lambda run: {
        "gha.json": exports.github_action_benchmark(run.results, run.records.missing).encode()
    },
    "openmetrics": lambda run: {
        "openmetrics.txt": exports.openmetrics(run.results, run.records.missing).encode()
    },
    "parquet": lambda run: {"cells.parquet": exports.parquet(run.results, run.records.missing)},
}


def _write(path: Path, content: bytes) -> Path:
    repair = "free some space, or copy the run to a writable folder"
    with run_folder.writing(path, repair=repair):
        write_bytes(path, content)  # replaces a link, and does not write through it
    return path
