"""Run a plan, or search for floors: measure each cell, and record each result; one run at a time on a machine."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from weighin.checkpoint import temporary_folders
from weighin.errors import HarnessError, Interrupted
from weighin.files import try_lock
from weighin.isolation import cgroup, select
from weighin.plan import start
from weighin.plan.task import Planned, Progress, Run, skipped
from weighin.probes.cgroup import lock_suffix
from weighin.records import floor, run_folder
from weighin.result import Result
from weighin.run import commands, interrupts
from weighin.run.measure import Measured
from weighin.units import format_bytes


def run(
    task: Run,
    progress: Progress,
    following: Callable[[Sequence[Result]], Planned | None] | None = None,
) -> list[Result]:
    """Run each cell that has no record, or those that ``following`` returns, given the results so far; return all."""
    with only_writer(task.folder), discarding(task), interrupts.stoppable(), ExitStack() as opened:
        results = task.begin()
        if task.settings.storage:
            opened.enter_context(temporary_folders.used(task.settings.storage))
        task.isolation.check()
        if task.settings.commands:  # without the lock, because a command may itself run weighin
            lines = task.isolation.remove_stale()
        else:
            from weighin.run import loads  # imports formats, which take 0.2 s

            opened.enter_context(only_run(task.patience_s, progress))
            lines = task.isolation.remove_stale() + loads.remove_leftovers()
        for line in lines:
            progress.preparing(f"removed a leftover of a killed run: {line}", None)
        todo = {cell.id for cell in run_folder.pending([p.cell for p in task.planned], results)}
        needed = [planned for planned in task.planned if following or planned.cell.id in todo]
        take: Callable[[Planned, dict[str, Any]], Measured] | None = None
        known_environment: dict[str, Any] = {}
        for planned in iter(partial(following, results), None) if following else needed:
            interrupts.check()
            if take is None and any(not each.skip for each in needed):
                select.check_limits_around(task.isolation, [each.cell for each in needed])
                if task.settings.commands:
                    task.prepare()
                    take = partial(commands.take, task, progress, {})
                else:
                    take = loads.Loads(task, needed, progress).take
                known_environment = task.environment()
            if planned.skip or take is None:
                measured = Measured(skipped(planned, known_environment))
            else:
                measured = take(planned, known_environment)
            with interrupts.put_off():
                result = run_folder.append(task.folder, measured.result)
                results.append(result)
                progress.finished(result)
                replace(measured, result=result).finish(task.folder)
        return list(results)


@contextmanager
def discarding(task: Run) -> Iterator[None]:
    """Remove the folder of a new run if the ``with`` block fails before the run's first record."""
    try:
        yield
    except HarnessError:  # also after Ctrl-C: a run without a record has nothing to resume
        if task.is_new:
            run_folder.discard_unmeasured(task.folder)
        raise


def search(task: Run, progress: Progress) -> list[Result]:
    """Search for the smallest RAM limits under which the planned cells work, within about ``within`` of the floor."""
    within, aim = task.settings.within, task.settings.aim
    assert within is not None
    highest_bytes, _ = cgroup.ram_bytes(task.isolation.name)

    def following(results: Sequence[Result]) -> Planned | None:
        done = {result.cell.id for result in results}
        for planned in task.planned:
            if planned.skip:
                if planned.cell.id not in done:
                    return planned
                continue
            cell = floor.next_cell(planned.cell, results, within, highest_bytes, aim)
            if results and floor.searched(results[-1].cell) == floor.searched(planned.cell):
                progress.narrowed(said(planned, results, aim))
            if cell is not None:
                return replace(planned, cell=cell)
        return None

    return run(task, progress, following)


def said(planned: Planned, results: Sequence[Result], aim: floor.Aim) -> str:
    """Say between which limits the floor lies, according to the results so far."""
    search = floor.Floor(planned.cell, results, aim)
    if search.stop:
        return f"no floor for {planned.cell.strategy}: {search.stop}"
    bounds = {"above": search.failing_bytes, "at most": search.working_bytes}
    words = [f"{name} {format_bytes(size)}" for name, size in bounds.items() if size is not None]
    return f"floor of {planned.cell.strategy}: {', '.join(words) or 'not known yet'}"


@contextmanager
def resumable(verb: str, task: Run) -> Iterator[None]:
    """Add the command that resumes the run to an error that stops it in the ``with`` block."""
    again = run_folder.resume_command(verb, task.folder)
    plan = task.folder / run_folder.PLAN
    is_ours = plan.exists() and start.is_ours(run_folder.read_file(task.folder, run_folder.PLAN))
    if not is_ours and start.foreign([each.cell for each in task.planned], task.settings):
        again += " --trust"
    try:
        yield
    except Interrupted as stopped:
        if not plan.exists():  # the folder of a run without a record was removed
            raise
        message = f"{stopped.message}; {run_folder.read(task.folder, past_damage=True).coverage}"
        raise Interrupted(message, f"resume it: {again}") from None
    except HarnessError as error:
        if (task.folder / run_folder.RECORDS).exists() and "--resume" not in error.repair:
            error.repair = f"{error.repair}; then resume: {again}".removeprefix("; then ")
        raise


@contextmanager
def only_run(patience_s: float = 0, progress: Progress | None = None) -> Iterator[None]:
    """Hold the machine's lock: the name of a socket, which any user can take, and the kernel frees."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                lock.bind(f"\0weighin-measuring{lock_suffix()}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            if time.monotonic() >= deadline:
                raise HarnessError(
                    "another run is measuring on this machine",
                    "wait for its end: weighin bench --set wait=true; parallel runs would distort each"
                    " other's figures",
                    exit_code=4,
                )
            if progress:
                progress.preparing("waiting for another run on this machine to end", None)
                progress = None  # said once
            time.sleep(0.5)  # polling disturbs the measuring run
        yield


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a run's plan, so that two processes do not run the same cells."""
    try:
        locked = os.open(folder / run_folder.PLAN, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # nobody can resume a run without a plan
        yield
        return
    with FileIO(locked):
        if not try_lock(locked):
            repair = "wait for its end, then resume the run"
            raise HarnessError(f"another process runs the plan in {folder}", repair, exit_code=4)
        yield
