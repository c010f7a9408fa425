"""Run cells (measurements) as tasks on the nodes of a Ray cluster; Ray chooses among the able nodes."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import psutil

from weighin import install
from weighin.child_process import Child
from weighin.errors import ConfigError, extra
from weighin.fleet.node import SLOT, START, Answer, Step, own_code
from weighin.fleet.node import run as run_here
from weighin.plan.task import Node
from weighin.result import Result
from weighin.run import interrupts
from weighin.text import one_line

with extra("ray", "--engine ray"):
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError
    from ray.util.queue import Empty, Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from weighin.doctor.doctor import Examination

_LOSSES: Final = (
    2  # of nodes, after which Ray tries a cell again; the cell itself may be the reason
)
_INSTALL: Final = (
    f"install weighin on that node, in Ray's environment: {install.command('ray', anywhere=True)};"
    f" then start Ray there again: {START}"
)
_NODE_ID: Final = "ray.io/node-id"
_WAIT_S: Final = 0.5
_CANCELLING_S: Final = 45.0
_ANSWER_S: Final = 120.0  # for what a node has
_EXAMINATION_S: Final = 1800.0

for _name in (__name__, run_here.__module__, Child.__module__):  # a node may lack weighin
    cloudpickle.register_pickle_by_value(sys.modules[_name])


def run(assignment: Mapping[str, Any], said: Queue) -> Answer:
    """Run an assignment on the node to which Ray copied this function; ``said`` gets its steps.

    The process of the assignment gets the environment with which the node was started. Ray's own
    workers have further variables, such as OMP_NUM_THREADS, that would change the measurement.
    """
    place = ray.get_runtime_context().get_node_id()
    # called without waiting, so that a cell does not end with the queue
    put: Any = said.actor.put_nowait.remote  # type: ignore[attr-defined]
    try:
        raylet = next(each for each in psutil.Process().parents() if each.name() == "raylet")
        asked = {**assignment, "is_tested": place in assignment["is_tested"]}
        events = run_here(asked, raylet.environ(), lambda *step: put((place, *step)))
        if "began" in events:
            return place, events
        why = events["ended"]["why"]
    except Exception as error:  # raised, it would not name the node
        why = repr(error)
    message = f"weighin does not start on this node: {why}"
    return place, {"error": {"message": message, "repair": _INSTALL, "exit_code": 2}}


class Cluster:
    """A connection to a Ray cluster. Because of ``SLOT``, a node runs one assignment at a time."""

    slots = 1

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        beside = {_NODE_ID: ray.get_runtime_context().get_node_id()}
        self._said = Queue(actor_options={"num_cpus": 0, "label_selector": beside})
        self._names: dict[str, str] = {}
        self.gpus: dict[str, float] = {}  # of the living nodes
        self._silent = set[str]()  # the nodes that did not say what they have

    def names(self) -> dict[str, str]:
        """Return, by id, the names of the living nodes that can have cells."""
        found = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get(SLOT)]
        hosts = [each["NodeManagerHostname"] for each in found]
        names, self.gpus = {}, {}
        for each, host in zip(found, hosts, strict=True):
            place, labels = each["NodeID"], each.get("Labels", {})
            if self._labels.items() <= labels.items() and place not in self._silent:
                names[place] = f"{host}/{place[:8]}" if hosts.count(host) > 1 else host
                self.gpus[place] = each["Resources"].get("GPU", 0)
        self._names |= names
        return names

    def submit(
        self, assignment: Mapping[str, Any], without: Iterable[str], gpus: float
    ) -> Future[Any]:
        """Let Ray run an assignment, as soon as a node is free, but on no node of ``without``."""
        unable = self._silent.union(without)
        others = {_NODE_ID: f"!in({','.join(unable)})"} if unable else {}
        where = {"max_retries": _LOSSES, "label_selector": self._labels | others}
        return self._future(assignment, num_gpus=gpus, **where)

    def _future(self, assignment: Mapping[str, Any], **options: Any) -> Future[Answer]:
        function = ray.remote(num_cpus=0, resources={SLOT: 1}, **options)(run)
        task = function.remote({"weighin": own_code(), **assignment}, self._said)
        future: Future[Answer] = task.future()
        future.task = task  # type: ignore[attr-defined]
        return future

    def stop(self, assignments: Iterable[Future[Any]]) -> None:
        """Cancel assignments, and wait until what they ran has ended."""
        if tasks := [each.task for each in assignments]:  # type: ignore[attr-defined]
            for task in tasks:
                ray.cancel(task)
            ray.wait(tasks, num_returns=len(tasks), timeout=_CANCELLING_S)

    def said(self) -> Iterator[Step]:
        with suppress(RayError, Empty):  # without what nodes say, the cells go on
            while True:
                yield self._said.get_nowait()

    def _ask(
        self, kind: str, within_s: float, say: Callable[[str], object] = lambda _: None
    ) -> dict[str, dict[str, Any]]:
        """Ask all nodes at the same time; return, by id, their events, empty if one did not answer."""
        end_s = time.monotonic() + within_s
        tasks = {
            place: self._future(
                {"kind": kind, "is_tested": (), "has_gpu": self.gpus[place] > 0},
                num_gpus=self.gpus[place],
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=False),
            )
            for place in self.names()
        }
        try:
            while wait(tasks.values(), _WAIT_S).not_done and time.monotonic() < end_s:
                interrupts.check()
                for who, text, _ in self.said():
                    if text:
                        say(f"{self._names.get(who, who)}: {text}")
        finally:
            late = [task for task in tasks.values() if not task.done()]
            self.stop(late)
        answered = {p: task for p, task in tasks.items() if task not in late}
        lost = {place for place, task in answered.items() if task.exception()}
        return {p: answered[p].result()[1] if p in answered.keys() - lost else {} for p in tasks}

    def find(self) -> list[Node]:
        """Return the nodes that can measure; raise ConfigError if there is none, or a node refuses."""
        answers = self._ask("describe", _ANSWER_S)
        if refused := {p: events["error"] for p, events in answers.items() if "error" in events}:
            whys = (f"{self._names[place]}: {error['message']}" for place, error in refused.items())
            raise ConfigError("; ".join(whys), next(iter(refused.values()))["repair"])
        found = {place: events["node"] for place, events in answers.items() if "node" in events}
        self._silent = answers.keys() - found.keys()
        if not found:
            raise ConfigError(
                f"no node of the cluster has the resource {SLOT} and all labels of --label",
                "start Ray with this resource on each machine on which weighin is to measure:"
                f" {START} --address HOST:6379",
            )
        return [Node(place, self._names[place], **about) for place, about in found.items()]

    def examine(self, say: Callable[[str], object]) -> "list[Examination]":
        """Test what each node can limit and measure."""
        from weighin.doctor.doctor import Capability, Examination  # runs need none of it

        examinations = []
        for place, events in self._ask("examine", _EXAMINATION_S, say).items():
            if "examined" not in events:
                error = events.get("error", {"message": "the node was lost", "repair": "see to it"})
                detail = f"{error['message']}. {error['repair']}"
                failed = {"subject": "examination", "verdict": "bad", "detail": detail}
                events["examined"] = {"can_measure": False, "capabilities": [failed]}
            rows = tuple(Capability(**row) for row in events["examined"]["capabilities"])
            can_measure = events["examined"]["can_measure"]
            about = {"name": self._names[place], "id": place, "can_measure": can_measure}
            examinations.append(Examination(rows, about))
        return examinations

    def placed(self, result: Result, place: str) -> Result:
        """Add to a result the node that measured it; no node, if the node was lost."""
        where = {"node": {"name": self._names.get(place, place), "id": place}} if place else {}
        return replace(result, environment=result.environment | where)


@contextmanager
def connected(address: str, labels: Mapping[str, str]) -> Iterator[Cluster]:
    """Connect this process to the cluster, and disconnect it at the end."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"--address {address} is the address of Ray's client server, through which weighin"
            " cannot receive the events of a measurement",
            "run weighin on a machine of the cluster, with --address auto or HOST:6379",
        )
    # Ray prints on standard output that a node was lost; the driver says so itself, on standard error.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    # Ray would end this process at SIGTERM with exit code 15, and without its clean-up.
    ray._private.utils.set_sigterm_handler = lambda _: None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"no Ray cluster answers at --address {address}: {one_line(str(error), 200)}",
            f"start a Ray cluster: {START.replace('ray start', 'ray start --head')}",
        ) from None
    try:
        yield Cluster(labels)
    finally:
        ray.shutdown()
