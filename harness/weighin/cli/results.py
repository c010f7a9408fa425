"""The verbs that read the records of runs: ``weighin report``, ``compare``, ``check`` and ``history``."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import parameters, verb
from weighin.errors import ConfigError

if TYPE_CHECKING:
    from weighin.gate.check import GateResult, Group
    from weighin.records.run_folder import Records


@verb(
    *parameters(
        {
            "RUN": "The folder of a run.",
            "--format NAMES": "Formats of the report, comma-separated: md, html, csv, png; bmf (Bencher), gha (GitHub Action Benchmark).",
        },
        format="md,html,csv,png",
    ),
    _options.JSON,
    examples={
        "Write the report of a run again": "weighin report results/20261120T093000-gpt2-xl-8GiB",
        "Write only the HTML page": "weighin report results/20261120T093000-gpt2-xl-8GiB --format html",
        "Write files for other tools": "weighin report results/RUN --format bmf,gha",
        "Print the report's figures as JSON": "weighin report results/RUN --json -",
    },
)
def report(_: click.Context, typed: dict[str, Any]) -> None:
    """Show a run, and write report.html, report.md, summary.csv and plots into its folder."""
    from weighin.records import run_folder

    run = typed["run"]
    with _console.working(f"reading {run}"):
        records = run_folder.read(run, past_damage=True)
    if records.damage and not records.results:
        raise records.damage
    _console.note(*records.warnings)
    show_run(run, records, typed["json"], _options.names(typed["format"]))
    if records.damage:
        raise records.damage  # the report has the readable records only, so the exit code is not 0


def show_run(run: Path, records: "Records", json: str | None, formats: Sequence[str] = ()) -> None:
    """Print a run's table, and write its report in ``formats``, or else the default ones."""
    with _console.working("computing the table"):
        from weighin.records.series import Measured
        from weighin.show.report import as_json, terminal
        from weighin.show.write import checked, write

        formats = checked(formats)
        measured = Measured.of(run, records)
        document = terminal(measured)
    if json != _console.STDOUT:
        _console.show(*document)
    with _console.working(f"writing the report of {run}"):
        files = write(measured, formats)
    _console.files(files, json)
    _console.deliver(json, as_json(measured, files))


@verb(
    *parameters(
        {
            "RUNS ...": "Folders of runs. The tables compare each run with the first run on the command line.",
            "--by KEY": "What a column of the tables shows: a run (a folder), a machine (a kind of machine), a commit, or each value of another fact in the records, such as torch, kernel or python.",
            "--metrics NAMES": "Show only some metrics, such as --metrics above_import,ready.",
        },
        by="run",
        metrics="",
    ),
    *_options.MARKDOWN,
    _options.JSON,
    examples={
        "Compare each measurement of two runs, such as runs of two versions of torch": "weighin compare results/torch-2.13 results/torch-2.14",
        "Compare two metrics only": "weighin compare results/main results/branch --metrics above_import,ready",
        "Compare the kinds of machines on which one run was measured": "weighin compare results/fleet --by machine",
        "Compare the versions of torch that several runs measured": "weighin compare results/* --by torch",
    },
)
def compare(_: click.Context, typed: dict[str, Any]) -> None:
    """Show the figures of several runs side by side, such as runs of two commits or two torch versions."""
    from weighin.gate import compare as comparing
    from weighin.show.table import markdown

    runs = typed["runs"]
    with _console.working(f"comparing the figures of {len(runs)} runs"):
        document, json = comparing.compare(runs, _options.names(typed["metrics"]), typed["by"])
    _console.note(*json["warnings"])
    _console.deliver(typed["json"], json, *document)
    if typed["markdown"]:
        _console.write(typed["markdown"], markdown(document) + "\n")


@verb(
    *parameters(
        {
            "RUNS ...": "The folder of a run. Several folders count as one run with more repeats.",
            "--baseline FILE": "A JSON file of earlier figures, with which weighin compares the run; --update writes it. Commit it to your repository, so that later checks compare with the same figures.",
            "--update": "First write the run's figures and outcomes into the baseline file, and show what changed there.",
            "--budget BUDGET ...": 'An upper bound for a metric of the run, such as "peak_rss <= 1.1 x model + 64MiB above import" (metrics: peak_rss, anon, peak_cgroup, ready ...). Repeatable.',
            "--expect OUTCOMES ...": "Outcomes that you expect in place of ok: STRATEGY=OUTCOME, comma-separated. With sequential=oom_killed, the check passes if the kernel kills the strategy sequential for lack of memory.",
            "--tolerance TOLERANCE ...": 'How much a metric may exceed its figure in the baseline file: "ready=30% 1s" (whichever is larger), "anon=64MiB both" (falling by more than 64 MiB fails, too) or "load=off" (not compared). Repeatable.',
            "--setting NAME=POLICY ...": "Whether to ignore, warn or fail if the machine or a version differs from the baseline file: kernel=ignore, cpu=fail or settings.*=warn. By default, another torch, CUDA or GPU fails, another kernel or processor warns. Repeatable.",
            "--metrics NAMES": "Compare only some metrics with the baseline file, such as --metrics above_import,ready_anon.",
            "--partial": "Judge the measured part of a stopped run, which otherwise fails.",
            "--all": "Show all figures of the run, not only those that differ from the baseline file.",
            "--github": "For GitHub Actions: write annotations to standard output, and Markdown to the file $GITHUB_STEP_SUMMARY.",
            "--junit FILE": "Write the result as JUnit XML to this file.",
        },
        metrics="",
    ),
    *_options.MARKDOWN,
    _options.JSON,
    examples={
        "Write the peaks of a run to a new baseline": "weighin check results/RUN --baseline baseline.json --update",
        "Fail if a peak grew beyond the baseline": "weighin check results/RUN --baseline baseline.json",
        "Fail if the strategy streaming needs more than 2 GiB of anonymous memory": 'weighin check results/RUN --budget "streaming: anon <= 2GiB"',
        "Check a budget for each strategy, and accept that the one named baseline times out": 'weighin check results/RUN --budget "anon <= 2GiB" --expect baseline=timeout',
        "Check in a GitHub workflow, and write the findings to a file as well": "weighin check results/RUN --baseline baseline.json --github --json c.json",
    },
    codes=True,
)
def check(context: click.Context, typed: dict[str, Any]) -> None:
    """Compare a run with a baseline file and with budgets; exit with 1 if a comparison fails."""
    from weighin.gate import check as checks

    baseline, partial = typed["baseline"], typed["partial"]
    if typed["update"] and baseline is None:
        repair = "name the baseline file: --baseline baseline.json"
        raise ConfigError("--update needs a file to write", repair)
    if typed["github"] and typed["json"] == _console.STDOUT:
        why = "--github and '--json -' both write to standard output"
        raise ConfigError(why, "give --json a file: --json check.json")
    with _console.working(f"reading {' '.join(map(str, typed['runs']))}"):
        measured = checks.read_runs(typed["runs"])
    _console.note(*measured.warnings)
    rules = {"tolerances": typed["tolerance"], "settings": typed["setting"]}
    if typed["update"]:
        with _console.working("comparing the figures"):
            changes = checks.update(measured, baseline, partial=partial, **rules)
        # Shown before the figures are judged: a rule that cannot be read ends the check.
        colours, err = {"+": "green", "-": "red", "@": "cyan"}, typed["json"] == _console.STDOUT
        changes = [click.style(text, fg=colours.get(text[0])) for text in changes]
        end = f"{baseline} {'was updated' if changes else 'is up to date'}"
        for text in (*changes, end):
            click.echo(text, err=err, color=_console.colour())
    with _console.working("comparing the figures"):
        rules |= {"budgets": typed["budget"], "expected": typed["expect"]}
        metrics = _options.names(typed["metrics"])
        result = checks.check(measured, baseline, metrics=metrics, partial=partial, **rules)
    _write(result, typed)
    if result.failed:
        _console.note(*_repairs(result, measured, baseline, partial=partial))
        context.exit(1)


def _write(result: "GateResult", typed: dict[str, Any]) -> None:
    from weighin.gate import tables

    shown = tables.terminal(result, whole=typed["all"])
    _console.deliver(typed["json"], tables.as_json(result), *shown)
    page = tables.write_markdown(result, whole=typed["all"])
    if typed["github"]:
        for text in tables.annotations(result, typed["baseline"] and str(typed["baseline"])):
            click.echo(text)
        if path := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(page)
    if typed["markdown"]:
        _console.write(typed["markdown"], page)
    if typed["junit"]:
        _console.write(typed["junit"], tables.junit(result))


def _repairs(
    result: "GateResult", measured: "Group", baseline: Path | None, *, partial: bool
) -> list[str]:
    """Return a note on how to accept the failed comparisons, or that nothing accepts them."""
    from weighin.gate.rules import EXPECTABLE
    from weighin.result import BROKEN

    if measured.incomplete and not partial:
        return []  # the printed line of the run has the command that completes the run
    ended = [line.series for line in result.failed if line.what == "outcome"]
    ended = [name for name in ended if name in measured.series]
    if any(measured.series[name].failures & {*BROKEN} for name in ended):
        return ["no check accepts wrong weights or failed strategies: repair them first"]
    if baseline:
        return ["if the change is intended, accept it with --update, and commit the baseline file"]
    if any(measured.series[name].failures <= {*EXPECTABLE} for name in ended):
        return ["if these outcomes are intended: --expect STRATEGY=OUTCOME"]
    return []


@verb(
    *parameters(
        {
            "FOLDER": "A folder with folders of runs, such as results.",
            "--metric NAME": "The metric to show: peak_rss, anon, peak_cgroup, ready, ...",
            "--series WORDS": "Show only series whose name has all of these words, such as 'gpt2-xl streaming'.",
        },
        metric="peak_rss",
        series="",
    ),
    _options.JSON,
    examples={
        "Show how the peaks of the runs in this folder changed over time": "weighin history results",
        "Show one metric of one strategy": "weighin history results --metric ready_anon --series streaming",
    },
)
def history(_: click.Context, typed: dict[str, Any]) -> None:
    """Show a metric over all runs in a folder, and name the runs from which it stayed higher or lower."""
    folder = typed["folder"]
    with _console.working(f"reading the runs in {folder}"):
        from weighin.gate import compare as comparing

        document, json = comparing.history(folder, typed["metric"], typed["series"].split())
    _console.note(*json["warnings"])
    _console.deliver(typed["json"], json, *document)
