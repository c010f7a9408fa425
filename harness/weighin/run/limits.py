"""Compare the limits of cells with those of the cgroups around them."""

from collections.abc import Iterable

from weighin.cell import Cell
from weighin.errors import ConfigError
from weighin.isolation import delegation
from weighin.probes.cgroup import limits_around
from weighin.units import format_bytes, format_exact


def check_limits_around(cells: Iterable[Cell]) -> None:
    """Reject limits above that of a cgroup around the cells, because the kernel kills there first."""
    root = delegation.groups_root()
    limits = limits_around(root) if root else []
    asked = max((cell.ram_limit_bytes or 0 for cell in cells), default=0)
    if limits and asked > limits[0][0]:
        raise ConfigError(
            f"--ram {format_exact(asked)} is more than the limit of the cgroup around the cells,"
            f" {limits[0][1]} ({format_bytes(limits[0][0])})",
            "give a smaller --ram, or raise the limit of that cgroup, for example the memory limit"
            " of the container",
        )
