"""Write tables and lists in Markdown."""

from collections.abc import Iterable, Iterator, Sequence

from weighin.text import markdown as escaped


def plain(text: str) -> str:
    """Return a text as one line of printable characters; error messages may contain any others."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def scaled(value: float | None, scale: float | None, digits: int) -> str:
    """Return ``value / scale`` as text; "-" without a value, or if the scale is None or 0."""
    return "-" if value is None or not scale else f"{value / scale:.{digits}f}"


def table_lines(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, names: int
) -> Iterator[str]:
    """Yield the lines of a table; the first ``names`` columns are aligned left, the others right."""
    yield _line(map(escaped, heads))
    yield _line("---" if index < names else "---:" for index in range(len(heads)))
    for row in rows:
        yield _line(map(escaped, row))


def by_reason(reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list item for each different reason, with all names in ``reasons`` that have this reason.

    Two reasons that differ only in the name of the strategy count as one reason: "dcp divides a
    load" and "staggered divides a load" become one item.
    """
    groups: dict[str, dict[str, None]] = {}
    for name, reason in reasons:
        shared = reason.removeprefix(f"{name} ").replace(f" and {name} ", " and ")
        groups.setdefault(shared, {})[name] = None
    for shared, names in groups.items():
        yield f"* {escaped(', '.join(names))}: {escaped(plain(shared))}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
