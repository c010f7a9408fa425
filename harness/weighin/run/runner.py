"""Run a plan: prepare the checkpoints, measure each cell, and record each result immediately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from weighin.checkpoint import entries
from weighin.errors import (
    HarnessError,
    Interrupted,
    IsolationUnavailable,
    NoNodeLeft,
    RecordError,
    StillRunning,
)
from weighin.plan import start
from weighin.plan.task import Planned, Progress, Run, skipped
from weighin.records import run_folder
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


def _run(task: Run, progress: Progress, following: Following | None) -> list[Result]:
    results = task.begin()
    with ExitStack() as until_end:
        if task.settings.storage:
            until_end.enter_context(entries.used(task.settings.storage))
        task.isolation.check()
        until_end.enter_context(interrupts.stoppable())  # also a run that waits for the lock
        if task.settings.commands:  # without the lock, because a command may itself run weighin
            lines = task.isolation.remove_stale()
        else:
            from weighin.run import loads  # imports formats, which take 0.2 s

            waiting = lambda text: progress.preparing(text, None)  # noqa: E731
            until_end.enter_context(only_run(task.patience_s, waiting))
            lines = task.isolation.remove_stale() + loads.remove_leftovers()
        for line in lines:
            progress.preparing(f"removed a leftover of a killed run: {line}", None)
        needed: Sequence[Planned] = task.planned
        if following:
            cells = iter(partial(following, results), None)
        else:
            todo = {cell.id for cell in run_folder.pending([p.cell for p in task.planned], results)}
            needed = [planned for planned in task.planned if planned.cell.id in todo]
            cells = iter(needed)
        bench: commands.Commands | Loads | None = None
        for planned in cells:
            interrupts.check()
            if bench is None and any(not each.skip for each in needed):
                if task.settings.commands:
                    bench = commands.Commands(task, progress)
                else:
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


@contextmanager
def resumable(verb: str, task: Run) -> Iterator[None]:
    """If an error stops the run in the ``with`` block, add the command that resumes it to the error."""
    again = run_folder.resume_command(verb, task.folder)
    plan = task.folder / run_folder.PLAN
    if not (plan.exists() and start.is_ours(run_folder.read_file(task.folder, run_folder.PLAN))):
        from weighin.plan import trust  # imports formats and strategies

        if trust.foreign([each.cell for each in task.planned], task.settings):
            again += " --trust"
    try:
        yield
    except Interrupted as stopped:
        if not plan.exists():  # the folder of a run without a record was removed
            raise
        message = f"{stopped.message}; {run_folder.read_whole(task.folder).coverage}"
        raise Interrupted(message, f"resume it: {again}") from None
    except (RecordError, IsolationUnavailable, NoNodeLeft, StillRunning) as error:
        if (task.folder / run_folder.RECORDS).exists() and "--resume" not in error.repair:
            error.repair += f"; then resume: {again}"
        raise
