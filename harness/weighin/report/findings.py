"""The findings of a run, beside its table of all series: forward passes, survival, floors."""

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
    """One section of a report. ``pictures`` are pairs of a name and the function that draws it."""

    heading: str
    has_data: Callable[[Sequence[Result]], bool]
    terminal: Callable[[Sequence[Result]], "RenderableType"]
    markdown: Callable[[Sequence[Result]], str]
    html: Callable[[Sequence[Result]], list[Drawable]]
    pictures: tuple[tuple[str, Callable[[Sequence[Result]], "Figure"]], ...] = ()


def is_sweep(results: Sequence[Result]) -> bool:
    """Tell whether a run swept limits; a search for floors does not, its rows have other limits."""
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
        "Comparison with the notebook's published figures",
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
    """Return the findings for which a run has data, in the order of the report."""
    return [finding for finding in _ALL if finding.has_data(results)]
