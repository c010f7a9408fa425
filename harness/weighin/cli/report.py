"""``weighin report``: show a run's figures, and write the run's report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Verb

if TYPE_CHECKING:
    from weighin.records.run_folder import Records

EXAMPLES = {
    "Write the report of a run again": "weighin report results/20261120T093000-gpt2-xl-8GiB",
    "Write only the HTML page and the pictures": "weighin report results/20261120T093000-gpt2-xl-8GiB --format html,svg",
    "Write files for other tools": "weighin report results/RUN --format bmf,gha,parquet",
    "Print the report's figures as JSON": "weighin report results/RUN --json -",
}


@click.command(cls=Verb, examples=EXAMPLES)
@click.argument("run", type=_options.PATH, help="The folder of a run.")
@click.option(
    "--format",
    "formats",
    default="md,html,csv,png",
    metavar="NAMES",
    help="Formats of the report, comma-separated: md, html, csv, png, svg; bmf (Bencher), gha"
    " (GitHub Action Benchmark), parquet.",
)
@_options.json
def report(run: Path, formats: str, json_file: str | None) -> None:
    """Show a run, and write report.html, report.md, summary.csv and plots into its folder."""
    from weighin.records import run_folder

    with _console.working(f"reading {run}"):
        records = run_folder.read_whole(run)
    if records.damage and not records.results:
        raise records.damage
    _console.note(*records.warnings)
    show_run(run, records, _options.names([formats]), json_file=json_file)
    if records.damage:
        raise records.damage  # the report has the readable records only, so the exit code is not 0


def show_run(
    run: Path, records: "Records", formats: Sequence[str] = (), *, json_file: str | None
) -> None:
    """Print a run's table, and write the run's report in ``formats``, or in the default formats if
    ``formats`` is empty.
    """
    with _console.working("computing the table"):
        from weighin.records.run import Measured
        from weighin.show.report import as_json, terminal
        from weighin.show.write import checked, write

        formats = checked(formats)
        measured = Measured.of(run, records)
        document = terminal(measured)
    if json_file != _console.STDOUT:
        _console.show(*document)
    with _console.working(f"writing the report of {run}"):
        files = write(measured, formats)
    _console.files(files, json_file)
    if json_file:
        _console.write_json(json_file, as_json(measured, files))
