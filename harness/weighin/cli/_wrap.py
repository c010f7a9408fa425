"""Wrap text between words only, never inside a long word or at a hyphen."""

import textwrap
from collections.abc import Iterator, Sequence

_BESIDE_WIDTH = 70
"""In a terminal with fewer columns than this, the definition of a long term is below the term."""
_LONGEST_BESIDE = 30
"""In a wide terminal, a term of at most this many columns has its definition beside it."""


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of one paragraph; a word that is longer than ``width`` stays whole."""
    return textwrap.wrap(
        " ".join(text.split()), max(width, 1), break_long_words=False, break_on_hyphens=False
    )


def definitions(rows: Sequence[tuple[str, str]], width: int, indent: int = 2) -> Iterator[str]:
    """Yield lines of at most ``width`` columns for (term, definition) pairs.

    A definition begins in the line of its term, or in the next line if the term is too long.
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
