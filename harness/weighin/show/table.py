"""A table, and lines of text: what every verb prints, in a terminal (``console.print(*document)``), in Markdown
or in HTML.
"""

import html
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from weighin import text as texts
from weighin.records.metrics import grouped
from weighin.text import printable

_Item = TypeVar("_Item")

KINDS: Final = {
    "": ("", "", ""),
    "survives": ("green", "🟢", "✓"),
    "thrashes": ("yellow", "🟡", "≈"),
    "killed": ("red", "🔴", "✗"),
    "ok": ("green", "", "✓"),
    "failed": ("red", "", "✗"),
    "skipped": ("dim", "", "-"),
    "dim": ("dim", "", ""),
    "same": ("dim", "✅", ""),
    "better": ("green", "✅", ""),
    "new": ("cyan", "🆕", ""),
    "changed": ("yellow", "⚠️", ""),
    "worse": ("bold red", "❌", ""),
}
"""By the kind of an entry: its style in a terminal, and its sign in Markdown and in HTML."""
_STYLES: Final = {
    "dim": "dim", "warning": "yellow", "passed": "bold green", "failed": "bold red", "result": "bold",
}  # fmt: skip
"""The style of lines in a terminal, by their kind."""


@dataclass(frozen=True, slots=True)
class Entry:
    text: str = "-"
    spread: str = ""  # the range of a figure, or another text that stands below the figure
    kind: str = ""  # a key of ``KINDS``, which gives the entry a colour and a sign
    tip: str = ""  # an explanation, which only HTML shows: while the mouse is over the entry
    key: float | None = None  # the number by which HTML sorts the rows; without one, the text


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers, or of names, which are aligned left and may be wrapped."""

    title: str
    unit: str = ""
    is_name: bool = False
    rank: int = 0  # a terminal that is too narrow leaves out the columns of the highest rank first


@dataclass(frozen=True, slots=True)
class Table:
    """``notes`` explain the figures; ``reasons`` explain single entries, such as a verdict."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Entry | str]]
    notes: Sequence[str] = ()
    reasons: Sequence[str] = ()

    @classmethod
    def of(
        cls, heads: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 1, title: str = ""
    ) -> "Table":
        """Return a table of texts, whose first ``names`` columns are names."""
        columns = [Column(head, is_name=at < names) for at, head in enumerate(heads)]
        return cls(title, columns, [*rows])

    @property
    def entries(self) -> list[list[Entry]]:
        return [[Entry(one) if isinstance(one, str) else one for one in row] for row in self.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the table without breaking a word or a number, with as few columns left out as needed."""
        if self.title:
            yield _text(f"\n{self.title}", "bold")
        most, least = self._widths(), dict(enumerate(self._widths(is_narrow=True)))
        if sum(least.values()) + len(least) + 1 > options.max_width:
            # A word that fills the screen would leave no room: it is cut off, and not broken, because a
            # log may take what begins a line for a command.
            for at, column in enumerate(self.columns):
                if column.is_name:
                    least[at] = min(least[at], options.max_width // 2)
        # Those of the highest rank are left out first, then the last ones, but never the first.
        able = sorted([*least][1:], key=lambda at: (self.columns[at].rank, at))
        left_out: list[str] = []
        while True:
            padding = 1 if sum(least.values()) + 2 * len(least) <= options.max_width else 0
            around = (1 + padding) * len(least) + 1 - padding
            if sum(least.values()) + around <= options.max_width or not able:
                break
            left_out.append(" ".join(self.columns[place := able.pop()].title.split()))
            del least[place]
        # The room that is left goes, space by space, to the narrowest column that can use it.
        widths, wanted = [*least.values()], [most[at] for at in least]
        for _ in range(min(options.max_width - around, sum(wanted)) - sum(widths)):
            able = [at for at, width in enumerate(widths) if width < wanted[at]]
            widths[min(able, key=widths.__getitem__)] += 1
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding), collapse_padding=True)  # fmt: skip
        for at, width in zip(least, widths, strict=True):
            side: Literal["left", "right"] = "left" if self.columns[at].is_name else "right"
            drawn.add_column(
                _text(_head(self.columns[at])), justify=side, overflow="ellipsis", width=width
            )
        for row in self.entries:
            fields = [_text(row[at].text, KINDS[row[at].kind][0]) for at in least]
            spreads = [f"\n{row[at].spread}" if row[at].spread else "" for at in least]
            drawn.add_row(
                *(one.append(spread, "dim") for one, spread in zip(fields, spreads, strict=True))
            )
        yield drawn
        for reason in self.reasons:
            yield _text(reason)
        if left_out:
            apart = "; " if any("," in title for title in left_out) else ", "
            where = f"Left out at {options.max_width} columns: {apart.join(left_out)}."
            yield _text(f"{where} A wider terminal shows them.", "dim")
        for note in self.notes:
            yield _text(note, "dim")

    def _widths(self, *, is_narrow: bool = False) -> list[int]:
        """Return the width of each column; with ``is_narrow``, of a name only that of its longest word."""
        widths = [0] * len(self.columns)
        heads = [Entry(_head(column)) for column in self.columns]
        for row in [heads, *self.entries]:
            for at, (one, column) in enumerate(zip(row, self.columns, strict=True)):
                text = printable(f"{one.text}\n{one.spread}", "\n")
                parts = text.split() if is_narrow and column.is_name else text.split("\n")
                widths[at] = max([widths[at], *map(cell_len, parts)])
        return widths

    def markdown(self) -> str:
        """Return the table in Markdown without its title; each line break becomes a space."""

        def line(cells: Iterable[str]) -> str:
            return f"| {' | '.join(cells)} |"

        lines = [
            line(_joined(column.title, column.unit) for column in self.columns),
            line("---" if column.is_name else "---:" for column in self.columns),
        ]
        for row in self.entries:
            marked = ((KINDS[e.kind][1], e.text, e.spread and f"({e.spread})") for e in row)
            lines.append(line(_joined(*parts) for parts in marked))
        if self.notes:
            lines += ["", escaped("\n\n".join(self.notes))]
        if self.reasons:
            lines += ["", *(f"- {escaped(reason)}" for reason in self.reasons)]
        return "\n".join(lines)

    def html(self) -> str:
        """Return the table as HTML without its title; a script of the page sorts its rows."""
        heads = "".join(
            ('<th scope="col">' if column.is_name else '<th scope="col" class="number">')
            + escape(column.title)
            + (f" <small>{escape(column.unit)}</small>" if column.unit else "")
            + "</th>"
            for column in self.columns
        )
        rows = [
            "".join(
                _field(entry, column, "td" if at else "th")
                for at, (entry, column) in enumerate(zip(row, self.columns, strict=True))
            )
            for row in self.entries
        ]
        body = "".join(f"<tr>{row}</tr>\n" for row in rows)
        hints = (*self.reasons, *self.notes)
        notes = "".join(f'<p class="hint">{escape(one)}</p>\n' for one in hints)
        label = escape(self.title or "table")
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">\n'
            f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>\n{notes}"
        )


@dataclass(frozen=True, slots=True)
class Lines:
    """Sentences, or with the kind "verbatim" a text whose line breaks and spaces are kept."""

    title: str
    lines: Sequence[str]
    kind: Literal["", "dim", "warning", "passed", "failed", "result", "verbatim", "answer"] = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield _text(f"\n{self.title}", "bold")
        for line in self.lines:
            yield _text(line, _STYLES.get(self.kind, ""))

    def markdown(self) -> str:
        if self.kind == "verbatim":
            text = "\n".join(self.lines).replace("`", "'")
            return f"```\n{text}\n```"
        if self.kind == "answer":
            return "\n\n".join(map(escaped, self.lines))
        return "\n".join(f"- {escaped(line)}" for line in self.lines)

    def html(self) -> str:
        if self.kind == "verbatim":
            return f'<pre class="scroll" tabindex="0">{escape(chr(10).join(self.lines))}</pre>\n'
        if self.kind == "answer":
            return "".join(f"<p>{escape(line)}</p>\n" for line in self.lines)
        items = "".join(f"<li>{escape(line)}</li>\n" for line in self.lines)
        return f"<ul>\n{items}</ul>\n"


Document = Sequence[Table | Lines]


def markdown(document: Document, level: int = 2) -> str:
    """Return a document in Markdown, without empty ``Lines``; an empty ``Table`` stays."""
    return "\n\n".join(
        (f"{'#' * level} {escaped(part.title)}\n\n" if part.title else "") + part.markdown()
        for part in document
        if isinstance(part, Table) or part.lines
    )


def pivot(
    title: str,
    items: Iterable[_Item],
    row: Callable[[_Item], Hashable],
    column: Callable[[_Item], Hashable],
    entry: Callable[[Sequence[_Item]], Entry | str],
    *,
    columns: Iterable[Hashable] = (),
    row_title: Callable[[Any], str] = str,
    column_title: Callable[[Any], str] = str,
    name: str = "strategy",
    notes: Sequence[str] = (),
    reasons: Sequence[str] = (),
) -> Table:
    """Return a table with a row for each value of ``row``, a column for each of ``column``, and an ``entry``
    of the items there. Two values may have the same title: they remain two rows, or two columns.
    """
    items = list(items)
    across = list(columns) or list(dict.fromkeys(map(column, items)))
    rows: list[list[Entry | str]] = []
    for down, ours in grouped(items, row).items():
        found = grouped(ours, column)
        fields = (entry(found[one]) if one in found else "-" for one in across)
        rows.append([row_title(down), *fields])
    heads = [Column(name, is_name=True), *(Column(column_title(one)) for one in across)]
    return Table(title, heads, rows, notes, reasons)


def _head(column: Column) -> str:
    """Return a heading for a terminal, with one word in each line, so that many columns fit."""
    title = column.title if column.is_name else "\n".join(column.title.split())
    return f"{title}\n{column.unit}" if column.unit else title


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text, "\n"), style)


def _joined(*parts: str) -> str:
    return escaped(" ".join(" ".join(parts).split()))


def _field(entry: Entry, column: Column, tag: str) -> str:
    """Return one field of a table as HTML; the first of a row is its heading."""
    classes = " ".join(filter(None, [entry.kind, "" if column.is_name else "number"]))
    about = f' class="{classes}"' if classes else ""
    about += f' data-tip="{escape(entry.tip)}"' if entry.tip else ""
    about += f' data-key="{entry.key!r}"' if entry.key is not None else ""
    sign = KINDS[entry.kind][2]
    sign = f'<span aria-hidden="true">{sign}</span> ' if sign else ""
    spread = f"<small>{escape(entry.spread)}</small>" if entry.spread else ""
    scope = ' scope="row"' if tag == "th" else ""
    return f"<{tag}{scope}{about}>{sign}{escape(entry.text)}{spread}</{tag}>"


def escape(text: str) -> str:
    """Return a text for HTML; a stranger's text may contain markup and control characters."""
    return html.escape(printable(text, "\n"))


def escaped(text: str) -> str:
    return texts.markdown(printable(text, "\n"))


def listed(names: Sequence[str]) -> str:
    """Return names as a part of a sentence: "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
