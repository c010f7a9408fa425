"""``weighin check``: compare a run with a baseline and with budgets."""

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Verb
from weighin.errors import ConfigError

if TYPE_CHECKING:
    from weighin.gate.check import GateResult, Measured

EXAMPLES = {
    "Write the peaks of a run to a new baseline": "weighin check results/RUN --baseline baseline.json --update",
    "Fail if a peak grew beyond the baseline": "weighin check results/RUN --baseline baseline.json",
    "Fail if the strategy streaming needs more than 2 GiB of anonymous memory": 'weighin check results/RUN --budget "streaming: anon <= 2GiB"',
    "Check a budget for each strategy, and expect that the strategy baseline ends with a time-out": 'weighin check results/RUN --budget "anon <= 2GiB" --expect baseline=timeout',
    "Check in a GitHub workflow, and write the findings to a file as well": "weighin check results/RUN --baseline baseline.json --github --json c.json",
}


@click.command(cls=Verb, examples=EXAMPLES, codes=True)
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

    _refuse(typed)
    with _console.working(f"reading {' '.join(map(str, typed['runs']))}"):
        measured = checks.read_runs(typed["runs"])
    _console.note(*measured.warnings)
    baseline = typed["baseline"]
    settings = {"tolerances": typed["tolerance"], "settings": typed["setting"]}
    if typed["update"]:
        with _console.working("comparing the figures"):
            changes = checks.update(measured, baseline, partial=typed["partial"], **settings)
        _show_changes(baseline, changes, err=typed["json_file"] == _console.STDOUT)
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


def _refuse(typed: dict[str, Any]) -> None:
    """Raise ConfigError for a combination of options that has no effect or cannot work."""
    if typed["update"] and typed["baseline"] is None:
        raise ConfigError(
            "--update needs a file to write", "name the baseline file: --baseline baseline.json"
        )
    if typed["github"] and typed["json_file"] == _console.STDOUT:
        raise ConfigError(
            "--github and --json - would both write to standard output",
            "give --json a file: --json check.json",
        )


def _write(result: "GateResult", typed: dict[str, Any]) -> None:
    """Print the check's result, and write what --json, --github, --markdown and --junit ask for."""
    from weighin.gate import tables

    shown = tables.terminal(result, whole=typed["show_all"])
    document = tables.as_json(result)
    _console.deliver(typed["json_file"], document, lambda: _console.show(shown))
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
    result: "GateResult", measured: "Measured", baseline: Path | None, *, partial: bool
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


def _show_changes(baseline: Path, lines: list[str], *, err: bool) -> None:
    """Print the changed lines of the baseline file; with ``err``, on standard error."""
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for text in lines:
        styled = click.style(text, fg=colours.get(text[0]))
        click.echo(styled, err=err, color=_console.colour())
    click.echo(f"{baseline} {'was updated' if lines else 'is up to date'}", err=err)
