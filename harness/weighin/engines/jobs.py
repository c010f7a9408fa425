"""Run several cells at once on this machine (``weighin bench --jobs``), for their memory alone.

Each job has a cache of its own, which is removed at the end: two cells that read one file would share
its pages in the page cache, and the kernel charges a page to the cell that read it first.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weighin import child_process
from weighin.checkpoint import cache
from weighin.engines.driver import Driver
from weighin.engines.scheduler import Node
from weighin.engines.transport import NodeFacts
from weighin.errors import ConfigError
from weighin.isolation import delegation
from weighin.pipes import last_line, ready
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.protocol import encode_event
from weighin.records import run_folder
from weighin.records.machine import CONCURRENT
from weighin.result import Result
from weighin.run import interrupts, run_lock, runner
from weighin.run.machines import THIS_MACHINE, Machines
from weighin.run.task import Progress, Run
from weighin.units import format_bytes


class JobsEngine:
    """Runs several cells at a time, whose limits fit together into the RAM of this machine."""

    machines: Machines = THIS_MACHINE

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def run(self, task: Run, progress: Progress) -> Sequence[Result]:
        with runner.discarding(task):
            check(task, self._jobs)
            with (
                interrupts.stoppable(),
                run_lock.only_run(task.patience_s, lambda text: progress.preparing(text, None)),
            ):
                shutil.rmtree(_caches(), ignore_errors=True)  # of a run that was killed
                try:
                    jobs = LocalJobs(self._jobs, task.isolation.name)
                    Driver(jobs, jobs.nodes, task, progress, self._marked).run()
                finally:
                    shutil.rmtree(_caches(), ignore_errors=True)
        return run_folder.read(task.folder).results

    def _marked(self, result: Result, _: Node) -> Result:
        """Say in the result that its times are not comparable."""
        return replace(
            result,
            environment=result.environment | {CONCURRENT: self._jobs},
            warnings=(
                *result.warnings,
                f"up to {self._jobs} cells ran at once (--jobs): times are not comparable",
            ),
        )


def _caches() -> Path:
    """Return the folder of the jobs' caches, which exists while a run measures."""
    return cache.folder() / "jobs"


def check(task: Run, jobs: int) -> None:
    """Raise ConfigError if the cells of a run cannot be measured ``jobs`` at a time."""
    cells = [each.cell for each in task.planned if not each.skip]
    if task.settings.checkpoint or task.settings.checkpoints:
        raise ConfigError(
            "--jobs with a checkpoint of your own: cells that run at once would share its pages in the"
            " page cache, and the kernel charges a page to the cell that read it first",
            "leave --jobs or --checkpoint out",
        )
    if task.settings.steady or task.settings.trace or any(cell.needs_gpu for cell in cells):
        raise ConfigError(
            "--jobs measures the memory of cells on the CPU, without --steady and --trace",
            "leave --jobs out",
        )
    limits = [cell.ram_limit_bytes for cell in cells if cell.ram_limit_bytes is not None]
    if len(limits) < len(cells):
        raise ConfigError(
            "--jobs needs a RAM limit for each cell, so that the cells cannot disturb each other",
            "add --ram, or leave --jobs out",
        )
    needed, (_, free) = sum(sorted(limits)[-jobs:]), delegation.ram_bytes(task.isolation.name)
    if needed > free:
        raise ConfigError(
            f"--jobs {jobs}: the limits of {jobs} cells are {format_bytes(needed)} together, and"
            f" {format_bytes(free)} of RAM are free",
            "use fewer jobs, or smaller limits",
        )


class LocalJobs:
    """The jobs of this machine as the transport of a driver (``weighin.engines.transport``)."""

    def __init__(self, jobs: int, isolation: str) -> None:
        self._isolation = isolation
        total, _ = delegation.ram_bytes(isolation)
        nodes = [Node(f"job-{n}", f"job {n}", total, total) for n in range(1, jobs + 1)]
        self.nodes = self.ask_again(nodes)

    def submit(self, node: Node, assignment: Mapping[str, Any]) -> "LocalTask":
        own = {
            # The driver holds this machine's lock. Each job has the same lock file in every run, and
            # so removes what the same job of a dead run left.
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

    def ask_again(self, nodes: Sequence[Node]) -> Sequence[NodeFacts]:
        _, free = delegation.ram_bytes(self._isolation)
        isolations = {self._isolation: ""}
        return [NodeFacts(replace(node, free_ram_bytes=free), isolations) for node in nodes]

    def joined(self, _: Collection[str]) -> tuple[Sequence[NodeFacts], Sequence[str]]:
        return [], []


class LocalTask:
    """A process of ``weighin.engines.node`` on this machine."""

    def __init__(self, assignment: bytes, variables: Mapping[str, str]) -> None:
        self._node = child_process.Child(child_process.module("weighin.engines.node"), variables)
        self._node.send(assignment)  # input stays open: its end would stop the process
        self._ended = False

    def filenos(self) -> list[int]:
        """Return the descriptors of which one is ready when there may be an event."""
        return self._node.filenos()

    def has_event(self) -> bool:
        """Read what has arrived; tell whether there is an event, or the end."""
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
