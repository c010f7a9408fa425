"""Run cells (measurements) as tasks on the nodes of a Ray cluster; Ray chooses among the able nodes."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import psutil

from weighin import install
from weighin.child_process import Child
from weighin.errors import ConfigError, HarnessError, extra
from weighin.fleet.node import Answer, by_kind, own_code
from weighin.fleet.node import run as run_here
from weighin.plan.task import Node
from weighin.result import Result
from weighin.run import interrupts
from weighin.text import one_line

with extra("ray", "--engine ray"):
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError

SLOT: Final = "weighin_slot"
START: Final = f"""RAY_memory_monitor_refresh_ms=0 ray start --resources '{{"{SLOT}": 1}}'"""
"""The command that starts a node; add --head for the first node, and --address for the others."""
_TRIES: Final = 3  # after the third lost node, the cell itself may be the reason
_NODE_ID: Final = "ray.io/node-id"
_MONITOR: Final = "RAY_memory_monitor_refresh_ms"
_WAIT_S: Final = 0.5
_CANCELLING_S: Final = 45.0
_ANSWER_S: Final = 120.0  # for what a node has

for _name in (__name__, run_here.__module__, Child.__module__):  # a node may lack weighin
    cloudpickle.register_pickle_by_value(sys.modules[_name])

Task = Callable[[Mapping[str, Any]], tuple[str, list[dict[str, Any]]]]
"""A function that Ray runs on a node, as ``run``."""


def run(assignment: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Run an assignment on the node to which Ray copied this function; return its id and the events.

    Its process gets the environment with which the node was started: Ray's own workers have variables
    such as OMP_NUM_THREADS that would change the measurement. Ray's memory monitor kills tasks when the
    node is short of memory, also a cell below its limit.
    """
    place = ray.get_runtime_context().get_node_id()
    try:
        raylet = next(p for p in psutil.Process().parents() if p.name() == "raylet").environ()
        value = raylet.get(_MONITOR) if (of := assignment["monitor"]) is None else str(of)
        if value is not None and value.strip() == "0":
            is_tested = place in assignment["is_tested"]
            return place, run_here({**assignment, "is_tested": is_tested}, raylet)
        source = f"{_MONITOR} is not set: Ray's default" if value is None else f"{_MONITOR}={value}"
        why = f"Ray's memory monitor is on ({source}), and would kill cells before their limit does"
        fix = "stop Ray on these nodes (ray stop), and start Ray there without its memory monitor"
    except Exception as error:  # raised, it would not name the node
        why = f"weighin does not start on this node: {error!r}"
        fix = "see to that node, and start Ray there again"
    told = {"message": why, "repair": f"{fix}: {START}", "exit_code": 2}
    return place, [{"event": "error", **told}]


class Cluster:
    slots = 1

    def __init__(self, labels: Mapping[str, str], task: Task) -> None:
        self._labels = dict(labels)
        self._task = ray.remote(num_cpus=0, resources={SLOT: 1})(task)
        config = ray._private.state.state.get_system_config()
        monitor = config.get(_MONITOR.removeprefix("RAY_"))
        self._about = {"weighin": own_code(), "monitor": monitor}
        self._names: dict[str, str] = {}
        self.gpus: dict[str, float] = {}  # of the living nodes
        self._silent = set[str]()  # the nodes that did not say what they have

    def names(self) -> dict[str, str]:
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

    def submit(self, assignment: Mapping[str, Any], without: set[str], gpus: float) -> Future[Any]:
        """Let Ray run an assignment, as soon as a node is free, but on no node of ``without``."""
        without = without | self._silent
        others = {_NODE_ID: f"!in({','.join(without)})"} if without else {}
        return self._future(assignment, self._labels | others, gpus, _TRIES)

    def _future(
        self, assignment: Mapping[str, Any], where: dict[str, str], gpus: float, tries: int
    ) -> Future[Any]:
        options = self._task.options(max_retries=tries - 1, num_gpus=gpus, label_selector=where)
        task = options.remote({**self._about, **assignment})
        future: Future[Any] = task.future()
        future.task = task  # type: ignore[attr-defined]
        return future

    def answer(self, done: Future[Any]) -> Answer:
        """Return the answer to a finished assignment; raise HarnessError if Ray lost all tries."""
        try:
            place, told = done.result()
        except RayError as lost:
            raise HarnessError(f"the node was lost: {one_line(str(lost), 200)}") from None
        events = by_kind(told)
        if "error" not in events and "began" not in events:
            why = f"weighin does not run on this node: {events['ended']['stderr']}"
            fix = "install weighin on that node, in Ray's environment"
            fix = f"{fix}: {install.command('ray', anywhere=True)}"
            events["error"] = {"message": why, "repair": fix, "exit_code": 2}
        return place, events

    def stop(self, assignments: Iterable[Future[Any]]) -> None:
        if tasks := [each.task for each in assignments]:  # type: ignore[attr-defined]
            for task in tasks:
                ray.cancel(task)
            ray.wait(tasks, num_returns=len(tasks), timeout=_CANCELLING_S)

    def find(self) -> list[Node]:
        """Ask all nodes at the same time what they have; return those that can measure."""
        end_s, alive = time.monotonic() + _ANSWER_S, self.names()
        tasks = {}
        for place in alive:
            about = {"kind": "describe", "is_tested": (), "gpu": self.gpus[place] > 0}
            tasks[place] = self._future(about, {_NODE_ID: place}, self.gpus[place], tries=1)
        try:
            while wait([tasks[each] for each in tasks if each in alive], _WAIT_S).not_done:
                interrupts.check()
                alive = self.names() if time.monotonic() < end_s else {}
        finally:
            lost = [task for task in tasks.values() if not task.done()]
            self.stop(lost)
        found, errors = [], []
        for place, task in tasks.items():
            try:
                events = {} if task in lost else self.answer(task)[1]
            except HarnessError:
                continue
            if has := events.get("node"):
                del has["event"]
                found.append(Node(place, self._names[place], **has))
            elif error := events.get("error"):
                errors.append({**error, "message": f"{self._names[place]}: {error['message']}"})
        self._silent = tasks.keys() - {node.id for node in found}
        if errors:
            raise ConfigError("; ".join(each["message"] for each in errors), errors[0]["repair"])
        if not found:
            raise ConfigError(
                f"no node of the cluster has the resource {SLOT} and all labels of the run",
                "start Ray with this resource on each machine on which weighin is to measure:"
                f" {START} --address HOST:6379",
            )
        return found

    def placed(self, result: Result, place: str) -> Result:
        where = {"node": {"name": self._names.get(place, place), "id": place}} if place else {}
        return replace(result, environment=result.environment | where)


@contextmanager
def connected(address: str, labels: Mapping[str, str], task: Task = run) -> Iterator[Cluster]:
    if address.startswith("ray://"):
        raise ConfigError(
            f"address={address} is the address of Ray's client server, through which weighin"
            " cannot receive the events of a measurement",
            "run weighin on a machine of the cluster, with address=auto or HOST:6379",
        )
    # Ray prints on standard output that a node was lost; the driver says so itself, on standard error.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    # Ray would end this process at SIGTERM with exit code 15, and without its clean-up.
    ray._private.utils.set_sigterm_handler = lambda _: None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"no Ray cluster answers at address={address}: {one_line(str(error), 200)}",
            f"start a Ray cluster: {START.replace('ray start', 'ray start --head')}",
        ) from None
    try:
        yield Cluster(labels, task)
    finally:
        ray.shutdown()
