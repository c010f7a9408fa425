"""Find the nodes of a cluster that can measure, and what they can do, before a run is planned."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weighin import __version__, install
from weighin.engines.ray.cluster import START, Cluster, RayNode, RayTask, answer, no_slot
from weighin.engines.scheduler import Demand, Node
from weighin.engines.transport import LostTask, NodeFacts
from weighin.errors import ConfigError, IsolationUnavailable
from weighin.isolation import select
from weighin.isolation.base import Isolation
from weighin.records import sources
from weighin.run.machines import Machines
from weighin.units import format_bytes, format_exact


@dataclass(frozen=True, slots=True)
class Fleet(Machines):
    """The nodes of a cluster"""

    nodes: Sequence[NodeFacts]

    def check_ram(self, limits: Sequence[int | None]) -> None:
        most = max(each.node.ram_bytes for each in self.nodes)
        for limit in limits:
            if limit is not None and limit > most:
                raise ConfigError(
                    f"--ram {format_exact(limit)} is more than any node has ({format_bytes(most)})",
                    "give a smaller limit, or add a larger node",
                )

    def check_gpu(self, device: str, vram_limits: Sequence[int | None]) -> None:
        for vram in vram_limits:
            reasons = [Demand(None, device, vram).obstacle(each.node) for each in self.nodes]
            if all(reasons):
                raise IsolationUnavailable(
                    f"no node can run --device {device}: {'; '.join(reasons)}",
                    "add a node with a GPU, and start it with --num-gpus if Ray does not see the GPU",
                )

    def choose(
        self,
        name: str,
        *,
        limited: bool,
        base_image: str | None = None,
        packages: tuple[str, ...] = (),
        containers: bool = True,
        image: str = "",
    ) -> tuple[Isolation, str]:
        """Return the named isolation, or for ``auto`` the first one that works on every node."""
        refused = []
        tried = [one for one in select.NAMES if containers or one != "docker"]
        for candidate in tried if name == "auto" else [name]:
            isolation = select.named(candidate, base_image, packages, image)
            if limited and not isolation.limits:
                refused.append(f"{candidate} cannot enforce a RAM limit")
                continue
            broken = [each for each in self.nodes if each.isolations[candidate]]
            reasons = "; ".join(
                f"{candidate} on {each.node.name}: {each.isolations[candidate]}" for each in broken
            )
            if not broken:
                return isolation, f"isolation {candidate}: {'; '.join(refused)}" if refused else ""
            if name != "auto" and len(broken) < len(self.nodes):
                return isolation, f"these nodes take no part in the run: {reasons}"
            refused.append(reasons)
        raise IsolationUnavailable(
            f"no isolation (docker, cgroup, process) works on every node: {'; '.join(refused)}",
            "repair these nodes, or name an isolation, so that only the nodes on which it works"
            " take part: --isolation cgroup;"
            " weighin doctor --engine ray examines each node",
        )

    def check_soft_limit(self, isolation: Isolation) -> None:
        for each in self.nodes:
            if isolation.name != "cgroup" or each.no_soft_limit:
                raise IsolationUnavailable(
                    f"a soft limit (--ram-high) does not work on {each.node.name}:"
                    f" {each.no_soft_limit or f'the isolation is {isolation.name}'}",
                    "leave out --ram-high, or use nodes with cgroup v2 and --isolation cgroup",
                )


class RayTransport:
    """A cluster as the transport of a driver (``weighin.engines.transport.Transport``)."""

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

    def ask_again(self, nodes: Sequence[Node]) -> Sequence[NodeFacts]:
        return probe(self._cluster, [self._nodes[node.id] for node in nodes])

    def joined(self, known: Collection[str]) -> tuple[Sequence[NodeFacts], Sequence[str]]:
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


def find(cluster: Cluster) -> Fleet:
    """Return the cluster's nodes that can measure. A node that does not answer is left out.

    Raises:
        ConfigError: no node has a slot, Ray's memory monitor is on, or a node has another weighin.
    """
    nodes = cluster.nodes()
    check_monitors(cluster, nodes)
    found = probe(cluster, nodes)
    if not found:
        raise no_slot()
    return Fleet(found)


def check_monitors(cluster: Cluster, nodes: Sequence[RayNode]) -> None:
    """Raise ConfigError if Ray's memory monitor is on at a node.

    The monitor watches the memory of the whole node and kills tasks: a cell that needs much memory
    would be killed by Ray, and not at its limit by the kernel.
    """
    on = []
    for node in nodes:
        with suppress(LostTask):
            if (state := cluster.monitor(node)).is_on:
                on.append(f"{node.name}: {state}")
    if on:
        raise ConfigError(
            "Ray's memory monitor is on, and would kill cells before their limit does:"
            f" {'; '.join(on)}",
            f"stop these nodes (ray stop) and start them with the monitor off: {START}",
        )


def probe(cluster: Cluster, nodes: Sequence[RayNode]) -> list[NodeFacts]:
    """Ask all nodes at the same time what they can do; a node that is lost gives no answer.

    Raises:
        ConfigError: a node has no weighin, or another version of it, or other code.
    """
    tasks = [cluster.submit(node, {"kind": "probe", "gpu": node.gpus > 0}) for node in nodes]
    found = []
    for node, task in zip(nodes, tasks, strict=True):
        with suppress(LostTask):
            found.append(_described(node, answer(node, task, "node")))
    return found


def _described(node: RayNode, facts: Mapping[str, Any]) -> NodeFacts:
    if facts["weighin"] != __version__:
        raise ConfigError(
            f"the node {node.name} has weighin {facts['weighin']}, and this machine {__version__}",
            f"install the same version on that node: {install.command('ray', anywhere=True)}",
        )
    if facts["code"] != (own := sources.digest_of_all()):
        raise ConfigError(
            f"the node {node.name} has other code of weighin {__version__} than this machine: its files"
            f" have the digest {facts['code']}, those here {own}",
            "install the same files on all nodes: records of different code must not share a row",
        )
    gpu_bytes = tuple(facts["gpu_bytes"])
    return NodeFacts(
        Node(node.id, node.name, facts["ram_bytes"], facts["free_ram_bytes"], gpu_bytes),
        facts["isolations"],
        facts["no_soft_limit"],
    )
