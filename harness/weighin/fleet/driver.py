"""Hand out a plan's cells, several at once, and write their records: only the driver's process does.

The cells run on the nodes of a ``Cluster``, or as ``Jobs`` of this machine. Each job has checkpoint files
of its own: the kernel charges a page of a shared file to the cell that read it first.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, current_thread
from typing import TYPE_CHECKING, Any, Final

from weighin import child_process
from weighin.cell import Cell
from weighin.checkpoint import staging
from weighin.errors import ConfigError, HarnessError, NoNodeLeft, RecordError
from weighin.files import no_link
from weighin.fleet import node
from weighin.isolation import cgroup
from weighin.plan.task import Demand, Node, Planned, Progress, Run, skipped
from weighin.probes import environment
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.records import run_folder
from weighin.records.machine import CONCURRENT
from weighin.result import SCHEMA, Outcome, Result
from weighin.run import interrupts, runner
from weighin.suite import registry
from weighin.text import one_line
from weighin.units import format_bytes

if TYPE_CHECKING:
    from weighin.fleet.cluster import Cluster

_HERE: Final = "this machine"
_WAIT_S: Final = 0.5  # until the driver looks for signals again
_LOOK_S: Final = 3.0  # until it looks again for nodes that were lost or have joined


class Driver:
    """Runs the cells of one plan; the ``crew`` chooses which of the able nodes runs a cell. No more cells are
    handed out than the able nodes can run at once, so that each starts with what its node said last.
    """

    def __init__(
        self, crew: "Cluster | Jobs", nodes: Sequence[Node], task: Run, progress: Progress
    ) -> None:
        self._crew, self._task, self._progress = crew, task, progress
        self._names = self._alive = {n.id: n.name for n in nodes}
        self._left_out = {n.id for n in nodes if n.isolations[task.isolation.name]}
        self._trouble: HarnessError = NoNodeLeft(f"none can use {task.isolation.name}")
        self._waiting = {Demand.of(each.cell): deque[Planned]() for each in task.planned}
        # Why nodes cannot run cells of a demand: never, or with what they had free at the last cell.
        self._short = {
            demand: {n.id: why for n in nodes if (why := demand.obstacle(n))}
            for demand in self._waiting
        }
        self._asks_again = True
        self._running: dict[Future[Any], tuple[Planned, Demand, float]] = {}
        self._tested = set[str]()  # the nodes on which a worker was tested, with all limits

    def run(self) -> Sequence[Result]:
        task = self._task
        self._code = {n: value for n, value in environment.code().items() if n.startswith("git_")}
        # A node finds a strategy that is part of weighin in its own installation.
        own = {str(info.path) for info in registry.strategies(task.settings.operation).values()}
        paths = {n: "" if p in own else p for n, p in task.settings.strategy_paths.items()}
        ours = {"strategy_paths": paths, "shard": None, "engine": {}}
        self._assignment = {
            "kind": "measure",
            "settings": task.settings.model_copy(update=ours).as_json(),
            "patience_s": min(task.patience_s, 1e9),  # JSON has no infinity
        }
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
            limits = {(each.ram_limit_bytes, each.ranks) for each in waiting}
            self._assignment["limits"] = list(limits)
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
            if not self._running and self._asks_again:  # a node may have more free RAM now
                self._short, self._asks_again = {demand: {} for demand in self._waiting}, False
                self._hand_out()
            if not self._running:
                raise self._stuck()
            for done in wait(self._running, _WAIT_S, FIRST_COMPLETED).done:
                self._take(done, *self._running.pop(done)[:2])

    def _able(self, demand: Demand, gpus: float = 0) -> set[str]:
        places = self._alive.keys() - self._left_out - self._short[demand].keys()
        least = max(gpus, demand.device != "cpu")
        return {place for place in places if self._crew.gpus.get(place, 0) >= least}

    def _look(self) -> None:
        """Look which nodes were lost, and which have joined; take back the cells that no node can run."""
        alive = self._crew.names()
        lost = self._alive.keys() - alive.keys()
        self._alive, self._names = alive, self._names | alive
        for place in lost - self._left_out:
            self._leave_out(place, HarnessError("the node was lost", "add a node"))
        for task, (planned, demand, gpus) in list(self._running.items()):
            # The other jobs of this machine end their cells.
            if self._crew.slots == 1 and not task.done() and not self._able(demand, gpus):
                self._crew.stop([task])
                del self._running[task]
                self._waiting[demand].appendleft(planned)

    def _hand_out(self) -> None:
        for demand, cells in self._waiting.items():
            able = self._able(demand)
            out = sum(each == demand for _, each, _ in self._running.values())
            free = self._crew.slots * len(able) - out
            for planned in [cells.popleft() for _ in range(min(len(cells), free))]:
                told = {"cell": asdict(planned.cell), "is_tested": [*self._tested]}
                gpus = min(self._crew.gpus.get(place, 0) for place in able)
                without = self._left_out | self._short[demand].keys()
                task = self._crew.submit({**self._assignment, **told}, without, gpus)
                self._running[task] = planned, demand, gpus
                self._progress.starting(planned.cell)

    def _take(self, done: Future[Any], planned: Planned, demand: Demand) -> None:
        cell = planned.cell
        try:
            place, events = self._crew.answer(done)
        except HarnessError as lost:
            self._fail(cell, "", lost.message)
            return
        self._names = {place: place} | self._names  # of a node that has just joined
        record, short, error = (events.get(kind) for kind in ("record", "short", "error"))
        if record:
            self._tested.add(place)
            self._write(cell, record["files"])
            where = f"a record from the node {self._names[place]}"
            result = replace(run_folder.parse(Result, record["record"].encode(), where), cell=cell)
            self._record(self._crew.placed(result, place))
        elif short or error:
            self._waiting[demand].appendleft(planned)
        else:
            code, stderr = events["ended"]["code"], one_line(events["ended"]["stderr"])
            why = f"exit code {code}" + (f", {stderr}" if stderr else "")
            self._fail(cell, place, f"on {self._names[place]}: {why}")
        if short:
            has = {name: value for name, value in short.items() if name != "event"}
            there = Node(place, self._names[place], **has)
            self._short[demand][place] = demand.obstacle(there, is_now=True)
        if error and place not in self._left_out:
            told = {name: error[name] for name in ("message", "repair", "exit_code")}
            self._leave_out(place, HarnessError(**told))

    def _leave_out(self, place: str, error: HarnessError) -> None:
        message = f"{self._names[place]}: {error.message}"
        self._progress.preparing(f"no further cell for {message}", None)
        self._trouble = HarnessError(message, error.repair, exit_code=error.exit_code)
        self._left_out.add(place)

    def _stuck(self) -> HarnessError:
        left = sum(map(len, self._waiting.values()))
        waiting = f"{left} cell{'s' * (left > 1)} cannot run"
        if not (nodes := self._alive.keys() - self._left_out):
            message, last = f"{waiting}, no node is left: {self._trouble.message}", self._trouble
            return NoNodeLeft(message, last.repair, exit_code=last.exit_code)
        demand = next(demand for demand, cells in self._waiting.items() if cells)
        short, no_gpu = self._short[demand], f"has no {demand.device}"
        reasons = "; ".join(sorted(short.get(n, f"{self._names[n]} {no_gpu}") for n in nodes))
        return NoNodeLeft(f"{waiting}: {reasons}", "free memory on a node, or add a node")

    def _fail(self, cell: Cell, place: str, message: str) -> None:
        now = datetime.now(UTC).isoformat("T", "milliseconds")
        failed = Result(SCHEMA, cell, Outcome.MEASUREMENT_FAILED, message=message, started_at=now)
        self._record(self._crew.placed(failed, place))

    def _record(self, result: Result) -> None:
        result = replace(result, environment=result.environment | self._code)
        self._asks_again = True
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
    """Threads that run cells for a ``Driver``, which sees them as one node."""

    def __init__(self, jobs: int, isolation: str, caches: Path) -> None:
        self.slots, self.gpus = jobs, dict[str, float]()
        self._isolation, self._caches, self._is_tested = isolation, caches, False
        self._pool = ThreadPoolExecutor(jobs, "job")
        self._stopped = Event()

    def submit(self, assignment: Mapping[str, Any], *_: object) -> Future[Any]:
        return self._pool.submit(self._run, assignment)

    def _run(self, assignment: Mapping[str, Any]) -> node.Answer:
        job = current_thread().name  # job_0, job_1
        own = {
            # The driver holds this machine's lock. A job has the same lock in every run, and removes
            # what the job of a dead run with this lock left.
            LOCK_VARIABLE: f"{runner.lock_name()}.{job}",
            "WEIGHIN_CACHE": str(self._caches / job),
        }
        told = {**assignment, "is_tested": self._is_tested}  # as it is when the cell begins
        variables = child_process.environment(inherit=False) | own
        events = node.by_kind(node.run(told, variables, self._stopped.is_set))
        self._is_tested |= "record" in events
        return _HERE, events

    def answer(self, done: Future[node.Answer]) -> node.Answer:
        return done.result()

    def stop(self, _: Iterable[Future[Any]]) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def names(self) -> dict[str, str]:
        return {_HERE: _HERE}

    def node(self) -> Node:
        total, free = cgroup.ram_bytes(self._isolation)
        return Node(_HERE, _HERE, total, free, {self._isolation: ""})

    def placed(self, result: Result, _: str) -> Result:
        told = f"up to {self.slots} cells ran at once (jobs): times are not comparable"
        environment = result.environment | {CONCURRENT: self.slots}
        return replace(result, environment=environment, warnings=(*result.warnings, told))


def run_jobs(jobs: int, task: Run, progress: Progress) -> Sequence[Result]:
    with runner.discarding(task):
        check_jobs(task, jobs)
        with (
            interrupts.stoppable(),
            runner.only_run(task.patience_s, lambda text: progress.preparing(text, None)),
            staging.own_folder(staging.folder(), "jobs-") as caches,
        ):
            crew = Jobs(jobs, task.isolation.name, caches)
            return Driver(crew, [crew.node()], task, progress).run()


def check_jobs(task: Run, jobs: int) -> None:
    cells = [each.cell for each in task.planned if not each.skip]
    if task.settings.checkpoint or task.settings.checkpoints or task.settings.storage:
        raise ConfigError(
            "jobs with --checkpoint or storage: all cells would read the same files. The kernel"
            " charges a page of a file only to the cell that read it first, so that the figures"
            " of the other cells would be too small",
            "leave jobs out, or --checkpoint and storage",
        )
    if task.settings.steady or any(cell.needs_gpu for cell in cells):
        raise ConfigError(
            "with jobs, weighin measures only the memory of cells on the CPU, without steady",
            "leave jobs out",
        )
    limits = [cell.ram_limit_bytes for cell in cells if cell.ram_limit_bytes is not None]
    if len(limits) < len(cells):
        raise ConfigError(
            "jobs needs a RAM limit for each cell, because cells that run at once could take"
            " memory from each other",
            "add --ram, or leave jobs out",
        )
    needed, (_, free) = sum(sorted(limits)[-jobs:]), cgroup.ram_bytes(task.isolation.name)
    if needed > free:
        raise ConfigError(
            f"jobs={jobs}: the RAM limits of {jobs} cells are {format_bytes(needed)} together,"
            f" but only {format_bytes(free)} of RAM are free",
            "give a smaller number to jobs, or smaller limits to --ram",
        )
