"""``weighin history``: show how a metric changed from run to run."""

from pathlib import Path

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Verb

EXAMPLES = {
    "Show how the peaks of the runs in this folder changed over time": "weighin history results",
    "Draw one metric of one strategy": "weighin history results --metric ready_anon --series streaming --out out.svg",
}


@click.command(cls=Verb, examples=EXAMPLES)
@click.argument(
    "folder",
    type=_options.PATH,
    help="The folder that contains the folders of runs, such as results. `weighin history` leaves"
    " out the runs in the subfolder FOLDER/published; to show the runs there, give"
    " FOLDER/published as FOLDER.",
)
@click.option(
    "--metric",
    default="peak_rss",
    metavar="NAME",
    help="The metric to show: peak_rss, anon, peak_cgroup, ready, ...",
)
@click.option(
    "--series",
    default="",
    metavar="WORDS",
    help="Show only those series that have all of these words in their name, such as 'gpt2-xl"
    " streaming'.",
)
@click.option(
    "--out",
    "picture",
    type=_options.PATH,
    metavar="FILE",
    help="Also draw the figures into this .png or .svg file.",
)
@_options.json
def history(
    folder: Path, metric: str, series: str, picture: Path | None, json_file: str | None
) -> None:
    """Show a metric over all runs in a folder, and list the runs where the metric changed level."""
    with _console.working(f"reading the runs in {folder}"):
        from weighin.show import history as histories

        measured = histories.read(folder, metric, series.split())
    _console.note(*measured.warnings)
    if json_file != _console.STDOUT:
        _console.show(*histories.document(measured))
    pictures = []
    if picture:
        pictures.append(histories.write(measured, picture))  # imports matplotlib
    _console.files(pictures, json_file)
    if json_file:
        _console.write_json(json_file, histories.as_json(measured, pictures))
