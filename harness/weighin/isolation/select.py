"""Choose an isolation (way to run a worker) by name, or the best that works on this machine."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from weighin.cell import Cell
from weighin.errors import ConfigError, IsolationUnavailable, UnknownName
from weighin.isolation import cgroup
from weighin.isolation.base import Isolation
from weighin.probes.cgroup import limits_around
from weighin.units import format_bytes, format_exact

NAMES = ("docker", "cgroup", "process")  # in the order in which ``auto`` tries them


def named(name: str, image: str = "") -> Isolation:
    """Return an isolation, unchecked. A command's container runs ``image``, or sees this machine's programs."""
    if name == "docker":
        # The SDK takes 0.2 s to import.
        from weighin.isolation.docker import DockerIsolation

        return DockerIsolation(image)
    from weighin.isolation.process import CgroupIsolation, ProcessIsolation

    kinds = {"cgroup": CgroupIsolation, "process": ProcessIsolation}
    if name not in kinds:
        raise UnknownName("isolation", name, [*NAMES, "auto"])
    return kinds[name]()


def choose(
    name: str,
    *,
    limited: bool,
    containers: bool = True,
    image: str = "",
    nodes: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> tuple[Isolation, str]:
    """Return a working isolation, and a note for the user. ``auto`` takes the first of ``NAMES`` that works
    and, if ``limited``, enforces a RAM limit. If other machines run the cells, ``nodes`` says for each why an
    isolation does not work there; ``auto`` then takes one that works on all, and a named one must work on at
    least one.
    """
    whys: list[str] = []
    repairs: list[str] = []
    for candidate in (name,) if name != "auto" else NAMES if containers else NAMES[1:]:
        isolation = named(candidate, image)
        if limited and not isolation.limits:
            continue
        whys_not = {n: of[candidate] for n, of in nodes.items() if of[candidate]}
        broken = [f"{candidate} on {node}: {why}" for node, why in whys_not.items()]
        repair = "find the fault (weighin doctor, on that node)"
        try:
            if not nodes:
                isolation.check()
        except IsolationUnavailable as error:
            broken, repair = [error.message], error.repair
        whys += broken
        if not broken or (name != "auto" and len(broken) < len(nodes)):
            return isolation, f"isolation {candidate}: {'; '.join(whys)}" if whys else ""
        if repair not in repairs:
            repairs.insert(0, repair)  # the last isolation has the easiest repair
    message = "; ".join(whys) or f"--isolation {name} cannot enforce a RAM limit"
    if name == "auto":
        can = "can enforce a RAM limit" if limited else "works"
        message = f"no isolation {can} {'on every node' if nodes else 'here'}: {message}"
    else:
        repairs.append("use --isolation auto")
    repair = ", or ".join(repairs)
    if limited:
        repair += "; without --ram, bench and run work, as do recommend and predict"
    raise IsolationUnavailable(message, repair)


def check_limits_around(isolation: Isolation, cells: Iterable[Cell]) -> None:
    """Refuse a RAM limit above that of a cgroup around the cells, at which the kernel would kill the cell first."""
    root = cgroup.groups_root() if isolation.name == "cgroup" else None
    limits = limits_around(root) if root else []
    largest = max((cell.ram_limit_bytes or 0 for cell in cells), default=0)
    if limits and largest > limits[0][0]:
        raise ConfigError(
            f"--ram {format_exact(largest)} is more than the limit of the cgroup in which weighin"
            f" measures, {limits[0][1]} ({format_bytes(limits[0][0])})",
            "give a smaller --ram, or raise the limit of that cgroup, for example the memory limit of the container",
        )
