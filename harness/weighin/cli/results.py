"""The verbs that read the records of runs: ``weighin report``, ``compare``, ``check`` and ``history``."""

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Verb
from weighin.errors import ConfigError

if TYPE_CHECKING:
    from weighin.gate.check import GateResult, Group
    from weighin.records.run_folder import Records


@click.command(
    cls=Verb,
    examples={
        "Write the report of a run again": "weighin report results/20261120T093000-gpt2-xl-8GiB",
        "Write only the HTML page and the pictures": "weighin report results/20261120T093000-gpt2-xl-8GiB --format html,svg",
        "Write files for other tools": "weighin report results/RUN --format bmf,gha,parquet",
        "Print the report's figures as JSON": "weighin report results/RUN --json -",
    },
)
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


@click.command(
    cls=Verb,
    examples={
        "Compare each measurement of two runs, such as runs of two versions of torch": "weighin compare results/torch-2.13 results/torch-2.14",
        "Compare two metrics only": "weighin compare results/main results/branch --metrics above_import,ready",
        "Compare the machines of one run": "weighin compare results/fleet --by machine",
        "Compare the versions of torch that several runs measured": "weighin compare results/* --by torch",
    },
)
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

    with _console.working(f"comparing the figures of {len(runs)} runs"):
        comparison = comparing.compare(runs, _options.names([metrics]), by)
    _console.note(*comparison.warnings)
    document = comparison.as_json()
    _console.deliver(json_file, document, lambda: _console.show(*comparison.terminal()))
    if markdown:
        _console.write(markdown, comparison.markdown())


@click.command(
    cls=Verb,
    examples={
        "Write the peaks of a run to a new baseline": "weighin check results/RUN --baseline baseline.json --update",
        "Fail if a peak grew beyond the baseline": "weighin check results/RUN --baseline baseline.json",
        "Fail if the strategy streaming needs more than 2 GiB of anonymous memory": 'weighin check results/RUN --budget "streaming: anon <= 2GiB"',
        "Check a budget for each strategy, and expect that the strategy baseline ends with a time-out": 'weighin check results/RUN --budget "anon <= 2GiB" --expect baseline=timeout',
        "Check in a GitHub workflow, and write the findings to a file as well": "weighin check results/RUN --baseline baseline.json --github --json c.json",
    },
    codes=True,
)
@click.argument(
    "runs",
    type=_options.PATH,
    nargs=-1,
    required=True,
    help="The folder of a run. weighin treats the runs in several folders as one run with more"
    " repeats.",
)
@click.option(
    "--baseline",
    type=_options.PATH,
    metavar="FILE",
    help="The file of earlier figures with which weighin compares the run. --update writes it as JSON."
    " Commit this file to your repository, so that later checks compare with the same figures.",
)
@click.option(
    "--update",
    is_flag=True,
    help="Before the comparison, write the run's figures and outcomes into the baseline file, and show"
    " what changed in it.",
)
@click.option(
    "--budget",
    multiple=True,
    metavar="BUDGET",
    help='An upper bound for a metric of the run, such as "peak_rss <= 1.1 x model + 64MiB above'
    ' import" (metrics: peak_rss, anon, peak_cgroup, ready ...). Repeatable.',
)
@click.option(
    "--expect",
    multiple=True,
    metavar="OUTCOMES",
    help="Outcomes that you expect in place of ok, comma-separated as STRATEGY=OUTCOME. With"
    " baseline=oom_killed, the check passes if the kernel kills the strategy baseline for lack of"
    " memory.",
)
@click.option(
    "--tolerance",
    multiple=True,
    metavar="TOLERANCE",
    help='How much a metric may exceed the baseline file, such as "ready=30% 1s" (the larger of the'
    ' two), "anon=64MiB both" (every change counts) or "load=off" (not compared). Repeatable.',
)
@click.option(
    "--setting",
    multiple=True,
    metavar="NAME=POLICY",
    help="What another kernel, processor or other setting means: kernel=ignore, cpu=fail or"
    " settings.*=warn. Repeatable.",
)
@click.option(
    "--metrics",
    default="",
    metavar="NAMES",
    help="Compare only some metrics with the baseline file, such as --metrics"
    " above_import,ready_anon.",
)
@click.option(
    "--partial",
    is_flag=True,
    help="Judge the measured part of a stopped run. Without --partial, the check of such a run"
    " fails.",
)
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Show all figures of the run, not only those that differ from the baseline file.",
)
@click.option(
    "--github",
    is_flag=True,
    help="For GitHub Actions: write annotations to standard output, and Markdown to the file"
    " $GITHUB_STEP_SUMMARY.",
)
@_options.markdown
@click.option(
    "--junit",
    type=_options.PATH,
    metavar="FILE",
    help="Write the result as JUnit XML to this file.",
)
@_options.json
@click.pass_context
def check(context: click.Context, /, **typed: Any) -> None:
    """Compare a run with a baseline file and with budgets; exit with 1 if a comparison fails."""
    from weighin.gate import check as checks

    if typed["update"] and typed["baseline"] is None:
        raise ConfigError(
            "--update needs a file to write", "name the baseline file: --baseline baseline.json"
        )
    if typed["github"] and typed["json_file"] == _console.STDOUT:
        raise ConfigError(
            "--github and --json - would both write to standard output",
            "give --json a file: --json check.json",
        )
    with _console.working(f"reading {' '.join(map(str, typed['runs']))}"):
        measured = checks.read_runs(typed["runs"])
    _console.note(*measured.warnings)
    baseline = typed["baseline"]
    settings = {"tolerances": typed["tolerance"], "settings": typed["setting"]}
    if typed["update"]:
        with _console.working("comparing the figures"):
            changes = checks.update(measured, baseline, partial=typed["partial"], **settings)
        err, colours = (
            typed["json_file"] == _console.STDOUT,
            {"+": "green", "-": "red", "@": "cyan"},
        )
        for text in changes:
            styled = click.style(text, fg=colours.get(text[0]))
            click.echo(styled, err=err, color=_console.colour())
        click.echo(f"{baseline} {'was updated' if changes else 'is up to date'}", err=err)
    with _console.working("comparing the figures"):
        result = checks.check(
            measured,
            baseline,
            metrics=_options.names([typed["metrics"]]),
            partial=typed["partial"],
            budgets=typed["budget"],
            expected=typed["expect"],
            **settings,
        )
    _write(result, typed)
    if result.failed:
        _console.note(*_repairs(result, measured, baseline, partial=typed["partial"]))
        context.exit(1)


def _write(result: "GateResult", typed: dict[str, Any]) -> None:
    """Print the check's result, and write what --json, --github, --markdown and --junit ask for."""
    from weighin.gate import tables

    shown = tables.terminal(result, whole=typed["show_all"])
    document = tables.as_json(result)
    _console.deliver(typed["json_file"], document, lambda: _console.show(*shown))
    if typed["github"]:
        baseline = typed["baseline"]
        for text in tables.annotations(result, str(baseline) if baseline else None):
            _console.line(text)
        if path := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(tables.write_markdown(result))
    for name, write in (("markdown", tables.write_markdown), ("junit", tables.junit)):
        if typed[name]:
            _console.write(typed[name], write(result))


def _repairs(
    result: "GateResult", measured: "Group", baseline: Path | None, *, partial: bool
) -> list[str]:
    """Return a note on how the user can accept the failed comparisons, or no note.

    For wrong weights or a failed strategy, the note says that nothing can accept them.
    """
    from weighin.gate.rules import suggest
    from weighin.result import BROKEN

    if measured.incomplete and not partial:
        return []  # the printed line of the run has the command that completes the run
    ended = [line.series for line in result.failed if line.what == "outcome"]
    ended = [name for name in ended if name in measured.series]
    if any(measured.series[name].failures & {*BROKEN} for name in ended):
        return ["no check accepts wrong weights or failed strategies: repair them first"]
    if baseline:
        return ["if the change is intended, accept it with --update, and commit the baseline file"]
    words = ",".join(map(str, suggest(ended, measured.series)))
    return [f"if these outcomes are intended, add --expect {quote(words)}"] if words else []


@click.command(
    cls=Verb,
    examples={
        "Show how the peaks of the runs in this folder changed over time": "weighin history results",
        "Draw one metric of one strategy": "weighin history results --metric ready_anon --series streaming --out out.svg",
    },
)
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
    if picture and picture.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"cannot draw {picture}", "name a file that ends in .png or .svg")
    with _console.working(f"reading the runs in {folder}"):
        from weighin.gate import compare as comparing

        found = comparing.history(folder, metric, series.split())
    _console.note(*found.warnings)
    if json_file != _console.STDOUT:
        _console.show(*found.document())
    pictures = [picture] if picture else []
    for path in pictures:
        found.draw(path)
    _console.files(pictures, json_file)
    if json_file:
        _console.write_json(json_file, found.as_json() | {"files": [*map(str, pictures)]})
