"""Choose where a plan's cells run: one by one here (``runner``), or several at once: as ``Jobs`` of this machine,
or on the nodes of a ``Cluster`` (Ray). The ``Driver`` then hands them out, and alone writes their records.

Each job has checkpoint files of its own: the kernel charges a page of a shared file to the cell that read
it first.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, current_thread
from typing import TYPE_CHECKING, Any, Final

from weighin import child_process
from weighin.cell import Cell
from weighin.checkpoint import temporary_folders
from weighin.errors import ConfigError, HarnessError, RecordError, UnknownName
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
from weighin.text import one_line, short
from weighin.units import format_bytes

if TYPE_CHECKING:
    from weighin.fleet.ray_cluster import Cluster

NAMES: Final = ("local", "ray")
_HERE: Final = "this machine"
_WAIT_S: Final = 0.5  # until the driver looks for signals again

Perform = Callable[[Run, Progress], Sequence[Result]]
"""Runs every cell without a record, and returns the results of all cells."""


def engine_settings(
    name: str, address: str, labels: Mapping[str, str], jobs: int = 1
) -> dict[str, Any]:
    """Return an engine's settings for plan.json; empty if this machine runs the cells one by one."""
    if name not in NAMES:
        raise UnknownName("engine", name, NAMES)
    if name == "ray":
        if jobs > 1:
            why = f"jobs={jobs}: with --engine ray, each node runs one cell at a time"
            raise ConfigError(why, "leave jobs out")
        return {"name": name, "address": address or "auto", "labels": dict(labels)}
    if address or labels:
        why = "address and labels have an effect only with --engine ray"
        raise ConfigError(why, "add --engine ray, or leave them out")
    return {"name": name, "jobs": jobs} if jobs > 1 else {}


@contextmanager
def opened(chosen: Mapping[str, Any]) -> Iterator[tuple[Sequence[Node], Perform]]:
    """Yield the nodes that run the cells (none for this machine), and the function that runs them."""
    match chosen:
        case {"name": "local", "jobs": int(number)}:
            yield (), lambda task, progress: run_jobs(number, task, progress)
        case {"name": "ray", "address": str(address), "labels": dict(labels)}:
            from weighin.fleet.ray_cluster import connected  # imports ray

            with connected(address, labels) as cluster:
                nodes = cluster.find()
                yield nodes, lambda task, progress: Driver(cluster, nodes, task, progress).run()
        case _ if chosen:
            what = f"plan.json has an engine that weighin cannot use: {short(dict(chosen))}"
            raise ConfigError(what, "start a new run")
        case _:
            yield (), runner.run


class Driver:
    """Runs the cells of one plan; the ``crew`` chooses which of the able nodes runs a cell. Cells
    do not queue at nodes: each is handed out when a node can run it, by what this node last said is free.
    """

    def __init__(
        self, crew: "Cluster | Jobs", nodes: Sequence[Node], task: Run, progress: Progress
    ) -> None:
        self._crew, self._task, self._progress = crew, task, progress
        self._names = self._alive = {n.id: n.name for n in nodes}
        unable = [n.id for n in nodes if n.isolations[task.isolation.name]]
        none_can = HarnessError(f"none can use {task.isolation.name}", exit_code=4)
        self._left_out: dict[str, HarnessError] = dict.fromkeys(unable, none_can)
        self._waiting = {Demand.of(each.cell): deque[Planned]() for each in task.planned}
        # Why nodes cannot run cells of a demand: never, or with what they had free at the last cell.
        self._short = {
            demand: {n.id: why for n in nodes if (why := demand.obstacle(n))}
            for demand in self._waiting
        }
        self._asks_again = True
        self._running: dict[Future[Any], tuple[Planned, Demand, float]] = {}
        self._tested = set[str]()  # the nodes on which a worker was tested, with all limits
        self._code = {n: value for n, value in environment.code().items() if n.startswith("git_")}

    def run(self) -> Sequence[Result]:
        from weighin.suite import registry  # takes 60 ms

        task, settings = self._task, self._task.settings
        # A node finds a strategy that is part of weighin in its own installation.
        own = {str(info.path) for info in registry.strategies(settings.operation).values()}
        paths = {n: "" if p in own else p for n, p in settings.strategy_paths.items()}
        ours = {"strategy_paths": paths, "shard": None, "engine": {}}
        with (
            runner.discarding(task),
            runner.only_writer(task.folder),
            interrupts.stoppable(),
            interrupts.put_off(),
        ):
            todo = {c.id for c in run_folder.pending([p.cell for p in task.planned], task.begin())}
            limits = set[tuple[int | None, int]]()
            for planned in (each for each in task.planned if each.cell.id in todo):
                if planned.skip:
                    self._record(skipped(planned, {}))
                else:
                    self._waiting[Demand.of(planned.cell)].append(planned)
                    limits.add((planned.cell.ram_limit_bytes, planned.cell.ranks))
            self._assignment = {
                "kind": "measure",
                "settings": settings.model_copy(update=ours).as_json(),
                "patience_s": min(task.patience_s, 1e9),  # JSON has no infinity
                "limits": list(limits),
            }
            try:
                self._run()
            finally:
                self._crew.stop(self._running)
        return task.results

    def _run(self) -> None:
        while self._running or any(self._waiting.values()):
            interrupts.check()
            self._look()
            self._hand_out()
            if not self._running and self._asks_again:  # a node may have more free RAM now
                self._short, self._asks_again = {demand: {} for demand in self._waiting}, False
                self._hand_out()
            if not self._running:
                raise self._stuck()
            for done in wait(self._running, _WAIT_S, FIRST_COMPLETED).done:
                self._take(done, *self._running.pop(done)[:2])

    def _able(self, demand: Demand, gpus: float = 0) -> set[str]:
        places = self._alive.keys() - self._left_out.keys() - self._short[demand].keys()
        least = max(gpus, demand.device != "cpu")
        return {n for n in places if self._crew.gpus.get(n, 0) >= least}

    def _look(self) -> None:
        """Find which nodes were lost and which have joined; take back the cells that no node can run."""
        lost, self._alive = self._alive, self._crew.names()
        self._names = self._names | self._alive
        for place in lost.keys() - self._alive.keys():
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
                without = self._left_out.keys() | self._short[demand].keys()
                gpus = min(self._crew.gpus[n] for n in able) if demand.device != "cpu" else 0
                task = self._crew.submit({**self._assignment, **told}, without, gpus)
                self._running[task] = planned, demand, gpus
                self._progress.starting(planned.cell)

    def _take(self, done: Future[Any], planned: Planned, demand: Demand) -> None:
        cell = planned.cell
        place, told = self._crew.answer(done)
        name = self._names.get(place, place)  # of a node that has just joined
        if record := told.get("record"):
            self._tested.add(place)
            self._write(cell, record["files"])
            text = record["record"].encode()
            result = run_folder.parse(Result, text, f"a record from the node {name}")
            self._record(self._crew.placed(replace(result, cell=cell), place, name))
        elif "short" in told or "error" in told:
            self._waiting[demand].appendleft(planned)
        else:
            now = datetime.now(UTC).isoformat("T", "milliseconds")
            why = one_line(told["ended"]["why"])
            message = f"on {name}: {why}" if place else why
            failed = Result(SCHEMA, cell, Outcome.MEASUREMENT_FAILED, message, started_at=now)
            self._record(self._crew.placed(failed, place, name))
        if short := told.get("short"):
            self._short[demand][place] = demand.obstacle(Node(place, name, **short), is_now=True)
        if error := told.get("error"):
            self._leave_out(place, HarnessError(**error))

    def _leave_out(self, place: str, error: HarnessError) -> None:
        if place not in self._left_out:
            error.message = f"{self._names.get(place, place)}: {error.message}"
            self._progress.preparing(f"no further cell for {error.message}", None)
            self._left_out[place] = error

    def _stuck(self) -> HarnessError:
        left = sum(map(len, self._waiting.values()))
        waiting = f"{left} cell{'s' * (left > 1)} cannot run"
        if not (nodes := self._alive.keys() - self._left_out.keys()):
            last = [*self._left_out.values()][-1]
            message = f"{waiting}, because no node is left: {last.message}"
            return HarnessError(message, last.repair, exit_code=last.exit_code)
        demand = next(demand for demand, cells in self._waiting.items() if cells)
        lacking, no_gpu = self._short[demand], f"has no {demand.device}"
        reasons = "; ".join(sorted(lacking.get(n, f"{self._names[n]} {no_gpu}") for n in nodes))
        repair = "free memory on a node, or add a node"
        return HarnessError(f"{waiting}: {reasons}", repair, exit_code=4)

    def _record(self, result: Result) -> None:
        result = replace(result, environment=result.environment | self._code)
        self._asks_again = True
        self._task.results.append(run_folder.append(self._task.folder, result))
        self._progress.finished(self._task.results[-1])

    def _write(self, cell: Cell, files: dict[str, str]) -> None:
        """Write a cell's samples before its record, so that a record always has its samples."""
        of_ranks = range(cell.ranks) if cell.ranks > 1 else ()
        own = {run_folder.samples_path(cell, rank) for rank in (None, *of_ranks)}
        for name, content in files.items():
            if name not in own:
                raise RecordError(
                    f"for {cell.id}, a node sent the file {name!r}, which is none of its sample files"
                )
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
            LOCK_VARIABLE: f"{os.environ.get(LOCK_VARIABLE) or 'weighin'}.{job}",
            "WEIGHIN_CACHE": str(self._caches / job),
        }
        assignment = {**assignment, "is_tested": self._is_tested}  # as it is when the cell begins
        variables = child_process.environment(inherit=False) | own
        told = node.run(assignment, variables, self._stopped.is_set)
        self._is_tested |= "record" in told
        return _HERE, told

    def answer(self, done: Future[node.Answer]) -> node.Answer:
        return done.result()

    def stop(self, _: Iterable[Future[Any]]) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def names(self) -> dict[str, str]:
        return {_HERE: _HERE}

    def node(self) -> Node:
        return Node(_HERE, _HERE, *cgroup.ram_bytes(self._isolation), {self._isolation: ""})

    def placed(self, result: Result, *_: object) -> Result:
        told = f"up to {self.slots} cells ran at once (jobs): times are not comparable"
        environment = result.environment | {CONCURRENT: self.slots}
        return replace(result, environment=environment, warnings=(*result.warnings, told))


def run_jobs(jobs: int, task: Run, progress: Progress) -> Sequence[Result]:
    with runner.discarding(task):
        check_jobs(task, jobs)
        with (
            interrupts.stoppable(),
            runner.only_run(task.patience_s, progress),
            temporary_folders.own_folder(temporary_folders.folder(), "jobs-") as caches,
        ):
            crew = Jobs(jobs, task.isolation.name, caches)
            return Driver(crew, [crew.node()], task, progress).run()


def check_jobs(task: Run, jobs: int) -> None:
    settings, cells = task.settings, [each.cell for each in task.planned if not each.skip]
    limits = [each.ram_limit_bytes or 0 for each in cells]
    needed, (_, free) = sum(sorted(limits)[-jobs:]), cgroup.ram_bytes(task.isolation.name)
    together = f"the RAM limits of {jobs} cells are {format_bytes(needed)} together"
    are_shared = settings.checkpoint or settings.checkpoints or settings.storage
    is_other = settings.steady or any(each.needs_gpu for each in cells)
    for is_refused, why, other in (
        (are_shared, "jobs with --checkpoint or storage: all cells would read the same files, whose pages the kernel charges only to the cell that reads them first", "leave --checkpoint and storage out"),
        (is_other, "with jobs, weighin measures only the memory of cells on the CPU, without steady", "measure on the CPU, without steady"),
        (not all(limits), "jobs needs --ram: cells that run at once could take each other's memory", "add --ram"),
        (needed > free, f"jobs={jobs}: {together}, but only {format_bytes(free)} of RAM are free", "give fewer jobs or a smaller --ram"),
    ):  # fmt: skip
        if is_refused:
            raise ConfigError(why, f"leave jobs out, or {other}")
