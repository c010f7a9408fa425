"""What the sections of report.html consist of; ``template`` is the file that draws a block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from weighin.report.html.table import Table


class Drawable(Protocol):
    """Anything that a template draws."""

    template: ClassVar[str]


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One field of a table; ``kind`` is its verdict, for colours, and ``tip`` says why."""

    text: str
    kind: str = ""
    sign: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A table with names in its first column; ``names`` columns are no figures."""

    template: ClassVar[str] = "found.html"
    label: str
    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[ListEntry]]
    names: int
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Cells:
    """The table of all series, which can be sorted and filtered."""

    template: ClassVar[str] = "cells.html"
    table: "Table"


@dataclass(frozen=True, slots=True)
class Items:
    """A list; of each item, what it is about, or nothing, and what is said."""

    template: ClassVar[str] = "items.html"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Lines of another program."""

    template: ClassVar[str] = "preformatted.html"
    text: str


@dataclass(frozen=True, slots=True)
class Explained:
    """Of each figure: its name, its unit, what it is, and how exact."""

    template: ClassVar[str] = "explained.html"
    figures: Sequence[tuple[str, str, str, str]]
