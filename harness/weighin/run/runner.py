"""Run a plan: prepare the checkpoints, measure each cell, and record each result immediately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from weighin.checkpoint import entries
from weighin.errors import HarnessError
from weighin.plan.task import Planned, Progress, Run, skipped
from weighin.records import coverage, run_folder
from weighin.result import Result
from weighin.run import commands, interrupts
from weighin.run.measure import Measured
from weighin.run.run_lock import only_run, only_writer

if TYPE_CHECKING:
    from weighin.run.loads import Loads

Following = Callable[[Sequence[Result]], Planned | None]
"""A function that gets the run's results so far and returns the next cell; None ends the run."""


def run(task: Run, progress: Progress, following: Following | None = None) -> list[Result]:
    """Run, in the plan's order, each cell that has no record, and return the results of all cells.

    If ``following`` is given, this function chooses each cell, and the plan only determines which
    checkpoints are prepared.

    Raises:
        HarnessError: no cell can be run. An error inside a cell is not raised: it becomes the
            cell's outcome, and the run continues.
    """
    with only_writer(task.folder), discarding(task):
        return _run(task, progress, following)


@contextmanager
def discarding(task: Run) -> Iterator[None]:
    """Remove the folder of a new run if the ``with`` block fails before the run's first record."""
    try:
        yield
    except HarnessError:  # also after Ctrl-C: a run without a record has nothing to resume
        if task.is_new:
            run_folder.discard_unmeasured(task.folder)
        raise


@contextmanager
def _machine(task: Run, progress: Progress) -> Iterator[None]:
    """Check the isolation, lock this machine, and remove the leftovers of runs that were killed.

    A run of loads or saves holds the lock, because other runs would change its times. A run of
    commands takes no lock, because a command may itself run weighin.
    """
    with ExitStack() as until_end:
        if task.settings.storage:
            until_end.enter_context(entries.used(task.settings.storage))
        task.isolation.check()
        until_end.enter_context(interrupts.stoppable())  # also a run that waits for the lock
        if task.settings.commands:
            lines = task.isolation.remove_stale()
        else:
            from weighin.run import loads  # imports formats, which take 0.2 s

            waiting = lambda text: progress.preparing(text, None)  # noqa: E731
            until_end.enter_context(only_run(task.patience_s, waiting))
            lines = task.isolation.remove_stale() + loads.remove_leftovers()
        for line in lines:
            progress.preparing(f"removed a leftover of a killed run: {line}", None)
        yield


def _run(task: Run, progress: Progress, following: Following | None) -> list[Result]:
    results = task.begin()
    with _machine(task, progress):
        if following is None:
            todo = {cell.id for cell in coverage.pending([p.cell for p in task.planned], results)}
            needed = [planned for planned in task.planned if planned.cell.id in todo]
            cells = iter(needed)
        else:
            needed = list(task.planned)
            cells = _chosen(following, results)
        bench: commands.Commands | Loads | None = None
        for planned in cells:
            interrupts.check()
            if bench is None and any(not each.skip for each in needed):
                if task.settings.commands:
                    bench = commands.Commands(task, progress)
                else:
                    from weighin.run import loads

                    bench = loads.Loads(task, needed, progress)
            with run_folder.room(task.folder):
                if planned.skip or bench is None:
                    known_environment = bench.environment if bench else {}
                    measured = Measured(skipped(planned, known_environment))
                else:
                    progress.starting(planned.cell)
                    measured = bench.take(planned)
                with interrupts.put_off():
                    result = run_folder.append(task.folder, measured.result)
                    results.append(result)
                    progress.finished(result)
                    replace(measured, result=result).finish(task.folder)
        return list(results)


def _chosen(following: Following, results: Sequence[Result]) -> Iterator[Planned]:
    while (planned := following(results)) is not None:
        yield planned
