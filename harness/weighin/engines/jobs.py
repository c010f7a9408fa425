"""Run several cells at once on this machine (``weighin bench --jobs``), for their memory alone.

Each job has a cache of its own, which is removed at the end: two cells that read one file would share
its pages in the page cache, and the kernel charges a page to the cell that read it first.
"""

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from weighin.checkpoint import cache
from weighin.engines.dispatch import Node
from weighin.engines.driver import Driver
from weighin.engines.transport import NodeFacts
from weighin.errors import ConfigError
from weighin.isolation.process import CODE_PATH
from weighin.probes import environment
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.protocol import encode_event
from weighin.record import Result
from weighin.records import run_folder
from weighin.records.machine import CONCURRENT
from weighin.run import interrupts, run_lock, runner
from weighin.run.runner import Progress, Run
from weighin.run.site import THIS_MACHINE, Site
from weighin.units import MIB, format_bytes

_PART_BYTES: Final = MIB


class JobsEngine:
    """Runs several cells at a time, whose limits fit together into the RAM of this machine."""

    site: Site = THIS_MACHINE

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
    if task.checkpoint:
        raise ConfigError(
            "--jobs with a checkpoint of your own: cells that run at once would share its pages in the"
            " page cache, and the kernel charges a page to the cell that read it first",
            "leave --jobs or --checkpoint out",
        )
    if task.steady or task.trace or any(cell.device != "cpu" for cell in cells):
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
    needed, free = sum(sorted(limits)[-jobs:]), environment.free_ram_bytes()
    if needed > free:
        raise ConfigError(
            f"--jobs {jobs}: the limits of {jobs} cells are {format_bytes(needed)} together, and"
            f" {format_bytes(free)} of RAM are free",
            "use fewer jobs, or smaller limits",
        )


class LocalJobs:
    """The jobs of this machine as the transport of a driver (``weighin.engines.transport``)."""

    def __init__(self, jobs: int, isolation: str) -> None:
        self._isolations = {isolation: ""}
        total = environment.total_ram_bytes()
        nodes = [Node(f"job-{n}", f"job {n}", total, total) for n in range(1, jobs + 1)]
        self.nodes = self.ask_again(nodes)

    def submit(self, node: Node, assignment: Mapping[str, Any]) -> "LocalTask":
        own = {
            "PYTHONPATH": os.pathsep.join(map(str, CODE_PATH)),
            # The driver holds this machine's lock. Each job has the same lock file in every run, and
            # so removes what the same job of a dead run left.
            LOCK_VARIABLE: f"{run_lock.lock_path()}.{node.id}",
            "WEIGHIN_CACHE": str(_caches() / node.id),
        }
        return LocalTask(encode_event({"event": "assignment", **assignment}), os.environ | own)

    def wait(self, tasks: Sequence["LocalTask"], timeout_s: float) -> Sequence["LocalTask"]:
        silent = [task for task in tasks if not task.has_event]
        if len(silent) == len(tasks):
            readable, _, _ = select.select(silent, [], [], timeout_s)
            for task in readable:
                task.read()
        return [task for task in tasks if task.has_event]

    def is_alive(self, _: Node) -> bool:
        return True

    def ask_again(self, nodes: Sequence[Node]) -> Sequence[NodeFacts]:
        free = environment.free_ram_bytes()
        return [NodeFacts(replace(node, free_ram_bytes=free), self._isolations) for node in nodes]

    def joined(self, _: Collection[str]) -> tuple[Sequence[NodeFacts], Sequence[str]]:
        return [], []


class LocalTask:
    """A process of ``weighin.engines.node`` on this machine."""

    def __init__(self, assignment: bytes, variables: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "weighin.engines.node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=variables,
            start_new_session=True,  # Ctrl-C reaches the driver, which ends this process
        )
        assert self._process.stdin
        self._process.stdin.write(assignment)
        self._process.stdin.flush()  # and open: its end would stop the process
        self._lines: deque[bytes | None] = deque()  # None: the end
        self._rest = b""

    @property
    def has_event(self) -> bool:
        return bool(self._lines)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when ``read`` does not block."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def read(self) -> None:
        """Read the events that have arrived."""
        part = os.read(self.fileno(), _PART_BYTES)
        if part:
            *lines, self._rest = (self._rest + part).split(b"\n")
            self._lines += lines
        else:
            self._lines += [self._ending(), None]

    def next_event(self) -> bytes | None:
        return self._lines.popleft()

    def cancel(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()

    def _ending(self) -> bytes:
        with self._process as process:
            code = process.wait()
        with self._errors as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else ""
        return encode_event({"event": "ended", "code": code, "stderr": last})


@contextmanager
def opened(jobs: int) -> Iterator[JobsEngine]:
    """Return the engine that runs ``jobs`` cells at once."""
    yield JobsEngine(jobs)
