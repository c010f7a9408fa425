"""Start and end the verbs that measure: ``bench``, ``run`` and ``floor``."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _console

if TYPE_CHECKING:
    from weighin.fleet.engine import Perform
    from weighin.plan.task import Node, Run
    from weighin.result import Result


def enter_scope(isolation: str) -> None:
    """If the isolation is a cgroup that this user can create only in a systemd scope, start this
    command line again in such a scope.
    """
    from weighin.isolation import cgroup, select

    if select.wants_cgroup(isolation) and cgroup.needs_scope():
        cgroup.enter_scope(sys.argv[1:])


@contextmanager
def planned(
    typed: dict[str, Any], start: "Callable[[dict[str, Any], Sequence[Node]], tuple[Run, str]]"
) -> "Iterator[tuple[Run, Perform]]":
    """Yield the run to perform, and the function that performs the run.

    With --resume, the run is the stopped run in the given folder. Without --resume, ``start`` plans
    a new run from the engine's settings and nodes, and returns it with a note to print.
    """
    from weighin.fleet import engine

    patience_s = math.inf if typed.get("wait") else 0
    resumed = None
    if typed["resume"]:
        from weighin.plan import start as plans

        resumed = plans.resume(typed["resume"], trusted=typed["trust"])
        settings = dict(resumed.settings.engine)
        if typed["address"]:
            settings |= engine.settings(settings.get("name", "local"), typed["address"], ())
            settings["labels"] = resumed.settings.engine["labels"]
    else:
        jobs = typed.get("jobs", 1)
        settings = engine.settings(typed["engine"], typed["address"], typed["labels"], jobs)
    with engine.opened(settings) as (nodes, perform):
        task, note = (resumed, "") if resumed else start(settings, nodes)
        _console.note(note)
        yield replace(task, patience_s=patience_s), perform


def end(context: click.Context, results: Sequence["Result"]) -> None:
    """Print each failed strategy, use or command; exit with the run's exit code if it is not 0."""
    for text in broken(results):
        _console.error(text)
    if code := exit_code_of(results):
        context.exit(code)


def exit_code_of(results: "Iterable[Result]") -> int:
    """Return a run's exit code: 5 if an outcome is in ``BROKEN``, else 4 if a measurement could not
    be made, else 0.

    After only one measurement, ``weighin run`` exits with the command's own code instead.
    """
    from weighin.result import BROKEN, Outcome

    outcomes = {result.outcome for result in results}
    if outcomes & {*BROKEN}:
        return 5
    return 4 if Outcome.MEASUREMENT_FAILED in outcomes else 0


def broken(results: "Iterable[Result]") -> list[str]:
    """Return a line with the strategy, RAM limit, outcome and message of each result whose outcome
    is in ``BROKEN``; equal lines appear once.
    """
    from weighin.result import BROKEN
    from weighin.units import format_exact

    lines = []
    for result in results:
        if result.outcome in BROKEN:
            limit = result.cell.ram_limit_bytes
            under_limit = f" under {format_exact(limit)}" if limit else ""
            message = f": {result.message}" if result.message else ""
            lines.append(f"{result.cell.strategy}{under_limit}: {result.outcome}{message}")
    return list(dict.fromkeys(lines))
