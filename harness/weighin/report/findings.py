"""A finding of a report: one table, which the terminal, report.md and report.html show."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighin.report.markdown import table_lines
from weighin.text import markdown as escaped

STYLES: Final = {"survives": "green", "thrashes": "yellow", "killed": "red"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One field of a table. A line break in its text is shown in the terminal only.

    Attributes:
        kind: the verdict, or another word by which report.html colours the field.
        sign: precedes the text in report.html.
        mark: precedes the text in report.md.
        tip: the text that report.html shows on hover.
    """

    text: str
    kind: str = ""
    sign: str = ""
    mark: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A table: the first ``names`` columns are names, the other columns are figures.

    Attributes:
        label: the name of the table.
        heads: the headings; a line break in one is shown in the terminal only.
        caption: the properties that all measured cells share.
        notes: what the figures mean.
        reasons: the figures behind the verdicts, one line for each.
        details: further reasons, for report.md only; report.html shows them on hover.
    """

    label: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    names: int = 1
    caption: str = ""
    notes: Sequence[str] = ()
    reasons: Sequence[str] = ()
    details: Sequence[str] = ()

    def terminal(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
        for index, heading in enumerate(self.heads):
            is_name = index < self.names
            table.add_column(Text(heading), justify="left" if is_name else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(one.text, STYLES.get(one.kind, "")) for one in row))
        said = [*self.notes, *filter(None, [self.caption])]
        return Group(table, *map(Text, self.reasons), *(Text(line, "dim") for line in said))

    def markdown(self, *, reasons: bool = True) -> str:
        """Return the table with its notes and caption, and with the reasons as a list below them."""
        heads = [_one_line(head) for head in self.heads]
        rows = [[one.mark + _one_line(one.text) for one in row] for row in self.rows]
        lines = [*table_lines(heads, rows, names=self.names)]
        for text in (" ".join(self.notes), self.caption):
            lines += ["", escaped(text)] if text else []
        if reasons and (listed := [*self.reasons, *self.details]):
            lines += ["", *(f"- {escaped(line)}" for line in listed)]
        return "\n".join(lines)


def of_texts(rows: Sequence[Sequence[str]]) -> list[list[Entry]]:
    """Return the rows of a table whose fields have no verdict."""
    return [[Entry(text) for text in row] for row in rows]


def terminal(found: Sequence[Found]) -> RenderableType:
    """Return the tables of a finding for a terminal."""
    return Group(*(one.terminal() for one in found))


def markdown(found: Sequence[Found], *, reasons: bool = True) -> str:
    """Return the tables of a finding as markdown."""
    return "\n\n".join(one.markdown(reasons=reasons) for one in found)


def _one_line(text: str) -> str:
    return " ".join(text.split())
