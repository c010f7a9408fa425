"""The command line's verbs that judge: ``weighin check|compare``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from weighin import exit_codes
from weighin.cli._shared import err, out
from weighin.errors import ConfigError

if TYPE_CHECKING:
    from weighin.gate.check import MeasuredRuns
    from weighin.gate.lines import GateResult

CHECK_EXAMPLES = (
    "Examples:\n\n"
    "weighin check results/RUN --baseline baseline.yaml --update\n\n"
    "weighin check results/RUN --baseline baseline.yaml\n\n"
    'weighin check results/RUN --budget "streaming: anon <= 2GiB"\n\n'
    'weighin check results/RUN --budget "anon <= 2GiB" --expect baseline=oom_killed\n\n'
    "weighin check results/RUN --baseline baseline.yaml --github"
)

COMPARE_EXAMPLES = (
    "Examples:\n\n"
    "weighin compare results/torch-2.13 results/torch-2.14\n\n"
    "weighin compare results/main results/branch --metrics above_import,ready"
)


def check(
    runs: Annotated[
        list[Path],
        typer.Argument(help="A run's folder; several count as one run with more repeats."),
    ],
    baseline: Annotated[
        Path | None, typer.Option(help="The committed file to compare with.")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Write what was measured as the new baseline.")
    ] = False,
    budget: Annotated[
        list[str] | None,
        typer.Option(help='An absolute bound, such as "peak_rss <= 1.1 x model".'),
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            help="Outcomes that are meant to be so, divided by commas: baseline=oom_killed."
        ),
    ] = None,
    expect_failures: Annotated[
        bool,
        typer.Option(
            "--expect-failures", help="With --update: expect all that was killed or timed out."
        ),
    ] = False,
    metrics: Annotated[
        str, typer.Option(help="Judge only these, divided by commas: above_import,ready_anon.")
    ] = "",
    show_all: Annotated[
        bool, typer.Option("--all", help="Every figure, also those that are as they were.")
    ] = False,
    github: Annotated[
        bool,
        typer.Option(
            "--github", help="Annotations on stdout, and Markdown to $GITHUB_STEP_SUMMARY."
        ),
    ] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the judgement as Markdown.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write it as JUnit XML.")] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write it as JSON, for programs.")
    ] = None,
) -> None:
    """Compare a run with a committed baseline and with budgets; exits with 1 where one is broken."""
    from weighin.gate import check as checks
    from weighin.gate import outputs, tables

    measured = checks.read_runs(runs)
    _note(measured.warnings)
    if expect_failures and not update:
        raise ConfigError(
            "--expect-failures says what --update may write, and there is no --update",
            "name what is meant to be so: --expect baseline=oom_killed",
        )
    if update:
        if baseline is None:
            raise ConfigError("--update has no file to write", "name it: --baseline baseline.yaml")
        accept = _always if expect_failures else _ask
        written = checks.update(measured, baseline, expected=expect or [], accept=accept)
        _show_difference(baseline, written)
    judgement = checks.check(
        measured,
        baseline,
        extra_budgets=budget or [],
        metrics=_names(metrics),
        expected=expect or [],
    )
    out.print(tables.terminal(judgement, whole=show_all))
    if github:
        for line in outputs.annotations(judgement, str(baseline) if baseline else None):
            print(line)
    for path, text in (
        (markdown, tables.write_markdown),
        (junit, outputs.junit),
        (as_json, outputs.as_json),
    ):
        if path:
            _write(path, text(judgement))
    if github:
        _append_summary(tables.write_markdown(judgement))
    if judgement.failed:
        _note(_repairs(judgement, measured, baseline))
        raise typer.Exit(exit_codes.GATE_FAILED)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs; the first is compared with.")
    ],
    metrics: Annotated[
        str, typer.Option(help="Show only these, divided by commas: above_import,ready.")
    ] = "",
    markdown: Annotated[Path | None, typer.Option(help="Write the comparison as Markdown.")] = None,
) -> None:
    """Set several runs beside each other: two commits, two torch versions; judges nothing."""
    from weighin.gate import compare as comparing

    comparison = comparing.compare(runs, _names(metrics))
    _note(comparison.warnings)
    out.print(comparing.terminal(comparison))
    if markdown:
        _write(markdown, comparing.write_markdown(comparison))


def _repairs(judgement: "GateResult", measured: "MeasuredRuns", baseline: Path | None) -> list[str]:
    """Return how to accept what failed, where that can be."""
    from weighin.gate.expected import suggest

    ended = [line.series for line in judgement.failed if line.what == "outcome"]
    ended = [name for name in ended if name in measured.series]
    if any(measured.series[name].failures & {*exit_codes.BROKEN} for name in ended):
        return ["wrong weights and failed strategies cannot be accepted: mend them first"]
    words = ",".join(map(str, suggest(ended, measured.series)))
    if baseline is None:
        return [f"if that is meant to be so: --expect {quote(words)}"] if words else []
    more = " --expect-failures" if words else ""
    return [f"if it is meant to be so, accept it with --update{more}, and commit the baseline"]


def _always(_: Sequence[str]) -> bool:
    return True


def _ask(lines: Sequence[str]) -> bool:
    """Show what is not ok, and ask whether that is meant to be so; without a terminal it is not."""
    if not sys.stdin.isatty():
        return False
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return typer.confirm("Is that meant to be so? The baseline will expect it")


def _show_difference(baseline: Path, lines: list[str]) -> None:
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        out.print(Text(line, style=styles.get(line[0], "")), soft_wrap=True)
    what = "written" if lines else "is already what was measured"
    out.print(f"{baseline} {what}", markup=False, highlight=False, soft_wrap=True)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _append_summary(text: str) -> None:
    import os

    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", "name a file that you may write"
        ) from None


def _note(texts: list[str] | tuple[str, ...]) -> None:
    for text in texts:
        err.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)
