"""The command line's verbs that show what was measured: ``weighin report|history``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from weighin.cli._arguments import names
from weighin.cli._shared import err, out
from weighin.record import Result

REPORT_EXAMPLES = (
    "Examples:\n\n"
    "weighin report results/20261120T093000-gpt2-xl-8GiB\n\n"
    "weighin report results/20261120T093000-gpt2-xl-8GiB --format html,svg\n\n"
    "weighin report results/RUN --format bmf,gha,openmetrics,parquet"
)

HISTORY_EXAMPLES = (
    "Examples:\n\n"
    "weighin history results\n\n"
    "weighin history results --metric ready_anon --series streaming --out ready.svg"
)


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    formats: Annotated[
        str,
        typer.Option(
            "--format",
            help="Divided by commas: md, html, csv, png, svg; bmf (Bencher), gha"
            " (github-action-benchmark), openmetrics, parquet.",
        ),
    ] = "md,html,csv,png",
) -> None:
    """Draw a run again: the table here; report.html, report.md, summary.csv and plots in its folder."""
    from weighin.records import run_folder

    records = run_folder.read_whole(run)
    if records.damage and not records.results:
        raise records.damage
    for warning in records.warnings:
        err.print(f"note: {warning}", markup=False, highlight=False, soft_wrap=True)
    show(run, records.results, names([formats]), records.warnings)
    if records.damage:
        raise records.damage  # what is whole was reported; a script shall know that it is not all


def show(
    run: Path,
    results: Sequence[Result],
    formats: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> None:
    """Print the report of a run, and write it; ``formats``: none means the usual ones."""
    from weighin.report import terminal_table, write_report

    out.print(terminal_table(results, warnings))
    for path in write_report(run, formats):
        out.print(str(path), highlight=False, soft_wrap=True)


def history(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, such as results.")],
    metric: Annotated[
        str, typer.Option(help="What to follow: peak_rss, anon, peak_cgroup, ready, ...")
    ] = "peak_rss",
    series: Annotated[
        str, typer.Option(help="Only series whose name has all of these words.")
    ] = "",
    picture: Annotated[
        Path | None,
        typer.Option("--out", help="The drawing, .png or .svg. Default: history-METRIC.png there."),
    ] = None,
) -> None:
    """Follow a metric over all runs in a folder, and mark where it changed: commit, torch, machine."""
    from weighin.report import history as histories  # pandas, scipy and matplotlib
    from weighin.report import history_plot

    found = histories.read(folder, metric, series.split())
    for warning in found.warnings:
        err.print(f"note: {warning}", markup=False, highlight=False, soft_wrap=True)
    out.print(histories.terminal_table(found))
    path = history_plot.draw(found, picture or folder / f"history-{found.metric.name}.png")
    out.print(str(path), highlight=False, soft_wrap=True)
