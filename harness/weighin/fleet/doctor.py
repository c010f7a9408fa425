"""``weighin doctor --engine ray``: test what each node of a cluster can limit and measure."""

from collections.abc import Callable, Mapping

from weighin.doctor.doctor import Capability, Examination, row
from weighin.fleet.cluster import START, connected
from weighin.fleet.node import own_code


def examine(
    address: str, labels: Mapping[str, str], say: Callable[[str], None]
) -> list[Examination]:
    """Test all nodes of a cluster at the same time; ``say`` gets a line for each step.

    Raises:
        ConfigError: no cluster answers, no node has the resource SLOT, or weighin does not run on a
            node.
    """
    with connected(address, labels) as cluster:
        examinations, names = [], cluster.names()
        for place, events in cluster.ask("examine", say).items():
            there, here, monitor = events["node"]["weighin"], own_code(), events["monitor"]
            off = f"start the node with the monitor off: {START}"
            rows = (
                *[Capability(**fields) for fields in events["node"]["capabilities"]],
                row("the same weighin", there == here, there, "bad", f"{there}; here: {here}"),
                row(
                    "no memory monitor of Ray",
                    not monitor["is_on"],
                    f"off ({monitor['source']})",
                    "bad",
                    f"on ({monitor['source']}); {off}",
                ),
            )
            can_measure = Examination(rows).holds_a_limit and not monitor["is_on"]
            about = {"name": names[place], "id": place, "can_measure": can_measure}
            examinations.append(Examination(rows, about))
        return examinations
