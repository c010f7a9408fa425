"""Hand out a plan's cells, several at once, and write their records: only the driver's process does."""

import base64
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from weighin.cell import Cell
from weighin.errors import HarnessError, NoNodeLeft, RecordError
from weighin.fleet.node import Answer
from weighin.foreign import no_link
from weighin.plan.nodes import Demand, Node
from weighin.plan.task import Planned, Progress, Run, skipped
from weighin.probes import environment
from weighin.records import coverage, run_folder
from weighin.records.run_folder import parse
from weighin.result import SCHEMA, Outcome, Result
from weighin.run import interrupts, runner
from weighin.run.run_lock import only_writer
from weighin.suite import registry
from weighin.text import one_line

if TYPE_CHECKING:
    from weighin.fleet.cluster import Cluster
    from weighin.fleet.jobs import Jobs

_WAIT_S: Final = 0.5  # until the driver looks for signals again
_LOOK_S: Final = 3.0  # until it looks again for nodes that were lost or have joined
_MOST_LOSSES: Final = 3  # of nodes that ran a cell, which may then itself be the reason
_MOST_IN_VAIN: Final = (
    10  # looks for free RAM without a record, because a node has less at the start
)


@dataclass(frozen=True, slots=True)
class _Work:
    """A cell that was handed out, and the ids of the nodes of which one runs it."""

    planned: Planned
    demand: Demand
    nodes: Sequence[str]
    stopped: Event = field(default_factory=Event)


class Driver:
    """Runs the cells (measurements) of one plan; the ``crew`` chooses which of the able nodes runs a cell.

    No more cells are handed out than the able nodes can run at once, so that a node that joins gets
    the next cell, and each cell starts with what its node said last.
    """

    def __init__(
        self, crew: "Cluster | Jobs", nodes: Sequence[Node], task: Run, progress: Progress
    ) -> None:
        self._crew = crew
        self._task = task
        self._progress = progress
        self._nodes = {n.id: n for n in nodes if not n.isolations[task.isolation.name]}
        self._names = {n.id: n.name for n in nodes}  # also of nodes that were lost or left out
        self._lost = set[str]()
        self._ran = defaultdict[str, list[str]](list)  # the nodes that began a cell, by its id
        self._tested = set[str]()  # the nodes on which a worker was tested, with all limits
        self._trouble: HarnessError = NoNodeLeft(f"none can use {task.isolation.name}")
        self._waiting: dict[Demand, deque[Planned]] = {}
        self._running: dict[Future[Answer], _Work] = {}
        self._said: SimpleQueue[tuple[str, str, bool, str]] = SimpleQueue()
        self._steps: dict[str, str] = {}
        self._lines = set[tuple[str, str]]()
        self._in_vain = 0
        self._settings = _settings(task)
        code = environment.code()
        self._code = {name: value for name, value in code.items() if name.startswith("git_")}

    def run(self) -> Sequence[Result]:
        """Run every cell that has no record yet, and return the results of all cells.

        Raises:
            NoNodeLeft: no node can run the remaining cells.
            HarnessError: another process runs this plan.
            RecordError: the run's folder cannot be read or written, or a node sent a file that
                no record names.
        """
        with (
            runner.discarding(self._task),
            only_writer(self._task.folder),
            interrupts.stoppable(),
            interrupts.put_off(),
            ThreadPoolExecutor(self._crew.threads, "job") as self._pool,
        ):
            results = self._task.begin()
            todo = {c.id for c in coverage.pending([p.cell for p in self._task.planned], results)}
            for planned in self._task.planned:
                if planned.cell.id in todo and planned.skip:
                    self._record(skipped(planned, {}))
                elif planned.cell.id in todo:
                    self._waiting.setdefault(Demand.of(planned.cell), deque()).append(planned)
            waiting = [each.cell for cells in self._waiting.values() for each in cells]
            self._limits = list({(each.ram_limit_bytes, each.ranks) for each in waiting})
            try:
                self._run()
            finally:  # the pool then waits for the ends of the cells that still run
                for task, work in self._running.items():
                    task.cancel()
                    work.stopped.set()
        return self._task.results

    def _run(self) -> None:
        looked_s = time.monotonic()
        while self._running or any(self._waiting.values()):
            interrupts.check()
            if time.monotonic() - looked_s > _LOOK_S:
                self._look()
                looked_s = time.monotonic()
            self._hand_out()
            if not self._running and self._in_vain < _MOST_IN_VAIN:
                self._in_vain += 1  # before giving up, ask all nodes for their free RAM
                self._look(again=self._nodes)
                self._hand_out()
            if not self._running:
                raise self._stuck()
            for task in wait(self._running, _WAIT_S, FIRST_COMPLETED).done:
                self._take(task, self._running.pop(task))
            self._show()

    def _look(self, again: Iterable[str] = ()) -> None:
        """Leave out the nodes that were lost; ask those that have joined, and ``again``, what they have."""
        alive = self._crew.names()
        for lost in self._names.keys() - alive.keys() - self._lost:
            self._lost.add(lost)
            self._leave_out(lost, HarnessError("the node was lost"))
        asked = (alive.keys() - self._names.keys()) | (alive.keys() & set(again))
        self._names |= alive
        for place, found in self._crew.probe(asked).items():
            if isinstance(found, HarnessError):
                self._leave_out(place, found)
            elif not found.isolations[self._task.isolation.name]:
                self._nodes[place] = found

    def _hand_out(self) -> None:
        for demand, cells in self._waiting.items():
            able = [node.id for node in self._nodes.values() if not demand.lacks_now(node)]
            out = sum(work.demand == demand for work in self._running.values())
            for _ in range(min(len(cells), self._crew.slots * len(able) - out)):
                work = _Work(cells.popleft(), demand, able)
                self._running[self._pool.submit(self._measured, work)] = work

    def _measured(self, work: _Work) -> Answer:
        """Measure a cell, in a thread of its own."""
        cell = work.planned.cell
        assignment = {
            "kind": "measure",
            "id": cell.id,
            "cell": asdict(cell),
            "settings": self._settings,
            "patience_s": min(self._task.patience_s, 1e9),  # JSON has no infinity
            "is_tested": self._tested.copy(),
            "limits": self._limits,
        }
        say, is_stopped = self._said.put, work.stopped.is_set
        answer = self._crew.measure(assignment, work.nodes, say, is_stopped)
        if "record" in answer[1]:
            self._tested.add(answer[0])
        return answer

    def _take(self, task: Future[Answer], work: _Work) -> None:
        cell = work.planned.cell
        why, place, events = "", "", dict[str, Any]()
        try:
            place, events = task.result()
        except HarnessError as lost:
            place, why = next(reversed(self._ran[cell.id]), ""), lost.message
        record, short, error = (events.get(kind) for kind in ("record", "short", "error"))
        if place in self._nodes and (told := record or short):
            free = told["free_ram_bytes"]
            self._nodes[place] = replace(self._nodes[place], free_ram_bytes=free)
        if record:
            self._write(cell, record["files"])
            where = f"a record from the node {self._names[place]}"
            result = replace(parse(Result, record["record"].encode(), where), cell=cell)
            self._record(self._crew.placed(result, place))
        elif short or error:
            self._waiting[work.demand].appendleft(work.planned)
        else:
            if ended := events.get("ended"):
                words = (f"exit code {ended['code']}", one_line(ended["stderr"]))
                why = ", ".join(filter(None, words))
            self._fail(cell, place, why)
        if error and place in self._nodes:
            told = {name: error[name] for name in ("message", "repair", "exit_code")}
            self._leave_out(place, HarnessError(**told))

    def _leave_out(self, place: str, error: HarnessError) -> None:
        """Give a node no further cell; hand out anew the cells for which no other node was able."""
        message = f"{self._names[place]}: {error.message}"
        self._progress.preparing(f"no further cell for {message}", None)
        self._trouble = HarnessError(message, error.repair, exit_code=error.exit_code)
        self._nodes.pop(place, None)
        self._show()
        for task, work in list(self._running.items()):
            if task.done() or self._nodes.keys() & set(work.nodes):
                continue
            if not task.cancel() and self._crew.slots > 1:  # the other jobs end their cells
                continue
            cell = work.planned.cell
            lost = [each for each in self._ran[cell.id] if each in self._lost]
            work.stopped.set()
            del self._running[task]
            if len(lost) < _MOST_LOSSES:
                self._waiting[work.demand].appendleft(work.planned)
            else:
                why = f"{len(lost)} nodes were lost while they ran this cell, the last of them"
                self._fail(cell, lost[-1], why)

    def _stuck(self) -> HarnessError:
        left = sum(map(len, self._waiting.values()))
        waiting = f"{left} cell{'s' * (left > 1)} cannot run"
        if not self._nodes:
            message, last = f"{waiting}, no node is left: {self._trouble.message}", self._trouble
            return NoNodeLeft(message, last.repair, exit_code=last.exit_code)
        demand = next(demand for demand, cells in self._waiting.items() if cells)
        reasons = "; ".join(map(demand.lacks_now, self._nodes.values()))
        return NoNodeLeft(f"{waiting}: {reasons}", "free memory on a node, or add a node")

    def _fail(self, cell: Cell, place: str, why: str) -> None:
        message = f"on {self._names.get(place, place)}: {why}" if place else why
        now = datetime.now(UTC).isoformat("T", "milliseconds")
        failed = Result(SCHEMA, cell, Outcome.MEASUREMENT_FAILED, message=message, started_at=now)
        self._record(self._crew.placed(failed, place))

    def _record(self, result: Result) -> None:
        result = replace(result, environment=result.environment | self._code)
        self._in_vain = 0
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
                path.write_bytes(zlib.decompress(base64.b64decode(content)))

    def _show(self) -> None:
        while not self._said.empty():
            who, text, is_line, cell_id = self._said.get()
            if text and who not in self._ran[cell_id]:
                self._ran[cell_id].append(who)
            name = self._names.get(who, who)
            self._steps[name] = text
            if is_line and (who, text) not in self._lines:  # a node prepares itself for each cell
                self._lines.add((who, text))
                self._progress.preparing(f"{name}: {text}", None)
        self._progress.nodes({name: step for name, step in self._steps.items() if step})


def _settings(task: Run) -> dict[str, Any]:
    """Return the plan's settings to send to the nodes, without shard and engine.

    A strategy that is part of weighin gets an empty path: a node finds it in its own installation.
    """
    paths = task.settings.strategy_paths
    if paths:  # a command has no strategies
        operation = task.planned[0].cell.operation if task.planned else "load"
        own = {str(info.path) for info in registry.strategies(operation).values()}
        paths = {name: "" if path in own else path for name, path in paths.items()}
    ours = {"strategy_paths": paths, "shard": None, "engine": {}}
    return task.settings.model_copy(update=ours).as_json()
