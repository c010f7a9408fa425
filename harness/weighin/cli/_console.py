"""Print results on standard output, and notes and errors on standard error.

Only functions that print a table or a progress bar import rich, so that ``weighin list`` stays fast.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from weighin.errors import ConfigError, HarnessError
from weighin.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from weighin.show.table import Lines, Table

SCHEMA: Final = 1
"""The version of the documents that ``--json`` writes."""
STDOUT: Final = "-"
"""The value of ``--json`` that means standard output."""


def err() -> "Console":
    """Return a rich console that prints on standard error."""
    from rich.console import Console

    return Console(stderr=True, emoji=False, color_system=None if is_plain() else "auto")


def working(text: str) -> "Status":
    """Show ``text`` beside a spinner until the ``with`` block ends, if standard error is a terminal."""
    from rich.markup import escape

    return err().status(escape(text))


def line(text: str) -> None:
    click.echo(text)


def show(*parts: "Table | Lines | str", folds: bool = True) -> None:
    """Print tables and texts; without ``folds``, a text keeps its lines, however long they are."""
    from rich.console import Console
    from rich.text import Text

    console = Console(emoji=False, color_system=None if is_plain() else "auto")
    for part in parts:
        is_text = isinstance(part, str)
        shown = Text(printable(part, "\n\t")) if isinstance(part, str) else part
        console.print(shown, soft_wrap=is_text and not folds)


def note(*texts: str) -> None:
    """Print each text that is not empty as a line "note: TEXT" on standard error."""
    for text in filter(None, texts):
        tell(f"note: {text}")


def tell(text: str) -> None:
    """Print a line on standard error; whoever reads it no longer (2>&1 | head -1) changes no exit code."""
    with suppress(BrokenPipeError):
        click.echo(text, err=True, color=colour())


def error(text: str) -> None:
    tell(f"{click.style('error:', fg='red', bold=True)} {text}")


def fail(problem: HarnessError) -> None:
    """Print an error on standard error: its cause in one line, its repair in the next line."""
    error(problem.message)
    if problem.repair:
        tell(problem.repair)


def is_plain() -> bool:
    """Return whether NO_COLOR forbids colours, and with them bold text."""
    return bool(os.environ.get("NO_COLOR"))


def colour() -> bool | None:
    """Return False if NO_COLOR forbids colours, else None: click then decides about colours."""
    return False if is_plain() else None


def deliver(json_file: str | None, document: Mapping[str, Any], show: Callable[[], None]) -> None:
    """Show a result; with ``--json -``, write the result as JSON to standard output instead.

    With ``--json FILE``, show the result and write the JSON to the file.
    """
    if json_file != STDOUT:
        show()
    if json_file:
        write_json(json_file, document)


def write_json(target: str, document: Mapping[str, Any]) -> None:
    """Write a JSON document to a file, or to standard output if ``target`` is "-"."""
    write(target, json.dumps({"schema": SCHEMA, **document}, indent=1) + "\n")


def write(target: str | Path, text: str) -> None:
    """Write a text to a file, or to standard output if ``target`` is "-".

    Raises:
        ConfigError: the file cannot be written.
    """
    if target == STDOUT:
        click.echo(text, nl=False)
        return
    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise ConfigError(
            f"cannot write {path}: {problem.strerror}",
            "name a file in a writable folder",
        ) from None


def files(paths: Iterable[Path], json_file: str | None) -> None:
    """Print each written file's path in a line of its own; with ``--json -``, on standard error."""
    for path in paths:
        click.echo(str(path), err=json_file == STDOUT)
