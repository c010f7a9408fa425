"""Define the engine for a Ray cluster: it gives cells to the nodes that can measure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from weighin import __version__, install
from weighin.engines.driver import Driver
from weighin.engines.ray.cluster import START, Cluster, RayNode, RayTask, answer, connected, no_slot
from weighin.engines.transport import LostTask
from weighin.errors import ConfigError
from weighin.plan.nodes import Node
from weighin.plan.task import Progress, Run
from weighin.probes import environment
from weighin.result import Result
from weighin.run import runner


@dataclass(frozen=True, slots=True)
class RayEngine:
    """Runs cells (measurements) as Ray tasks on the nodes of a cluster, one cell per node at a time."""

    cluster: Cluster
    nodes: Sequence[Node]

    def run(self, task: Run, progress: Progress) -> Sequence[Result]:
        with runner.discarding(task):
            Driver(RayTransport(self.cluster), self.nodes, task, progress, placed).run()
        return task.results


def placed(result: Result, node: Node) -> Result:
    where = {"node": {"name": node.name, "id": node.id}}
    return replace(result, environment=result.environment | where)


@contextmanager
def opened(address: str, labels: Mapping[str, str]) -> Iterator[RayEngine]:
    """Connect to a Ray cluster; yield the engine for nodes with the resource SLOT and all ``labels``.

    Raises:
        ConfigError: no cluster answers, or its nodes cannot measure.
    """
    with connected(address, labels) as cluster:
        yield RayEngine(cluster, find(cluster))


class RayTransport:
    """A ``Transport`` that connects the driver to the nodes of a Ray cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes = {node.id: node for node in cluster.nodes()}
        self._refused: set[str] = set()

    def submit(self, node: Node, assignment: Mapping[str, Any]) -> RayTask:
        return self._cluster.submit(self._nodes[node.id], assignment)

    def wait(self, tasks: Sequence[RayTask], timeout_s: float) -> Sequence[RayTask]:
        return self._cluster.wait(tasks, timeout_s)

    def is_alive(self, node: Node) -> bool:
        return any(each.id == node.id for each in self._cluster.nodes())

    def ask_again(self, nodes: Sequence[Node]) -> Sequence[Node]:
        return probe(self._cluster, [self._nodes[node.id] for node in nodes])

    def joined(self, known: Collection[str]) -> tuple[Sequence[Node], Sequence[str]]:
        found, refused = [], []
        for node in self._cluster.nodes():
            if node.id in known or node.id in self._refused:
                continue
            try:
                check_monitors(self._cluster, [node])
                found += probe(self._cluster, [node])
            except ConfigError as error:
                self._refused.add(node.id)
                refused.append(f"no cell for {node.name}: {error.message}")
            self._nodes[node.id] = node
        return found, refused


def find(cluster: Cluster) -> list[Node]:
    """Return the cluster's nodes that can measure; a node that does not answer is left out.

    Raises:
        ConfigError: no node with the resource SLOT answers, Ray's memory monitor is on at a node,
            or a node has no weighin or another version or code of it.
    """
    nodes = cluster.nodes()
    check_monitors(cluster, nodes)
    found = probe(cluster, nodes)
    if not found:
        raise no_slot()
    return found


def check_monitors(cluster: Cluster, nodes: Sequence[RayNode]) -> None:
    """Raise ConfigError if Ray's memory monitor is on at a node.

    The monitor kills tasks when the whole node is short of memory. It could kill a cell
    (measurement) that is still below its own RAM limit.
    """
    on = []
    for node in nodes:
        with suppress(LostTask):
            is_on, source = cluster.monitor(node)
            if is_on:
                on.append(f"{node.name}: on ({source})")
    if on:
        raise ConfigError(
            "Ray's memory monitor is on, and would kill cells before their limit does:"
            f" {'; '.join(on)}",
            "stop Ray on these nodes (ray stop), and start Ray there without its memory monitor:"
            f" {START}",
        )


def probe(cluster: Cluster, nodes: Sequence[RayNode]) -> list[Node]:
    """Ask all nodes at the same time what they can do; lost nodes are left out.

    Raises:
        ConfigError: a node has no weighin, another version of weighin, or changed files of weighin.
    """
    tasks = [cluster.submit(node, {"kind": "probe", "gpu": node.gpus > 0}) for node in nodes]
    found = []
    for node, task in zip(nodes, tasks, strict=True):
        with suppress(LostTask):
            found.append(_described(node, answer(node, task, "node")))
    return found


def _described(node: RayNode, facts: Mapping[str, Any]) -> Node:
    if facts["weighin"] != __version__:
        raise ConfigError(
            f"the node {node.name} has weighin {facts['weighin']}, and this machine {__version__}",
            f"install the same version on that node: {install.command('ray', anywhere=True)}",
        )
    if facts["code"] != (own := environment.code_digest()):
        raise ConfigError(
            f"the node {node.name} has other code of weighin {__version__} than this machine: its files"
            f" have the digest {facts['code']}, those here {own}",
            "install the same files of weighin on all nodes, because a table must not mix the"
            " figures of different code",
        )
    return Node(
        node.id,
        node.name,
        facts["ram_bytes"],
        facts["free_ram_bytes"],
        facts["isolations"],
        tuple(facts["gpu_bytes"]),
        facts["no_soft_limit"],
    )
