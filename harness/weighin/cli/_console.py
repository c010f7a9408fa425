"""Print for the verbs: results on standard output, notes and errors on standard error.

rich is imported only where a table or a progress bar is printed, so that ``weighin list`` stays
fast.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from weighin.errors import ConfigError, HarnessError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.status import Status

STDOUT: Final = "-"
"""The value of ``--json`` that means standard output."""


def out() -> "Console":
    """Return a console on standard output, on which no table breaks a word."""
    from weighin.cli._fitting import FittingConsole

    return FittingConsole(emoji=False)


def err() -> "Console":
    """Return a console on standard error, for progress."""
    from rich.console import Console

    return Console(stderr=True, emoji=False)


def working(text: str) -> "Status":
    """Return a context manager that shows what is done, if standard error is a terminal."""
    from rich.markup import escape

    return err().status(escape(text))


def line(text: str) -> None:
    """Print one line of a result as it is."""
    click.echo(text)


def show(*parts: "RenderableType") -> None:
    """Print tables and texts with rich."""
    console = out()
    for part in parts:
        console.print(part)


def note(*texts: str) -> None:
    """Print each text as a note on a line of its own on standard error."""
    for text in texts:
        click.echo(f"note: {text}", err=True)


def error(text: str) -> None:
    """Print a line that begins with "error:" on standard error."""
    click.echo(f"{click.style('error:', fg='red', bold=True)} {text}", err=True, color=colour())


def fail(problem: HarnessError) -> None:
    """Print an error in two lines: its cause, and its repair."""
    error(problem.message)
    if problem.repair:
        click.echo(problem.repair, err=True)


def colour() -> bool | None:
    """Return False if NO_COLOR forbids colours, else None, which leaves the decision to click."""
    return False if os.environ.get("NO_COLOR") else None


def write_json(target: str, document: Any) -> None:
    """Write the document of ``--json`` to a file, or to standard output if ``target`` is "-"."""
    write(target, json.dumps(document, indent=1) + "\n")


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
            f"cannot write {path}: {problem.strerror}", "name a file that you may write"
        ) from None


def files(paths: Iterable[Path], json_file: str | None) -> None:
    """Print the paths of written files, one per line, and with ``--json -`` on standard error."""
    for path in paths:
        click.echo(str(path), err=json_file == STDOUT)
