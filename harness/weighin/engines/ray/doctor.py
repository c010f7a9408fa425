"""``weighin doctor --engine ray``: test what each node of a cluster can limit and measure."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from weighin import __version__
from weighin.doctor import doctor as doctors
from weighin.doctor.doctor import Capability, Examination
from weighin.engines.ray import cluster as clusters
from weighin.engines.ray.cluster import START, Cluster, RayNode, RayTask
from weighin.engines.transport import LostTask
from weighin.errors import ConfigError
from weighin.probes import environment

_PINGS: Final = 5  # the first calls are slow, because Ray starts processes
_CLOCK_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class NodeExamination:
    """The results of all tests of one node."""

    name: str
    id: str
    examination: Examination
    is_monitored: bool

    @property
    def can_measure(self) -> bool:
        """Whether an isolation enforces a RAM limit on the node, and Ray's memory monitor is off."""
        return self.examination.holds_a_limit and not self.is_monitored

    def as_json(self) -> dict[str, Any]:
        about = {"name": self.name, "id": self.id, "can_measure": self.can_measure}
        return about | self.examination.as_json()


def examine(
    address: str, labels: Mapping[str, str], say: Callable[[str], None]
) -> list[NodeExamination]:
    """Test all nodes of a cluster at the same time; ``say`` gets a line for each step.

    Raises:
        ConfigError: no cluster answers, no node has the resource SLOT, a node was lost, or weighin
            does not run on a node.
    """
    with clusters.connected(address, labels) as cluster:
        nodes = cluster.nodes()
        if not nodes:
            raise clusters.no_slot()
        tasks = [cluster.submit(node, {"kind": "examine"}) for node in nodes]
        found = []
        for node, task in zip(nodes, tasks, strict=True):
            try:
                found.append(_examined(cluster, node, task, say))
            except LostTask as lost:
                raise ConfigError(
                    f"the node {node.name} was lost: {lost.message}",
                    "to test the other nodes, run weighin doctor --engine ray again",
                ) from None
        return found


def table(node: NodeExamination) -> RenderableType:
    return Group(Text(f"node {node.name}", style="bold"), doctors.table(node.examination))


def _examined(
    cluster: Cluster, node: RayNode, task: RayTask, say: Callable[[str], None]
) -> NodeExamination:
    examined = clusters.answer(node, task, "examined", say)
    is_on, source = cluster.monitor(node)
    monitor = Capability("no memory monitor of Ray", "good", f"off ({source})")
    if is_on:
        detail = f"on ({source}); start the node with the monitor off: {START}"
        monitor = replace(monitor, verdict="bad", detail=detail)
    capabilities = [Capability(**fields) for fields in examined["capabilities"]]
    code = _code(examined)
    examination = Examination((*capabilities, code, monitor, _clock(cluster, node)))
    return NodeExamination(node.name, node.id, examination, is_on)


def _code(examined: Mapping[str, Any]) -> Capability:
    there = (examined["weighin"], examined["code"])
    here = (__version__, environment.code_digest())
    detail = f"weighin {there[0]}, files with the digest {there[1]}"
    if there == here:
        return Capability("the same weighin", "good", detail)
    return Capability("the same weighin", "bad", f"{detail}; here: {here[0]}, {here[1]}")


def _clock(cluster: Cluster, node: RayNode) -> Capability:
    """Measure the offset of the node's clock from this machine's clock, as NTP does.

    Of five calls, only the quickest one counts, because its error is the smallest.
    """
    readings = []
    for _ in range(_PINGS):
        sent_ns = time.time_ns()
        there_ns = cluster.look(node)["t_ns"]
        back_ns = time.time_ns()
        half_ns = (back_ns - sent_ns) // 2
        readings.append((half_ns, there_ns - sent_ns - half_ns))
    error_ns, offset_ns = min(readings)
    verdict = "good" if abs(offset_ns) < _CLOCK_NS else "poor"
    detail = f"{offset_ns / 1e6:+.1f} ms from the driver's clock, within {error_ns / 1e6:.1f} ms"
    return Capability("clock", verdict, detail)  # type: ignore[arg-type]
