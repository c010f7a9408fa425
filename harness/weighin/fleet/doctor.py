"""``weighin doctor --engine ray``: test what each node of a cluster can limit and measure."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from weighin.doctor import doctor as doctors
from weighin.doctor.doctor import Capability, Examination
from weighin.errors import ConfigError, HarnessError
from weighin.fleet.cluster import START, Cluster, connected, monitor, no_slot, no_weighin, own_code

_PINGS: Final = 5  # the first calls are slow, because Ray starts processes
_CLOCK_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class NodeExamination(Examination):
    """The results of all tests of one node."""

    name: str
    id: str
    is_monitored: bool

    @property
    def can_measure(self) -> bool:
        """Whether an isolation enforces a RAM limit on the node, and Ray's memory monitor is off."""
        return self.holds_a_limit and not self.is_monitored

    def as_json(self) -> dict[str, Any]:
        about = {"name": self.name, "id": self.id, "can_measure": self.can_measure}
        return about | Examination.as_json(self)

    def table(self) -> RenderableType:
        return Group(Text(f"node {self.name}", style="bold"), doctors.table(self))


def examine(
    address: str, labels: Mapping[str, str], say: Callable[[str], None]
) -> list[NodeExamination]:
    """Test all nodes of a cluster at the same time; ``say`` gets a line for each step.

    Raises:
        ConfigError: no cluster answers, no node has the resource SLOT, a node was lost, or weighin
            does not run on a node.
    """
    with connected(address, labels) as cluster:
        if not (names := cluster.names()):
            raise no_slot()

        def tell(step: tuple[str, str, bool]) -> None:
            if step[1]:
                say(f"{names[step[0]]}: {step[1]}")

        return [
            _examined(cluster, place, names[place], events)
            for place, events in cluster.ask(names, tell, examine=True).items()
        ]


def _examined(
    cluster: Cluster, place: str, name: str, events: Mapping[str, Any] | HarnessError
) -> NodeExamination:
    if isinstance(events, HarnessError):
        raise ConfigError(
            f"the node {name}: {events.message}",
            "to test the other nodes, run weighin doctor --engine ray again",
        )
    if "node" not in events:
        raise no_weighin(name, events)
    is_on, source = monitor(events)
    off = Capability("no memory monitor of Ray", "good", f"off ({source})")
    on = replace(
        off,
        verdict="bad",
        detail=f"on ({source}); start the node with the monitor off: {START}",
    )
    there, here = events["node"]["weighin"], own_code()
    code = Capability("the same weighin", "good", there)
    if there != here:
        code = replace(code, verdict="bad", detail=f"{there}; here: {here}")
    tested = [Capability(**fields) for fields in events["node"]["capabilities"]]
    rows = (*tested, code, on if is_on else off, _clock(cluster, place))
    return NodeExamination(rows, name, place, is_on)


def _clock(cluster: Cluster, place: str) -> Capability:
    """Measure the offset of the node's clock from this machine's clock, as NTP does.

    Of five calls, only the quickest one counts, because its error is the smallest.
    """
    readings = []
    for _ in range(_PINGS):
        sent_ns = time.time_ns()
        there_ns = cluster.time_ns(place)
        half_ns = (time.time_ns() - sent_ns) // 2
        readings.append((half_ns, there_ns - sent_ns - half_ns))
    error_ns, offset_ns = min(readings)
    detail = f"{offset_ns / 1e6:+.1f} ms from the driver's clock, within {error_ns / 1e6:.1f} ms"
    return Capability("clock", "good" if abs(offset_ns) < _CLOCK_NS else "poor", detail)
