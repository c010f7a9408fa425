"""Run cells (measurements) as tasks on the nodes of a Ray cluster; Ray chooses among the able nodes."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, Final

from weighin import __version__, child_process, install
from weighin.errors import ConfigError, HarnessError, extra
from weighin.fleet import node
from weighin.fleet.node import Answer, Say
from weighin.plan.nodes import Node
from weighin.probes import environment
from weighin.result import Result
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
_WAIT_S: Final = 0.5
_CANCELLING_S: Final = 45.0

Task = Callable[[Mapping[str, Any], Any], tuple[str, list[bytes], str | None]]
"""A function that Ray runs on a node. It takes an assignment and ``Steps``, and returns the node's id, the
events of the assignment, and the setting of Ray's memory monitor on the node."""


def run(assignment: Mapping[str, Any], steps: Any) -> tuple[str, list[bytes], str | None]:
    """Run an assignment on the node to which Ray copied this function; see ``Task``.

    The process of the assignment gets the environment with which the node was started. Ray's own
    workers have further variables, such as OMP_NUM_THREADS, that would change the measurement.
    """
    place, variables = ray.get_runtime_context().get_node_id(), _raylet_environment()
    asked = {**assignment, "is_tested": place in assignment["is_tested"]}
    events = node.run(asked, variables, lambda *step: steps.say.remote(place, *step))
    return place, events, variables.get("RAY_memory_monitor_refresh_ms")


def _raylet_environment() -> dict[str, str]:
    """Return the environment of the raylet, the daemon of Ray on this node that started this process."""
    pid = os.getppid()
    while pid > 1:
        folder = Path(f"/proc/{pid}")
        name = os.fsdecode((folder / "cmdline").read_bytes().split(b"\0")[0])
        if Path(name).name == "raylet":
            entries = (folder / "environ").read_bytes().split(b"\0")
            pairs = [os.fsdecode(entry).partition("=") for entry in entries if entry]
            return {key: value for key, _, value in pairs}
        status = (folder / "stat").read_bytes()
        pid = int(status.rpartition(b")")[2].split()[1])
    raise RuntimeError("no raylet is among the parents of this process, so Ray did not start it")


def _time_ns() -> int:
    return time.time_ns()  # Ray takes no built-in function


class Steps:
    """An actor beside the driver, which keeps what the nodes say until the driver takes it."""

    def __init__(self) -> None:
        self._said: list[Any] = []

    def say(self, *step: Any) -> None:
        self._said.append(step)

    def take(self) -> list[Any]:
        said, self._said = self._said, []
        return said


class Cluster:
    """A connection to a Ray cluster, made by ``connected``.

    Because of ``SLOT``, Ray runs one assignment at a time on a node.
    """

    slots = 1
    threads = 1024  # which mostly wait

    def __init__(self, labels: Mapping[str, str], task: Task = run) -> None:
        self._labels = dict(labels)
        for module in (sys.modules[__name__], node, child_process):
            cloudpickle.register_pickle_by_value(module)
        self._task = ray.remote(num_cpus=0, resources={SLOT: 1})(task)
        self._clock = ray.remote(num_cpus=0, max_retries=0)(_time_ns)
        beside = {_NODE_ID: ray.get_runtime_context().get_node_id()}
        self._steps: Any = ray.remote(Steps).options(num_cpus=0, label_selector=beside).remote()
        self._taken_s = time.monotonic()
        self._names: dict[str, str] = {}
        self._gpus: dict[str, float] = {}

    def names(self) -> dict[str, str]:
        """Return, by id, the names of the living nodes that have ``SLOT`` and the labels of --label."""
        found = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get(SLOT)]
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
        say: Say,
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
        ).remote(assignment, self._steps)
        try:
            while not ray.wait([task], timeout=_WAIT_S)[0]:
                if is_stopped():
                    ray.cancel(task)
                    ray.wait([task], timeout=_CANCELLING_S)
                    break
                if time.monotonic() - self._taken_s > _WAIT_S:
                    self._taken_s = time.monotonic()
                    with suppress(RayError):  # without what nodes say, the cells go on
                        for step in ray.get(self._steps.take.remote(), timeout=_WAIT_S):
                            say(step)
            place, events, refresh_ms = ray.get(task, timeout=0)
        except RayError as lost:
            raise HarnessError(f"the node was lost: {one_line(str(lost), 200)}") from None
        found = node.answer(place, events)
        found[1]["monitor"] = {"refresh_ms": refresh_ms}
        return found

    def ask(
        self, nodes: Iterable[str], say: Say = lambda _: None, *, examine: bool = False
    ) -> dict[str, dict[str, Any] | HarnessError]:
        """Ask nodes at the same time what they have; return each one's events, or why there are none."""
        stopped = Event()

        def asked(place: str) -> dict[str, Any] | HarnessError:
            about = {"is_tested": (), "examine": examine, "gpu": self._gpus[place] > 0}
            try:
                return self.measure(about, [place], say, stopped.is_set, tries=1)[1]
            except HarnessError as lost:
                return lost

        places = list(nodes)
        with ThreadPoolExecutor(self.threads) as pool:
            try:
                return dict(zip(places, pool.map(asked, places), strict=True))
            finally:
                stopped.set()

    def probe(self, nodes: Iterable[str]) -> dict[str, Node | HarnessError]:
        """Ask nodes what they have; return each node, or why it cannot measure."""
        return {
            place: events if isinstance(events, HarnessError) else self._described(place, events)
            for place, events in self.ask(nodes).items()
        }

    def find(self) -> list[Node]:
        """Return the cluster's nodes that can measure; a node that was lost is left out.

        Raises:
            ConfigError: no node with the resource SLOT answers, Ray's memory monitor is on at a node,
                or a node has no weighin or other code of it.
        """
        found = self.probe(self.names()).values()
        refused = [each for each in found if isinstance(each, ConfigError)]
        if refused:
            raise ConfigError("; ".join(each.message for each in refused), refused[0].repair)
        if not (nodes := [each for each in found if isinstance(each, Node)]):
            raise no_slot()
        return nodes

    def _described(self, place: str, events: Mapping[str, Any]) -> Node | ConfigError:
        name, (is_on, source) = self._names[place], monitor(events)
        if (
            is_on
        ):  # it kills tasks when the node is short of memory, also a cell below its own limit
            return ConfigError(
                "Ray's memory monitor is on, and would kill cells before their limit does:"
                f" {name}: on ({source})",
                "stop Ray on these nodes (ray stop), and start Ray there without its memory monitor:"
                f" {START}",
            )
        if "node" not in events:
            return no_weighin(name, events)
        facts = events["node"]
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

    def time_ns(self, place: str) -> int:
        """Return the time of a node's clock, in ns since 1970."""
        return ray.get(self._clock.options(label_selector={_NODE_ID: place}).remote())


def monitor(events: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether Ray's memory monitor is on at the node with these events, and how it was set."""
    configured = ray._private.state.state.get_system_config().get("memory_monitor_refresh_ms")
    if configured is not None:
        return int(configured) > 0, f"the cluster's system config: {configured}"
    value = events["monitor"]["refresh_ms"]
    if value is None:
        return True, "RAY_memory_monitor_refresh_ms is not set: Ray's default"
    return value.strip() != "0", f"RAY_memory_monitor_refresh_ms={value}"


def own_code() -> str:
    """Return the version and digest of this weighin, as a node tells its own."""
    return f"weighin {__version__}, files with the digest {environment.code_digest()}"


def no_weighin(name: str, events: Mapping[str, Any]) -> ConfigError:
    problem = events["error"]["message"] if "error" in events else events["ended"]["stderr"]
    return ConfigError(
        f"weighin does not run on the node {name}: {problem}",
        f"install weighin on that node, in Ray's environment: {install.command('ray', anywhere=True)}",
    )


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
