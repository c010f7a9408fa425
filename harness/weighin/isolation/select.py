"""Isolations by name, and the best one that works on this machine."""

from weighin.errors import IsolationUnavailable, UnknownName
from weighin.isolation.base import Isolation
from weighin.probes.cgroup import memory_hierarchy

NAMES = ("docker", "cgroup", "process")
"""In the order in which ``auto`` tries them."""


def named(name: str, base_image: str | None = None) -> Isolation:
    """Return an isolation by its name; does not check that it works here."""
    if name == "docker":
        from weighin.isolation.docker.isolation import (
            DockerIsolation,  # the SDK takes 0.2 s to import
        )

        return DockerIsolation(base_image=base_image)
    if name == "cgroup":
        from weighin.isolation.cgroup import CgroupIsolation

        return CgroupIsolation()
    if name == "process":
        from weighin.isolation.process import ProcessIsolation

        return ProcessIsolation()
    raise UnknownName("isolation", name, [*NAMES, "auto"])


def choose(name: str, *, limited: bool, base_image: str | None = None) -> tuple[Isolation, str]:
    """Return the isolation to use, checked, and one line of why where it was chosen here.

    ``auto`` takes Docker where an engine answers, else a cgroup that it may make, else a plain
    process; but never one that cannot hold a limit that was asked for.

    Raises:
        IsolationUnavailable: none can be used, or it cannot hold a limit.
    """
    if name != "auto":
        isolation = named(name, base_image)
        if limited and not isolation.limits:
            raise IsolationUnavailable(
                f"--isolation {name} cannot hold a RAM limit: nothing would be limited",
                "use --isolation docker or cgroup, or leave --ram out",
            )
        isolation.check()
        return isolation, ""
    refused: list[IsolationUnavailable] = []
    for candidate in NAMES:
        isolation = named(candidate, base_image)
        if limited and not isolation.limits:
            continue
        try:
            isolation.check()
        except IsolationUnavailable as error:
            refused.append(error)
            continue
        reasons = "; ".join(error.message for error in refused)
        return isolation, f"isolation {candidate}: {reasons}" if reasons else ""
    what = "nothing here can hold a RAM limit" if limited else "no isolation works here"
    raise IsolationUnavailable(
        f"{what}: {'; '.join(error.message for error in refused)}",
        " or ".join(error.repair for error in refused if error.repair),
    )


def check_soft_limit(isolation: Isolation) -> None:
    """Raise IsolationUnavailable where this isolation can set no soft limit here."""
    hierarchy = memory_hierarchy()
    if isolation.name == "cgroup" and hierarchy and hierarchy[0] == 2:
        return
    here = f"cgroup v{hierarchy[0]}" if hierarchy else "no memory controller"
    raise IsolationUnavailable(
        "a soft limit (--ram-high) is memory.high of cgroup v2, set with --isolation cgroup:"
        f" this is --isolation {isolation.name}, {here}",
        "leave --ram-high out, or use a machine with cgroup v2 and --isolation cgroup",
    )


def wants_cgroup(name: str) -> bool:
    """Tell whether ``choose`` would come to the cgroup isolation, by its name or for lack of Docker."""
    if name != "auto":
        return name == "cgroup"
    try:
        named("docker").check()
    except IsolationUnavailable:
        return True
    return False
