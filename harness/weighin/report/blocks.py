"""Define the blocks of a section of report.html; ``template`` is the file that draws a block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from weighin.report.html.table import Table


class Drawable(Protocol):
    """A part of report.html; the template of its kind writes it."""

    template: ClassVar[str]


@dataclass(frozen=True, slots=True)
class Cells:
    """The table of all series, which can be sorted and filtered."""

    template: ClassVar[str] = "cells.html"
    table: "Table"


@dataclass(frozen=True, slots=True)
class Items:
    """A list of items, each with a text and a name, which may be empty."""

    template: ClassVar[str] = "items.html"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Output of another program, shown as it is."""

    template: ClassVar[str] = "preformatted.html"
    text: str


@dataclass(frozen=True, slots=True)
class Explained:
    """A table with the name, unit, meaning and accuracy of each figure."""

    template: ClassVar[str] = "explained.html"
    figures: Sequence[tuple[str, str, str, str]]
