"""Measure only the memory of several cells at once on this machine (``weighin bench --jobs``).

A job is a thread that runs one cell (measurement) at a time. Two cells that read one file would share
its pages in the page cache, and the kernel charges a page to the cell that read it first. Each job
therefore has checkpoint files of its own, which weighin removes at the end of the run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, current_thread
from typing import Any, Final

from weighin import child_process
from weighin.checkpoint import cache, staging
from weighin.errors import ConfigError
from weighin.fleet import node
from weighin.fleet.driver import Driver
from weighin.isolation import cgroup
from weighin.plan.task import Node, Progress, Run
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.records.machine import CONCURRENT
from weighin.result import Result
from weighin.run import interrupts, runner
from weighin.units import format_bytes

_HERE: Final = "this machine"


class Jobs:
    """The jobs that run cells for a ``Driver``, which sees them as one node."""

    def __init__(self, jobs: int, isolation: str, caches: Path) -> None:
        self.slots, self.gpus = jobs, dict[str, float]()
        self._isolation = isolation
        self._caches = caches
        self._is_tested = False
        self._pool = ThreadPoolExecutor(jobs, "job")
        self._stopped = Event()
        self._said: SimpleQueue[node.Step] = SimpleQueue()

    def submit(self, assignment: Mapping[str, Any], *_: object) -> Future[Any]:
        return self._pool.submit(self._run, assignment)

    def _run(self, assignment: Mapping[str, Any]) -> node.Answer:
        job = current_thread().name  # job_0, job_1
        own = {
            # The driver holds this machine's lock. A job has the same lock file in every run, and
            # removes what the job of a dead run with this lock file left.
            LOCK_VARIABLE: f"{runner.lock_path()}.{job}",
            "WEIGHIN_CACHE": str(self._caches / job),
        }
        events = node.run(
            {**assignment, "is_tested": self._is_tested},  # as it is when the cell begins
            child_process.environment(inherit=False) | own,
            lambda *step: self._said.put((job, *step)),
            self._stopped.is_set,
        )
        answer = node.answer(_HERE, events)
        self._is_tested |= "record" in answer[1]
        return answer

    def answer(self, done: Future[node.Answer]) -> node.Answer:
        return done.result()

    def stop(self, _: Iterable[Future[Any]]) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def said(self) -> Iterator[node.Step]:
        while not self._said.empty():
            yield self._said.get()

    def names(self) -> dict[str, str]:
        return {_HERE: _HERE}

    def node(self) -> Node:
        total, free = cgroup.ram_bytes(self._isolation)
        return Node(_HERE, _HERE, total, free, {self._isolation: ""})

    def placed(self, result: Result, _: str) -> Result:
        """Add the number of jobs, and a warning that times are not comparable, to a result."""
        told = f"up to {self.slots} cells ran at once (--jobs): times are not comparable"
        environment = result.environment | {CONCURRENT: self.slots}
        return replace(result, environment=environment, warnings=(*result.warnings, told))


def run(jobs: int, task: Run, progress: Progress) -> Sequence[Result]:
    """Run ``jobs`` cells at a time; their RAM limits together must fit in this machine's free RAM."""
    with runner.discarding(task):
        check(task, jobs)
        with (
            interrupts.stoppable(),
            runner.only_run(task.patience_s, lambda text: progress.preparing(text, None)),
            staging.own_folder(cache.folder(), "jobs-") as caches,
        ):
            crew = Jobs(jobs, task.isolation.name, caches)
            return Driver(crew, [crew.node()], task, progress).run()


def check(task: Run, jobs: int) -> None:
    cells = [each.cell for each in task.planned if not each.skip]
    if task.settings.checkpoint or task.settings.checkpoints or task.settings.storage:
        raise ConfigError(
            "--jobs with --checkpoint or --storage: all cells would read the same files. The kernel"
            " charges a page of a file only to the cell that read it first, so that the figures"
            " of the other cells would be too small",
            "leave --jobs out, or --checkpoint and --storage",
        )
    if task.settings.steady or task.settings.trace or any(cell.needs_gpu for cell in cells):
        raise ConfigError(
            "with --jobs, weighin measures only the memory of cells on the CPU, without --steady"
            " and --trace",
            "leave --jobs out",
        )
    limits = [cell.ram_limit_bytes for cell in cells if cell.ram_limit_bytes is not None]
    if len(limits) < len(cells):
        raise ConfigError(
            "--jobs needs a RAM limit for each cell, because cells that run at once could take"
            " memory from each other",
            "add --ram, or leave --jobs out",
        )
    needed, (_, free) = sum(sorted(limits)[-jobs:]), cgroup.ram_bytes(task.isolation.name)
    if needed > free:
        raise ConfigError(
            f"--jobs {jobs}: the RAM limits of {jobs} cells are {format_bytes(needed)} together,"
            f" but only {format_bytes(free)} of RAM are free",
            "give a smaller number to --jobs, or smaller limits to --ram",
        )
