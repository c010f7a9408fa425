"""Escape text for markdown, and format tables."""

import re
from collections.abc import Iterable, Iterator, Sequence


def plain(text: str) -> str:
    """Return the text as one line of printable characters; messages come from foreign code."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def escaped(text: str) -> str:
    """Return markdown that renders as ``text``; an underscore inside a word needs no escape."""
    text = re.sub(r"[\\`*\[\]|#~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def table_lines(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, names: int
) -> Iterator[str]:
    """Yield the lines of a table; the first ``names`` columns are text, the others numbers."""
    yield _line(map(escaped, heads))
    yield _line("---" if index < names else "---:" for index in range(len(heads)))
    for row in rows:
        yield _line(map(escaped, row))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
