"""Escape text for markdown, and format tables."""

from collections.abc import Iterable, Iterator, Sequence

from weighin.text import markdown as escaped


def plain(text: str) -> str:
    """Return a text as one line of printable characters, because a message may be foreign input."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def table_lines(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, names: int
) -> Iterator[str]:
    """Yield the lines of a table; the first ``names`` columns are text, others are numbers."""
    yield _line(map(escaped, heads))
    yield _line("---" if index < names else "---:" for index in range(len(heads)))
    for row in rows:
        yield _line(map(escaped, row))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
