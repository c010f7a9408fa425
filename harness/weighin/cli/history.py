"""``weighin history``: a metric over runs."""

from pathlib import Path

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Argument, Verb

EXAMPLES = (
    "weighin history results",
    "weighin history results --metric ready_anon --series streaming --out ready.svg",
)


@click.command(cls=Verb, examples=EXAMPLES)
@click.argument(
    "folder",
    cls=Argument,
    type=_options.PATH,
    help="The folder that contains the folders of runs, such as results.",
)
@click.option(
    "--metric",
    default="peak_rss",
    metavar="NAME",
    help="The metric to plot: peak_rss, anon, peak_cgroup, ready, ...",
)
@click.option(
    "--series",
    default="",
    show_default=False,
    metavar="WORDS",
    help="Plot only series whose name contains all of these words.",
)
@click.option(
    "--out",
    "picture",
    type=_options.PATH,
    metavar="FILE",
    help="The file of the plot, .png or .svg. Default: history-METRIC.png in FOLDER.",
)
@_options.json
def history(
    folder: Path, metric: str, series: str, picture: Path | None, json_file: str | None
) -> None:
    """Plot a metric over all runs in a folder, and list the runs where the metric changed level."""
    from weighin.report import history as histories  # pandas, scipy and matplotlib
    from weighin.report import history_plot
    from weighin.report.run_json import of_history

    measured = histories.read(folder, metric, series.split())
    _console.note(*measured.warnings)
    if json_file != _console.STDOUT:
        _console.show(histories.terminal_table(measured))
    path = history_plot.draw(measured, picture or folder / f"history-{measured.metric.name}.png")
    _console.files([path], json_file)
    if json_file:
        _console.write_json(json_file, of_history(measured, path))
