"""Write the report of a run: report.html, report.md, summary.csv, peaks.png and timeline.png.

``report`` reads only the folder of the run. ``report`` is the only package of weighin that imports
matplotlib, to draw a picture, and pandas, to write cells.parquet; other reports need neither.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weighin.record import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

    from weighin.records.run_folder import Records


def terminal_table(results: Sequence[Result], warnings: Sequence[str] = ()) -> "RenderableType":
    """Return the report of a run for a terminal; the findings come last, just above the prompt."""
    from rich.console import Group
    from rich.text import Text

    from weighin.report import sections

    parts: list[RenderableType] = [] if results else [Text("No cells were measured.")]
    for section in sorted(sections.of(results, warnings), key=lambda section: section.is_found):
        parts += [Text(section.heading, style="bold"), section.terminal()]
    return Group(*parts)


def terminal_floors(results: Sequence[Result]) -> "RenderableType":
    """Return the RAM floors of a search for a terminal; see ``floors.found``."""
    from weighin.report import findings, floors

    return findings.terminal(floors.found(results))


def write_report(
    run: Path, formats: Sequence[str] = (), records: "Records | None" = None
) -> list[Path]:
    """Write the report into the run's own folder, and return the paths of the written files.

    ``formats`` are keys of ``writing.FORMATS``; an empty sequence means ``writing.DEFAULT``.
    ``records`` are those of the run, if they were read before. The report of a damaged run contains
    the run's intact records.

    Raises:
        RecordError: the run's records cannot be read, or the run's folder cannot be written.
        UnknownName: ``writing.FORMATS`` does not contain a requested format.
    """
    from weighin.records import run_folder
    from weighin.report import writing

    return writing.write(run, records or run_folder.read_whole(run), formats or writing.DEFAULT)
