"""``weighin doctor --engine ray``: test what each node of a cluster can limit and measure."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from weighin.doctor.doctor import Capability, Examination, row
from weighin.errors import ConfigError, HarnessError
from weighin.fleet.cluster import START, Cluster, connected, monitor, no_slot, own_code

_PINGS: Final = 5  # the first calls are slow, because Ray starts processes
_CLOCK_NS: Final = 1_000_000_000


def examine(
    address: str, labels: Mapping[str, str], say: Callable[[str], None]
) -> list[Examination]:
    """Test all nodes of a cluster at the same time; ``say`` gets a line for each step.

    Raises:
        ConfigError: no cluster answers, no node has the resource SLOT, a node was lost, or weighin
            does not run on a node.
    """
    with connected(address, labels) as cluster:
        if not (names := cluster.names()):
            raise no_slot()
        examinations = []

        def tell(step: tuple[str, str, bool, str]) -> None:
            if step[1]:
                say(f"{names[step[0]]}: {step[1]}")

        for place, events in cluster.ask(names, "examine", tell).items():
            if isinstance(events, HarnessError):
                raise ConfigError(f"{names[place]}: {events.message}", events.repair)
            there, here, (is_on, source) = events["node"]["weighin"], own_code(), monitor(events)
            on = f"on ({source}); start the node with the monitor off: {START}"
            rows = (
                *[Capability(**fields) for fields in events["node"]["capabilities"]],
                row("the same weighin", there == here, there, "bad", f"{there}; here: {here}"),
                row("no memory monitor of Ray", not is_on, f"off ({source})", "bad", on),
                _clock(cluster, place),
            )
            can_measure = Examination(rows).holds_a_limit and not is_on
            about = {"name": names[place], "id": place, "can_measure": can_measure}
            examinations.append(Examination(rows, about))
        return examinations


def _clock(cluster: Cluster, place: str) -> Capability:
    """Measure the offset of the node's clock from this machine's clock, as NTP does.

    Of five calls, only the quickest one counts, because its error is the smallest.
    """
    readings = []
    for _ in range(_PINGS):
        sent_ns = time.time_ns()
        events: Any = cluster.ask([place], "")[place]
        half_ns = (time.time_ns() - sent_ns) // 2
        readings.append((half_ns, events["raylet"]["t_ns"] - sent_ns - half_ns))
    error_ns, offset_ns = min(readings)
    detail = f"{offset_ns / 1e6:+.1f} ms from the driver's clock, within {error_ns / 1e6:.1f} ms"
    return Capability("clock", "good" if abs(offset_ns) < _CLOCK_NS else "poor", detail)
