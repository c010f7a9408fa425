"""Measure only the memory of several cells at once on this machine (``weighin bench --jobs``).

A job runs one cell (measurement) at a time. Two cells that read one file would share its pages in
the page cache, and the kernel charges a page to the cell that read it first. Each job therefore has
checkpoint files of its own, which weighin removes at the end of the run.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weighin import child_process
from weighin.checkpoint import cache
from weighin.child_process import last_line, ready
from weighin.engines.driver import Driver
from weighin.errors import ConfigError
from weighin.isolation import delegation
from weighin.plan.nodes import Node
from weighin.plan.task import Progress, Run
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.protocol import encode_event
from weighin.records.machine import CONCURRENT
from weighin.result import Result
from weighin.run import interrupts, run_lock, runner
from weighin.units import format_bytes


class JobsEngine:
    """Runs several cells at a time; their RAM limits together must fit in this machine's free RAM."""

    nodes: Sequence[Node] = ()

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def run(self, task: Run, progress: Progress) -> Sequence[Result]:
        with runner.discarding(task):
            check(task, self._jobs)
            with (
                interrupts.stoppable(),
                run_lock.only_run(task.patience_s, lambda text: progress.preparing(text, None)),
            ):
                shutil.rmtree(_caches(), ignore_errors=True)  # a killed run may have left them
                try:
                    jobs = LocalJobs(self._jobs, task.isolation.name)
                    Driver(jobs, jobs.nodes, task, progress, self._marked).run()
                finally:
                    shutil.rmtree(_caches(), ignore_errors=True)
        return task.results

    def _marked(self, result: Result, _: Node) -> Result:
        """Add the number of jobs, and a warning that times are not comparable, to a result."""
        return replace(
            result,
            environment=result.environment | {CONCURRENT: self._jobs},
            warnings=(
                *result.warnings,
                f"up to {self._jobs} cells ran at once (--jobs): times are not comparable",
            ),
        )


def _caches() -> Path:
    return cache.folder() / "jobs"


def check(task: Run, jobs: int) -> None:
    cells = [each.cell for each in task.planned if not each.skip]
    if task.settings.checkpoint or task.settings.checkpoints:
        raise ConfigError(
            "--jobs with a checkpoint of your own: all cells would read this one file. The kernel"
            " charges a page of a file only to the cell that read it first, so that the figures"
            " of the other cells would be too small",
            "leave --jobs or --checkpoint out",
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
    needed, (_, free) = sum(sorted(limits)[-jobs:]), delegation.ram_bytes(task.isolation.name)
    if needed > free:
        raise ConfigError(
            f"--jobs {jobs}: the RAM limits of {jobs} cells are {format_bytes(needed)} together,"
            f" but only {format_bytes(free)} of RAM are free",
            "give a smaller number to --jobs, or smaller limits to --ram",
        )


class LocalJobs:
    """A ``Transport`` whose nodes are jobs on this machine; a job runs one cell at a time."""

    def __init__(self, jobs: int, isolation: str) -> None:
        self._isolation = isolation
        total, _ = delegation.ram_bytes(isolation)
        isolations = {isolation: ""}
        self.nodes = self.ask_again(
            [Node(f"job-{n}", f"job {n}", total, total, isolations) for n in range(1, jobs + 1)]
        )

    def submit(self, node: Node, assignment: Mapping[str, Any]) -> "LocalTask":
        own = {
            # The driver holds this machine's lock. A job has the same lock file in every run, and
            # removes what the job of a dead run with this lock file left.
            LOCK_VARIABLE: f"{run_lock.lock_path()}.{node.id}",
            "WEIGHIN_CACHE": str(_caches() / node.id),
        }
        variables = child_process.environment(inherit=False) | own
        return LocalTask(encode_event({"event": "assignment", **assignment}), variables)

    def wait(self, tasks: Sequence["LocalTask"], timeout_s: float) -> Sequence["LocalTask"]:
        if not (found := [task for task in tasks if task.has_event()]):
            ready([each for task in tasks for each in task.filenos()], timeout_s)
            found = [task for task in tasks if task.has_event()]
        return found

    def is_alive(self, _: Node) -> bool:
        return True

    def ask_again(self, nodes: Sequence[Node]) -> Sequence[Node]:
        _, free = delegation.ram_bytes(self._isolation)
        return [replace(node, free_ram_bytes=free) for node in nodes]

    def joined(self, _: Collection[str]) -> tuple[Sequence[Node], Sequence[str]]:
        return [], []


class LocalTask:
    """A ``Task`` that is a process of ``weighin.engines.node`` on this machine."""

    def __init__(self, assignment: bytes, variables: Mapping[str, str]) -> None:
        self._node = child_process.Child(child_process.module("weighin.engines.node"), variables)
        self._node.send(assignment)  # input stays open: its end would stop the process
        self._ended = False

    def filenos(self) -> list[int]:
        """Return the descriptors to poll: one becomes readable when the process writes or ends."""
        return self._node.filenos()

    def has_event(self) -> bool:
        """Read what the process wrote; return True if an event has arrived or the process has ended."""
        return self._ended or self._node.read()

    def next_event(self) -> bytes | None:
        if self._ended:
            return None
        if (line := self._node.receive()) is not None:
            return line
        self._ended = True
        code = self._node.wait()
        self._node.close()
        return encode_event(
            {"event": "ended", "code": code, "stderr": last_line(self._node.stderr_tail)}
        )

    def cancel(self) -> None:
        self._node.end_input()
