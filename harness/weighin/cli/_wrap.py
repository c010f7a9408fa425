"""Wrap text between words only, never inside a long word or at a hyphen."""

import textwrap
from collections.abc import Iterator, Sequence

_BESIDE_WIDTH = 70
"""Minimum width in columns at which a definition stands beside a long term, not below it."""
_LONGEST_BESIDE = 30


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of one paragraph; a word that is longer than ``width`` stays whole."""
    return textwrap.wrap(
        " ".join(text.split()), max(width, 1), break_long_words=False, break_on_hyphens=False
    )


def definitions(rows: Sequence[tuple[str, str]], width: int, indent: int = 2) -> Iterator[str]:
    """Yield the lines of a list of terms with their definitions, in ``width`` columns.

    A definition begins beside its term, or on the next line if the term is too long.
    """
    longest = max((len(term) for term, _ in rows), default=0)
    limit = _LONGEST_BESIDE if width >= _BESIDE_WIDTH else width // 4
    column = indent + min(longest, limit) + 2
    if longest > limit and width < _BESIDE_WIDTH:
        column = indent + 4
    for term, definition in rows:
        head = " " * indent + term
        lines = wrap(definition, width - column)
        if lines and len(head) + 2 <= column:
            yield head.ljust(column) + lines.pop(0)
        else:
            yield head
        yield from (" " * column + line for line in lines)
