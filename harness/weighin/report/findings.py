"""What a run has found beside its table of all series: forward passes, survival, floors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from weighin.record import Result
from weighin.records.survival import matrices
from weighin.report import floors, notebook, passes, survival, survival_plots
from weighin.report.html import sections
from weighin.report.html.blocks import Drawable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Finding:
    """One section of a report. ``pictures`` are their names, and what draws each."""

    heading: str
    is_there: Callable[[Sequence[Result]], bool]
    terminal: Callable[[Sequence[Result]], "RenderableType"]
    markdown: Callable[[Sequence[Result]], str]
    html: Callable[[Sequence[Result]], list[Drawable]]
    pictures: tuple[tuple[str, Callable[[Sequence[Result]], "Figure"]], ...] = ()


def is_sweep(results: Sequence[Result]) -> bool:
    """Tell whether limits were swept; a search for floors tries other limits in each row."""
    return not floors.has_data(results) and bool(matrices(results))


_ALL: Final = (
    Finding(
        "Forward passes",
        passes.has_data,
        passes.terminal_passes,
        passes.markdown_passes,
        sections.of_passes,
    ),
    Finding(
        "Survival",
        is_sweep,
        survival.terminal_survival,
        survival.markdown_reasons,
        sections.of_survival,
        (
            ("survival", survival_plots.draw_survival),
            ("time-over-limit", survival_plots.draw_times),
        ),
    ),
    Finding(
        "Beside the notebook's published figures",
        notebook.has_data,
        notebook.terminal_notebook,
        notebook.markdown_notebook,
        sections.of_notebook,
    ),
    Finding(
        "RAM floors",
        floors.has_data,
        floors.terminal_floors,
        floors.markdown_reasons,
        sections.of_floors,
    ),
)


def findings(results: Sequence[Result]) -> list[Finding]:
    """Return what there is to tell of a run, in the order in which it is told."""
    return [finding for finding in _ALL if finding.is_there(results)]
