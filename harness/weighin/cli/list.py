"""``weighin list``: strategies, models, uses, suites and isolations."""

import shutil

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Verb

EXAMPLES = (
    "weighin list",
    "weighin list strategies",
    "weighin list isolations",
    "weighin list --json -",
)
_WIDEST = 100  # columns: longer lines are hard to read


@click.command("list", cls=Verb, examples=EXAMPLES)
@click.argument(
    "kind",
    default="all",
    help="What to list: strategies, models, uses, suites or isolations. Default: all five. Only"
    " `weighin list isolations` tests which isolations work on this machine.",
)
@_options.json
def list_(kind: str, json_file: str | None) -> None:
    """List the strategies, models, uses, suites and isolations."""
    from weighin.cli import _listing

    document = _listing.document(kind)
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    text = "\n".join(_listing.lines(document, width))
    _console.deliver(json_file, lambda: document, lambda: _console.line(text))
