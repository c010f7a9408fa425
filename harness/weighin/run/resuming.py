"""Add, to the error that stopped a run, the command that resumes the run."""

from collections.abc import Iterator
from contextlib import contextmanager

from weighin.errors import Interrupted, IsolationUnavailable, NoNodeLeft, RecordError, StillRunning
from weighin.plan import start
from weighin.plan.task import Run
from weighin.records import coverage, run_folder


@contextmanager
def resumable(verb: str, task: Run) -> Iterator[None]:
    """If an error stops the run in the ``with`` block, add the command that resumes it to the error."""
    again = coverage.resume_command(verb, task.folder)
    if _needs_trust(task):
        again += " --trust"
    try:
        yield
    except Interrupted as stopped:
        if not (
            task.folder / run_folder.PLAN
        ).exists():  # the folder of a run without a record was removed
            raise
        message = f"{stopped.message}; {run_folder.read_whole(task.folder).coverage}"
        raise Interrupted(message, f"resume it: {again}") from None
    except (RecordError, IsolationUnavailable, NoNodeLeft, StillRunning) as error:
        if (task.folder / run_folder.RECORDS).exists() and "--resume" not in error.repair:
            error.repair += f"; then resume: {again}"
        raise


def _needs_trust(task: Run) -> bool:
    has_plan = (task.folder / run_folder.PLAN).exists()
    if has_plan and start.is_ours(run_folder.plan_bytes(task.folder)):
        return False
    from weighin.plan import trust  # imports formats and strategies

    return bool(trust.foreign([each.cell for each in task.planned], task.settings))
