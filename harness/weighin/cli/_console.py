"""Print results on standard output, notes and errors on standard error; import rich only for tables."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from weighin.errors import HarnessError
from weighin.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from weighin.show.table import Lines, Table

SCHEMA: Final = 1
"""The version of the documents that ``--json`` writes."""
STDOUT: Final = "-"
"""The value of ``--json`` that means standard output."""


def console(*, stderr: bool = True) -> "Console":
    from rich.console import Console

    # NO_COLOR forbids colours, and with them bold text.
    system = None if colour() is False else "auto"
    return Console(stderr=stderr, emoji=False, color_system=system)  # type: ignore[arg-type]


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` beside a spinner in the block, which gets a function that replaces the text."""
    from rich.markup import escape

    with console().status(escape(text)) as status:
        yield lambda other: status.update(escape(other))


def show(*parts: "Table | Lines | str", folds: bool = True) -> None:
    """Print tables and texts; without ``folds``, a text keeps its lines, however long they are."""
    for part in parts:
        if isinstance(part, str) and not folds:
            click.echo(printable(part, "\n\t"))
            continue
        from rich.text import Text

        text = Text(printable(part, "\n\t")) if isinstance(part, str) else part
        console(stderr=False).print(text)


def note(*texts: str) -> None:
    """Print each text that is not empty as a line "note: TEXT" on standard error."""
    for text in filter(None, texts):
        tell(f"note: {text}")


def tell(text: str) -> None:
    """Print a line on standard error; a closed pipe (2>&1 | head -1) does not change the exit code."""
    with suppress(BrokenPipeError):
        click.echo(text, err=True, color=colour())


def error(text: str) -> None:
    tell(f"{click.style('error:', fg='red', bold=True)} {text}")


def fail(problem: HarnessError) -> None:
    error(problem.message)
    if problem.repair:
        tell(problem.repair)


def colour() -> bool | None:
    """Return False if NO_COLOR forbids colours, else None: click then decides about colours."""
    return False if os.environ.get("NO_COLOR") else None


def deliver(
    target: str | None,
    document: Mapping[str, Any],
    *shown: "Table | Lines | str",
    folds: bool = True,
) -> None:
    """Show a result, and with ``--json FILE`` also write it as JSON; with ``--json -``, print only JSON."""
    if target != STDOUT:
        show(*shown, folds=folds)
    if target:
        write(target, json.dumps({"schema": SCHEMA, **document}, indent=1) + "\n")


def files(paths: Iterable[Path], target: str | None) -> None:
    """Print each written file's path in a line of its own; with ``--json -``, on standard error."""
    for path in paths:
        click.echo(str(path), err=target == STDOUT)


def write(target: str | Path, text: str) -> None:
    if target == STDOUT:
        click.echo(text, nl=False)
        return
    from weighin.records.run_folder import writing  # imports msgspec, which takes time

    with writing(path := Path(target), repair="free space, or name a file in a writable folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
