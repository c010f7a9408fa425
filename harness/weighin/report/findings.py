"""Define a table that the terminal, report.md and report.html show in different forms."""

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
    """The content of one field of a table. Only the terminal shows the line breaks of the text.

    Attributes:
        kind: a word that selects the colour of the field, such as the verdict "thrashes".
        sign: a character before the text in report.html, which marks the kind.
        mark: the character before the text in report.md.
        tip: the text that report.html shows when the mouse is over the field.
    """

    text: str
    kind: str = ""
    sign: str = ""
    mark: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A table whose first ``names`` columns are names and whose other columns are figures.

    Attributes:
        label: the name of the table.
        heads: the headings of the columns. Only the terminal shows the line breaks of a heading.
        caption: the settings that all measurements in the table share.
        notes: sentences that explain the figures.
        reasons: lines that explain verdicts, such as "thrashes", by measured figures.
        details: lines for further verdicts, which only report.md lists. In report.html, each verdict
            is explained when the mouse is over its field.
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
        """Return the table in Markdown, then its notes and caption, then reasons and details as a list."""
        heads = [_one_line(head) for head in self.heads]
        rows = [[one.mark + _one_line(one.text) for one in row] for row in self.rows]
        lines = [*table_lines(heads, rows, names=self.names)]
        for text in (" ".join(self.notes), self.caption):
            lines += ["", escaped(text)] if text else []
        if reasons and (listed := [*self.reasons, *self.details]):
            lines += ["", *(f"- {escaped(line)}" for line in listed)]
        return "\n".join(lines)


def of_texts(rows: Sequence[Sequence[str]]) -> list[list[Entry]]:
    """Convert rows of plain texts to rows of table fields without colours."""
    return [[Entry(text) for text in row] for row in rows]


def terminal(found: Sequence[Found]) -> RenderableType:
    """Return several tables for a terminal, one below the other."""
    return Group(*(one.terminal() for one in found))


def markdown(found: Sequence[Found], *, reasons: bool = True) -> str:
    """Return several tables in Markdown, one below the other."""
    return "\n\n".join(one.markdown(reasons=reasons) for one in found)


def _one_line(text: str) -> str:
    return " ".join(text.split())
