"""``weighin compare``: show the figures of several runs side by side."""

from pathlib import Path

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Verb

EXAMPLES = {
    "Compare each measurement of two runs, such as runs of two versions of torch": "weighin compare results/torch-2.13 results/torch-2.14",
    "Compare two metrics only": "weighin compare results/main results/branch --metrics above_import,ready",
    "Compare the machines of one run": "weighin compare results/fleet --by machine",
    "Compare the versions of torch that several runs measured": "weighin compare results/* --by torch",
}


@click.command(cls=Verb, examples=EXAMPLES)
@click.argument(
    "runs",
    type=_options.PATH,
    nargs=-1,
    required=True,
    help="Folders of runs. The tables compare each run with the first run on the command line.",
)
@click.option(
    "--by",
    default="run",
    metavar="KEY",
    help="What to compare: run (the folders), machine (the kinds of machine), commit, or a setting of"
    " the environment such as torch, kernel or python.",
)
@click.option(
    "--metrics",
    default="",
    metavar="NAMES",
    help="Show only some metrics, such as --metrics above_import,ready.",
)
@_options.markdown
@_options.json
def compare(
    runs: tuple[Path, ...], by: str, metrics: str, markdown: Path | None, json_file: str | None
) -> None:
    """Show the figures of several runs side by side, such as two commits or two versions of torch."""
    from weighin.gate import compare as comparing
    from weighin.gate import tables

    with _console.working(f"comparing the figures of {len(runs)} runs"):
        comparison = comparing.compare(runs, _options.names([metrics]), by)
    _console.note(*comparison.warnings)
    shown = tables.compared_terminal(comparison)
    _console.deliver(json_file, comparison.as_json(), lambda: _console.show(shown))
    if markdown:
        _console.write(markdown, tables.compared_markdown(comparison))
