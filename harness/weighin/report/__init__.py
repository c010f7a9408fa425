"""A run's records as a report to read: report.html, report.md, summary.csv, peaks.png and timeline.png.

Only reads the run's folder. The one place that imports pandas and matplotlib, and only when
something is written.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weighin.record import Result

if TYPE_CHECKING:
    from rich.console import RenderableType


def terminal_table(results: Sequence[Result], warnings: Sequence[str] = ()) -> "RenderableType":
    """Return the report of a run for a terminal; what it has found stands last, where one looks."""
    from rich.console import Group
    from rich.text import Text

    from weighin.report import sections  # pandas takes half a second to import

    parts: list[RenderableType] = [] if results else [Text("No cells were measured.")]
    for one in sorted(sections.of(results, warnings), key=lambda one: one.is_found):
        parts += [Text(one.heading, style="bold"), one.terminal()]
    return Group(*parts)


def terminal_floors(results: Sequence[Result]) -> "RenderableType":
    """Return the RAM floors of a search for a terminal; see ``floors.terminal_floors``."""
    from weighin.report import floors

    return floors.terminal_floors(results)


def write_report(run: Path, formats: Sequence[str] = ()) -> list[Path]:
    """Write the report into the run's own folder; return the paths of what was written.

    ``formats`` are keys of ``writing.FORMATS``; none means ``writing.DEFAULT``. Of a damaged run,
    what is whole is written.

    Raises:
        RecordError: the run's records cannot be read, or its folder cannot be written.
        UnknownName: there is no such format.
    """
    from weighin.report import writing  # pandas and matplotlib take a second to import

    return writing.write(run, formats or writing.DEFAULT)
