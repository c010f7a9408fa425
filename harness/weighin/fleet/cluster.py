"""Run cells (measurements) as tasks on the nodes of a Ray cluster; Ray chooses among the able nodes."""

import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from threading import Event
from typing import Any, Final

import psutil

from weighin import __version__, install
from weighin.child_process import Child
from weighin.errors import ConfigError, HarnessError, extra
from weighin.fleet.node import Answer, Say, answer
from weighin.fleet.node import run as run_here
from weighin.plan.nodes import Node
from weighin.probes import environment
from weighin.result import Result
from weighin.run import interrupts
from weighin.text import one_line

with extra("ray", "--engine ray"):
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError
    from ray.util.queue import Empty, Queue

SLOT: Final = "weighin_slot"
START: Final = f"""RAY_memory_monitor_refresh_ms=0 ray start --resources '{{"{SLOT}": 1}}'"""
"""The command that starts a node; add --head for the first node, and --address for the others."""
_TRIES: Final = 3  # after the third lost node, the cell itself may be the reason
_NODE_ID: Final = "ray.io/node-id"
_WAIT_S: Final = 0.5
_CANCELLING_S: Final = 45.0
_ANSWER_S: Final = 120.0  # for what a node has; its examination may take longer

for _name in (__name__, run_here.__module__, Child.__module__):  # a node may lack weighin
    cloudpickle.register_pickle_by_value(sys.modules[_name])

Task = Callable[[Mapping[str, Any], Any], tuple[str, list[bytes]]]
"""A function that Ray runs on a node: it takes an assignment and the queue of what nodes say, and returns
the node's id and the events of the assignment."""


def run(assignment: Mapping[str, Any], said: Queue) -> tuple[str, list[bytes]]:
    """Run an assignment on the node to which Ray copied this function; without a kind, only look.

    The process of the assignment gets the environment with which the node was started. Ray's own
    workers have further variables, such as OMP_NUM_THREADS, that would change the measurement.
    """
    t_ns, place = time.time_ns(), ray.get_runtime_context().get_node_id()
    raylet = next(each for each in psutil.Process().parents() if each.name() == "raylet").environ()
    monitor = raylet.get("RAY_memory_monitor_refresh_ms")
    events = [json.dumps({"event": "raylet", "t_ns": t_ns, "refresh_ms": monitor}).encode()]
    if assignment["kind"]:
        asked = {**assignment, "is_tested": place in assignment["is_tested"]}
        # called without waiting, so that a cell does not end with the queue
        put: Any = said.actor.put_nowait.remote  # type: ignore[attr-defined]
        events += run_here(asked, raylet, lambda *step: put((place, *step, asked["id"])))
    return place, events


class Cluster:
    """A connection to a Ray cluster. Because of ``SLOT``, a node runs one assignment at a time."""

    slots = 1
    threads = 1024  # which mostly wait

    def __init__(self, labels: Mapping[str, str], task: Task) -> None:
        self._labels = dict(labels)
        self._task = ray.remote(num_cpus=0, resources={SLOT: 1})(task)
        beside = {_NODE_ID: ray.get_runtime_context().get_node_id()}
        self._said = Queue(actor_options={"num_cpus": 0, "label_selector": beside})
        self._taken_s = time.monotonic()
        self._names: dict[str, str] = {}
        self._gpus: dict[str, float] = {}

    def names(self) -> dict[str, str]:
        """Return, by id, the names of the living nodes that have ``SLOT`` and the labels of --label."""
        found = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get(SLOT)]
        found = [each for each in found if _has_raylet(each)]
        hosts = [each["NodeManagerHostname"] for each in found]
        names = {}
        for each, host in zip(found, hosts, strict=True):
            if self._labels.items() <= each.get("Labels", {}).items():
                place = each["NodeID"]
                names[place] = f"{host}/{place[:8]}" if hosts.count(host) > 1 else host
                self._gpus[place] = each["Resources"].get("GPU", 0)
        self._names |= names
        return names

    def measure(
        self,
        assignment: Mapping[str, Any],
        nodes: Sequence[str],
        say: Say | None,
        is_stopped: Callable[[], bool],
        tries: int = _TRIES,
    ) -> Answer:
        """Let Ray run an assignment on one of ``nodes``, as soon as one is free; wait for its answer.

        Raises:
            HarnessError: the node was lost, and so were those on which Ray ran the assignment again.
        """
        task = self._task.options(
            max_retries=tries - 1,
            num_gpus=min(self._gpus[place] for place in nodes),
            label_selector={_NODE_ID: f"in({','.join(nodes)})"},
        ).remote(assignment, self._said)
        try:
            while not ray.wait([task], timeout=_WAIT_S)[0]:
                if is_stopped():
                    ray.cancel(task)
                    ray.wait([task], timeout=_CANCELLING_S)
                    break
                if say and time.monotonic() - self._taken_s > _WAIT_S:
                    self._taken_s = time.monotonic()
                    with suppress(RayError, Empty):  # without what nodes say, the cells go on
                        while True:
                            say(self._said.get_nowait())
            return answer(*ray.get(task, timeout=0))
        except RayError as lost:
            raise HarnessError(f"the node was lost: {one_line(str(lost), 200)}") from None

    def ask(
        self, nodes: Iterable[str], kind: str, say: Say | None = None
    ) -> dict[str, dict[str, Any] | HarnessError]:
        """Ask nodes at the same time; return the events of each, or why there are none."""
        stopped = {place: Event() for place in nodes}
        end_s = time.monotonic() + (inf if kind == "examine" else _ANSWER_S)

        def asked(place: str) -> dict[str, Any] | HarnessError:
            about = {"kind": kind, "id": "", "is_tested": (), "gpu": self._gpus[place] > 0}
            try:
                events = self.measure(about, [place], say, stopped[place].is_set, tries=1)[1]
            except HarnessError as lost:
                is_silent = stopped[place].is_set()
                return HarnessError("the node did not answer") if is_silent else lost
            if not kind or "node" in events:
                return events
            problem = events["error"]["message"] if "error" in events else events["ended"]["stderr"]
            return ConfigError(
                f"weighin does not run on the node {self._names[place]}: {problem}",
                "install weighin on that node, in Ray's environment:"
                f" {install.command('ray', anywhere=True)}",
            )

        with ThreadPoolExecutor(self.threads) as pool:
            tasks = {pool.submit(asked, place): place for place in stopped}
            try:
                while left := wait(tasks, _WAIT_S).not_done:
                    interrupts.check()
                    awaited = self.names() if time.monotonic() < end_s else {}
                    for place in {tasks[each] for each in left} - awaited.keys():
                        stopped[place].set()
            finally:
                for each in stopped.values():
                    each.set()
        return {place: task.result() for task, place in tasks.items()}

    def probe(self, nodes: Iterable[str]) -> dict[str, Node | HarnessError]:
        """Ask nodes what they have; return each node, or why it cannot measure."""
        return {
            place: found if isinstance(found, HarnessError) else self._described(place, found)
            for place, found in self.ask(nodes, "describe").items()
        }

    def find(self) -> list[Node]:
        """Return the cluster's nodes that can measure; a node that was lost is left out.

        Raises:
            ConfigError: no node with the resource SLOT answers, Ray's memory monitor is on at a node,
                or a node has no weighin or other code of it.
        """
        found = self.probe(self.names()).values()
        if refused := [each for each in found if isinstance(each, ConfigError)]:
            raise ConfigError("; ".join(each.message for each in refused), refused[0].repair)
        if not (nodes := [each for each in found if isinstance(each, Node)]):
            raise no_slot()
        return nodes

    def _described(self, place: str, events: Mapping[str, Any]) -> Node | ConfigError:
        name, facts, (is_on, source) = self._names[place], events["node"], monitor(events)
        if (
            is_on
        ):  # it kills tasks when the node is short of memory, also a cell below its own limit
            return ConfigError(
                "Ray's memory monitor is on, and would kill cells before their limit does:"
                f" {name}: on ({source})",
                "stop Ray on these nodes (ray stop), and start Ray there without its memory monitor:"
                f" {START}",
            )
        if facts["weighin"] != (here := own_code()):
            return ConfigError(
                f"the node {name} has {facts['weighin']}, and this machine {here}",
                "install the same files of weighin on all nodes, because a table must not mix the"
                f" figures of different code: {install.command('ray', anywhere=True)}",
            )
        names = ("ram_bytes", "free_ram_bytes", "isolations", "gpu_bytes", "no_soft_limit")
        return Node(place, name, **{each: facts[each] for each in names})

    def placed(self, result: Result, place: str) -> Result:
        """Add to a result the node that measured it; no node, if the node was lost."""
        where = {"node": {"name": self._names[place], "id": place}} if place else {}
        return replace(result, environment=result.environment | where)


def _has_raylet(described: Mapping[str, Any]) -> bool:
    """Tell whether a node's raylet listens; that it is gone, Ray itself notices up to 20 s later."""
    address = described["NodeManagerAddress"], described["NodeManagerPort"]
    try:
        socket.create_connection(address, timeout=1.0).close()
    except OSError as error:  # if the node is slow or unreachable, Ray decides
        return not isinstance(error, ConnectionRefusedError)
    return True


def monitor(events: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether Ray's memory monitor is on at the node with these events, and how it was set."""
    configured = ray._private.state.state.get_system_config().get("memory_monitor_refresh_ms")
    if configured is not None:
        return int(configured) > 0, f"the cluster's system config: {configured}"
    value = events["raylet"]["refresh_ms"]
    if value is None:
        return True, "RAY_memory_monitor_refresh_ms is not set: Ray's default"
    return value.strip() != "0", f"RAY_memory_monitor_refresh_ms={value}"


def own_code() -> str:
    """Return the version and digest of this weighin, as a node tells its own."""
    return f"weighin {__version__}, files with the digest {environment.code_digest()}"


def no_slot() -> ConfigError:
    return ConfigError(
        f"no node of the cluster has the resource {SLOT} and all labels of --label",
        f"start Ray with this resource on each machine on which weighin is to measure: {START}"
        " --address HOST:6379",
    )


@contextmanager
def connected(address: str, labels: Mapping[str, str], task: Task = run) -> Iterator[Cluster]:
    """Connect this process to the cluster, and disconnect it at the end.

    Raises:
        ConfigError: no cluster answers at the address, or it is a ``ray://`` address.
    """
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
        yield Cluster(labels, task)
    finally:
        ray.shutdown()
