"""Run cells (measurements) as tasks on the nodes of a Ray cluster; Ray chooses among the able nodes."""

import logging
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import psutil

from weighin import install
from weighin.child_process import Child
from weighin.errors import ConfigError, extra
from weighin.fleet.node import Answer, own_code
from weighin.fleet.node import run as run_here
from weighin.plan.task import Node
from weighin.result import Result
from weighin.run import interrupts
from weighin.text import few, one_line

with extra("ray", "--engine ray"):
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError

SLOT: Final = "weighin_slot"
START: Final = f"""RAY_memory_monitor_refresh_ms=0 ray start --resources '{{"{SLOT}": 1}}'"""
"""The command that starts a node; add --head for the first node, and --address for the others."""
_WAIT_S: Final = 0.5
_ANSWER_S: Final = 120.0  # for what a node has

for _name in (__name__, run_here.__module__, Child.__module__):  # a node may lack weighin
    cloudpickle.register_pickle_by_value(sys.modules[_name])


def run(assignment: Mapping[str, Any]) -> Answer:
    """Run an assignment on the node to which Ray copied this function; return the node's id and its answer.

    Its process gets the environment with which the node was started: Ray's own workers have variables
    such as OMP_NUM_THREADS that would change the measurement.
    """
    place = ray.get_runtime_context().get_node_id()
    try:
        raylet = next(p for p in psutil.Process().parents() if p.name() == "raylet").environ()
        if raylet.get("RAY_memory_monitor_refresh_ms", "").strip() == "0":
            is_tested = place in assignment["is_tested"]
            return place, run_here({**assignment, "is_tested": is_tested}, raylet)
        why = "Ray's memory monitor is on, and would kill cells before their limit does"
        fix = "stop Ray on these nodes (ray stop), and start Ray there without its memory monitor"
    except Exception as error:  # raised, it would not name the node
        why = f"weighin does not start on this node: {error!r}"
        fix = "see to that node, and start Ray there again"
    return place, {"error": {"message": why, "repair": f"{fix}: {START}", "exit_code": 2}}


class Cluster:
    slots = 1

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        # After the third lost node, the cell itself may be the reason.
        self._task = ray.remote(num_cpus=0, resources={SLOT: 1}, max_retries=2)(run)
        self._code = own_code()
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
        return names

    def submit(
        self, assignment: Mapping[str, Any], without: Collection[str], gpus: float, only: str = ""
    ) -> Future[Any]:
        """Let Ray run an assignment as soon as a node is free: on no node of ``without``, or on the node ``only``."""
        nodes = only or f"!in({','.join({*without, *self._silent})})"
        where = self._labels if nodes == "!in()" else self._labels | {"ray.io/node-id": nodes}
        task = self._task.options(num_gpus=gpus, label_selector=where)
        reference = task.remote({"weighin": self._code, **assignment})
        future: Future[Any] = reference.future()
        future.task = reference  # type: ignore[attr-defined]
        return future

    def answer(self, done: Future[Any]) -> Answer:
        """Return the node's id and its answer; if Ray lost the node at every try, "" and the reason."""
        try:
            place, told = done.result()
        except RayError as lost:
            return "", {"ended": {"why": f"the node was lost: {one_line(str(lost), 200)}"}}
        if not told.keys() & {"error", "began"}:
            why = f"weighin does not run on this node: {told['ended']['why']}"
            fix = f"install weighin there, in Ray's environment: {install.command('ray', anywhere=True)}"
            told["error"] = {"message": why, "repair": fix, "exit_code": 2}
        return place, told

    def stop(self, assignments: Iterable[Future[Any]]) -> None:
        if tasks := [each.task for each in assignments]:  # type: ignore[attr-defined]
            for task in tasks:
                ray.cancel(task)
            ray.wait(tasks, num_returns=len(tasks), timeout=45.0)  # longer than node._PATIENCE_S

    def find(self) -> list[Node]:
        """Ask all nodes at the same time what they have; return those that can measure."""
        end_s, names, asked = time.monotonic() + _ANSWER_S, self.names(), {}
        for place, gpus in self.gpus.items():
            about = {"kind": "describe", "is_tested": (), "gpu": gpus > 0}
            asked[place] = self.submit(about, (), 0, only=place)
        try:
            alive: Collection[str] = names
            while wait([asked[n] for n in asked if n in alive], _WAIT_S).not_done:
                interrupts.check()
                alive = self.names() if time.monotonic() < end_s else ()
        finally:
            lost = [task for task in asked.values() if not task.done()]
            self.stop(lost)
        told = {n: self.answer(task)[1] for n, task in asked.items() if task not in lost}
        if errors := {n: has["error"] for n, has in told.items() if "error" in has}:
            message = "; ".join(f"{names[n]}: {error['message']}" for n, error in errors.items())
            raise ConfigError(message, next(iter(errors.values()))["repair"])
        found = [Node(n, names[n], **has["node"]) for n, has in told.items() if "node" in has]
        self._silent = asked.keys() - {node.id for node in found}
        if self._silent and not found:
            silent = few(sorted(names[node] for node in self._silent))
            why = f"no node has answered what it can measure: {silent}"
            raise ConfigError(why, "check whether other tasks of Ray hold these nodes: ray status")
        if not found:
            raise ConfigError(
                f"no node of the cluster has the resource {SLOT} and all labels of the run",
                "start Ray with this resource on each machine on which weighin is to measure:"
                f" {START} --address HOST:6379",
            )
        return found

    def placed(self, result: Result, place: str, name: str) -> Result:
        where = {"node": {"name": name, "id": place}} if place else {}
        return replace(result, environment=result.environment | where)


@contextmanager
def connected(address: str, labels: Mapping[str, str]) -> Iterator[Cluster]:
    if address.startswith("ray://"):
        why = f"address={address} is Ray's client server, through which weighin cannot measure"
        raise ConfigError(why, "run weighin on a machine of the cluster, with address=auto")
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
        yield Cluster(labels)
    finally:
        ray.shutdown()
