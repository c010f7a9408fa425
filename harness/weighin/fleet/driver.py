"""Hand out a plan's cells (measurements), several at once, and write their records, which only this
process does. ``Jobs`` runs them on this machine (``weighin bench --jobs``), ``cluster`` on other ones.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from threading import Event, current_thread
from typing import TYPE_CHECKING, Any, Final

from weighin import child_process
from weighin.cell import Cell
from weighin.checkpoint import cache, staging
from weighin.errors import ConfigError, HarnessError, NoNodeLeft, RecordError
from weighin.files import no_link
from weighin.fleet import node
from weighin.isolation import cgroup
from weighin.plan.task import Demand, Node, Planned, Progress, Run, skipped
from weighin.probes import environment
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.records import run_folder
from weighin.records.machine import CONCURRENT
from weighin.records.run_folder import parse
from weighin.result import SCHEMA, Outcome, Result
from weighin.run import interrupts, runner
from weighin.suite import registry
from weighin.text import one_line
from weighin.units import format_bytes

if TYPE_CHECKING:
    from weighin.fleet.cluster import Cluster

_WAIT_S: Final = 0.5  # until the driver looks for signals again
_LOOK_S: Final = 3.0  # until it looks again for nodes that were lost or have joined
_HERE: Final = "this machine"


class Driver:
    """Runs the cells of one plan; the ``crew`` chooses which of the able nodes runs a cell.

    No more cells are handed out than the able nodes can run at once, so that a node that joins gets
    the next cell.
    """

    def __init__(self, crew: "Cluster | Jobs", task: Run, progress: Progress) -> None:
        self._crew, self._task, self._progress = crew, task, progress
        self._names = self._alive = crew.names()
        self._waiting = {Demand.of(each.cell): deque[Planned]() for each in task.planned}
        self._unable: dict[
            Demand, dict[str, HarnessError]
        ]  # the nodes that get no such cell, and why
        self._unable = {demand: {} for demand in self._waiting}
        self._running: dict[
            Future[Any], tuple[Planned, float]
        ] = {}  # and the GPUs that it reserves
        self._tested = set[str]()  # the nodes on which a worker was tested, with all limits
        self._steps: dict[str, str] = {}
        self._lines = set[str]()

    def run(self) -> Sequence[Result]:
        """Run every cell that has no record yet, and return the results of all cells."""
        task = self._task
        code = environment.code()
        self._git = {name: value for name, value in code.items() if name.startswith("git_")}
        # A node finds a strategy that is part of weighin in its own installation.
        own = {str(info.path) for info in registry.strategies(task.settings.operation).values()}
        paths = task.settings.strategy_paths
        paths = {name: "" if path in own else path for name, path in paths.items()}
        ours = {"strategy_paths": paths, "shard": None, "engine": {}}
        with (
            runner.discarding(task),
            runner.only_writer(task.folder),
            interrupts.stoppable(),
            interrupts.put_off(),
        ):
            results = task.begin()
            todo = {c.id for c in run_folder.pending([p.cell for p in task.planned], results)}
            for planned in task.planned:
                if planned.cell.id in todo and planned.skip:
                    self._record(skipped(planned, {}))
                elif planned.cell.id in todo:
                    self._waiting[Demand.of(planned.cell)].append(planned)
            waiting = [each.cell for cells in self._waiting.values() for each in cells]
            self._assignment = {
                "kind": "measure",
                "settings": task.settings.model_copy(update=ours).as_json(),
                "patience_s": min(task.patience_s, 1e9),  # JSON has no infinity
                "limits": [*{(each.ram_limit_bytes, each.ranks) for each in waiting}],
                "is_tested": self._tested,
            }
            try:
                self._run()
            finally:
                self._crew.stop(self._running)
        return task.results

    def _run(self) -> None:
        looked_s = time.monotonic()
        while self._running or any(self._waiting.values()):
            interrupts.check()
            if time.monotonic() - looked_s > _LOOK_S:
                self._look()
                looked_s = time.monotonic()
            self._hand_out()
            if not self._running:
                raise self._stuck()
            for done in wait(self._running, _WAIT_S, FIRST_COMPLETED).done:
                self._take(done, self._running.pop(done)[0])
            for who, text, is_line in self._crew.said():
                name = self._names.get(who, who)
                self._steps[name] = text
                if is_line:
                    self._say(f"{name}: {text}")
            self._progress.nodes({name: step for name, step in self._steps.items() if step})

    def _able(self, demand: Demand, gpus_needed: float = 0) -> dict[str, float]:
        """Return the GPUs of each node that can run such cells."""
        gpus = {place: self._crew.gpus.get(place, 0) for place in self._alive}
        needed, unable = max(gpus_needed, demand.device != "cpu"), self._unable[demand]
        return {place: n for place, n in gpus.items() if n >= needed and place not in unable}

    def _look(self) -> None:
        """Look which nodes were lost, and which have joined; take back the cells that no node can run."""
        alive = self._crew.names()
        lost = self._alive.keys() - alive.keys()
        self._alive, self._names = alive, self._names | alive
        for place in lost:
            self._leave_out(place, HarnessError("the node was lost", "add a node"))
        for task, (planned, gpus) in [*self._running.items()] if lost else []:
            demand = Demand.of(planned.cell)
            if not task.done() and not self._able(demand, gpus):
                self._crew.stop([task])
                del self._running[task]
                self._waiting[demand].appendleft(planned)

    def _hand_out(self) -> None:
        for demand, cells in self._waiting.items():
            able = self._able(demand)
            out = sum(Demand.of(each.cell) == demand for each, _ in self._running.values())
            for _ in range(min(len(cells), self._crew.slots * len(able) - out)):
                planned = cells.popleft()
                asked = {**self._assignment, "cell": asdict(planned.cell)}
                gpus = min(able.values())
                task = self._crew.submit(asked, self._unable[demand], gpus)
                self._running[task] = planned, gpus

    def _take(self, done: Future[Any], planned: Planned) -> None:
        cell, demand = planned.cell, Demand.of(planned.cell)
        try:
            place, events = done.result()
        except Exception as lost:  # of Ray, after the last try
            place, events = "", {"ended": {"why": f"the node was lost: {lost}"}}
        name = self._names.get(place, place)  # a node that has just joined has no name yet
        record, short, error = (events.get(kind) for kind in ("record", "short", "error"))
        if record:
            self._tested.add(place)
            self._write(cell, record["files"])
            result = parse(Result, record["record"].encode(), f"a record from the node {name}")
            self._record(self._crew.placed(replace(result, cell=cell), place))
        elif short or error:
            self._waiting[demand].appendleft(planned)
        else:
            why = one_line(events["ended"]["why"])
            why = f"on {name}: {why}" if place else why
            now = datetime.now(UTC).isoformat("T", "milliseconds")
            failed = Result(SCHEMA, cell, Outcome.MEASUREMENT_FAILED, message=why, started_at=now)
            self._record(self._crew.placed(failed, place))
        if short:
            why = demand.lacks_now(Node(place, name, **short))
            self._unable[demand][place] = HarnessError(why, "free memory on a node, or add a node")
        if error:
            self._leave_out(place, HarnessError(**error))

    def _leave_out(self, place: str, error: HarnessError) -> None:
        """Give a node no further cell."""
        name = self._names.get(place, place)
        error.message = f"{name}: {error.message}"
        self._say(f"no further cell for {error.message}")
        for unable in self._unable.values():
            unable[place] = error
        self._steps.pop(name, None)

    def _say(self, line: str) -> None:
        """Print a line once: a node prepares itself for each cell."""
        if line not in self._lines:
            self._lines.add(line)
            self._progress.preparing(line, None)

    def _stuck(self) -> HarnessError:
        demand = next(demand for demand, cells in self._waiting.items() if cells)
        lacking = HarnessError(f"no node has {demand.device}", "add a node")
        *others, last = self._unable[demand].values() or [lacking]
        count = sum(map(len, self._waiting.values()))
        why = "; ".join(sorted(error.message for error in (*others, last)))
        message = f"{count} cell{'s' * (count > 1)} cannot run: {why}"
        return NoNodeLeft(message, last.repair, exit_code=last.exit_code)

    def _record(self, result: Result) -> None:
        result = replace(result, environment=result.environment | self._git)
        self._task.results.append(run_folder.append(self._task.folder, result))
        self._progress.finished(self._task.results[-1])

    def _write(self, cell: Cell, files: dict[str, str]) -> None:
        """Write a cell's samples before its record, so that a record always has its samples."""
        for name, content in files.items():
            if name not in run_folder.paths_of(cell):
                raise RecordError(f"a node sent the file {name!r}, which no record names")
            path = self._task.folder / name
            with run_folder.writing(path, f"; the measurement of {cell.id} is lost"):
                no_link(path, self._task.folder)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content.encode())


class Jobs:
    """Threads that run one cell at a time each, for a ``Driver``, which sees them as one node.

    Two cells that read one file would share its pages in the page cache, and the kernel charges a page
    to the cell that read it first. Each job therefore has checkpoint files of its own, in ``caches``.
    """

    def __init__(self, jobs: int, caches: Path) -> None:
        self.slots, self.gpus = jobs, dict[str, float]()
        self._caches = caches
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
        return _HERE, node.run(
            {**assignment, "is_tested": _HERE in assignment["is_tested"]},  # when the cell begins
            child_process.environment(inherit=False) | own,
            lambda *step: self._said.put((job, *step)),
            self._stopped.is_set,
        )

    def stop(self, _: Iterable[Future[Any]]) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def said(self) -> Iterator[node.Step]:
        while not self._said.empty():
            yield self._said.get()

    def names(self) -> dict[str, str]:
        return {_HERE: _HERE}

    def placed(self, result: Result, _: str) -> Result:
        """Add the number of jobs, and a warning that times are not comparable, to a result."""
        told = f"up to {self.slots} cells ran at once (--jobs): times are not comparable"
        environment = result.environment | {CONCURRENT: self.slots}
        return replace(result, environment=environment, warnings=(*result.warnings, told))


def run_jobs(jobs: int, task: Run, progress: Progress) -> Sequence[Result]:
    """Run ``jobs`` cells at a time; their RAM limits together must fit in this machine's free RAM."""
    with runner.discarding(task):
        check(task, jobs)
        with (
            interrupts.stoppable(),
            runner.only_run(task.patience_s, lambda text: progress.preparing(text, None)),
            staging.own_folder(cache.folder(), "jobs-") as caches,
        ):
            return Driver(Jobs(jobs, caches), task, progress).run()


def check(task: Run, jobs: int) -> None:
    cells, settings = [each.cell for each in task.planned if not each.skip], task.settings
    if settings.checkpoint or settings.checkpoints or settings.storage:
        raise ConfigError(
            "--jobs with --checkpoint or --storage: all cells would read the same files, and the"
            " figures of the cells that do not read them first would be too small",
            "leave --jobs out, or --checkpoint and --storage",
        )
    if settings.steady or settings.trace or any(cell.needs_gpu for cell in cells):
        raise ConfigError(
            "--jobs measures only the memory of cells on the CPU, without --steady and --trace",
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
