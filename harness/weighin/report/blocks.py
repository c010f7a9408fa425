"""The blocks of which a section of report.html consists; ``template`` is the file that draws one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from weighin.report.html.table import Table


class Drawable(Protocol):
    """A block: anything that a template draws."""

    template: ClassVar[str]


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One field of a table; ``kind`` is its verdict, for colours; ``tip`` is its text on hover."""

    text: str
    kind: str = ""
    sign: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A table of a finding; its first ``names`` columns are names, the others figures."""

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
    """A list; each item has a name, which may be empty, and a text."""

    template: ClassVar[str] = "items.html"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Output of another program."""

    template: ClassVar[str] = "preformatted.html"
    text: str


@dataclass(frozen=True, slots=True)
class Explained:
    """A table of figures: name, unit, meaning and accuracy of each."""

    template: ClassVar[str] = "explained.html"
    figures: Sequence[tuple[str, str, str, str]]
