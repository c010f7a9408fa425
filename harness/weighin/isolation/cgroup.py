"""Run each worker in its own memory cgroup, with the kernel's limit but without a container.

If the machine has the memory controller on cgroup v1 and also a v2 tree (hybrid), the worker also
enters a group in the v2 tree, because only v2 has PSI. A group's name contains the pid of the
weighin process that made the group, so that a later run can remove the groups of a killed run.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from weighin.cell import Cell
from weighin.child_process import PATIENCE_S
from weighin.errors import IsolationUnavailable
from weighin.isolation import delegation
from weighin.isolation.process import ProcessIsolation, removal_error, remove
from weighin.probes.cgroup import (
    MemoryCgroup,
    is_left_behind,
    memory_hierarchy,
    owned_name,
    pressure_hierarchy,
)
from weighin.units import format_bytes

_PREFIX = "weighin."
_SWAPS = Path("/proc/swaps")
_numbers = itertools.count()


class CgroupIsolation(ProcessIsolation):
    """Runs processes in memory cgroups, one group for each cell (measurement)."""

    name = "cgroup"
    limits = True

    def check(self) -> None:
        """Raise IsolationUnavailable if this user cannot create a cgroup and limit its memory."""
        if memory_hierarchy() is None:
            raise IsolationUnavailable(
                "this machine has no cgroup memory controller (neither v2 nor v1)",
                "boot with cgroup_enable=memory",
            )
        with temporary_group() as group:
            limit(group, 2**40)

    def prepare(self, progress: Callable[[str], None] = lambda _: None, /) -> None:
        """Report if weighin's own cgroup has a memory limit that does not apply to the cells."""
        if left := delegation.left_limit():
            progress(
                f"weighin measures outside its own cgroup {left[1]}, whose limit of"
                f" {format_bytes(left[0])} does not apply there"
            )

    def remove_stale(self) -> list[str]:
        """Kill the processes in cgroups of runs that were killed, and remove these cgroups."""
        return [
            f"cgroup {group}"
            for root in _roots()
            for group in root.glob(f"{_PREFIX}*")
            if is_left_behind(group.name.removeprefix(_PREFIX))
            and not removal_error(group, patience_s=PATIENCE_S)
        ]

    def describe(self) -> dict[str, str]:
        return {"groups": str(delegation.groups_root())}

    @contextlib.contextmanager
    def _groups(self, cell: Cell) -> Iterator[list[Path]]:
        """Make cgroups with a cell's limits; remove them if this or the ``with`` block raises an error."""
        groups = _make_groups()
        try:
            if cell.ram_limit_bytes is not None:
                limit(groups[0], cell.ram_limit_bytes)
            if cell.ram_high_bytes is not None:
                (groups[0] / "memory.high").write_text(str(cell.ram_high_bytes))
            yield groups
        except BaseException:
            remove(groups)
            raise


def _roots() -> list[Path]:
    """Return the folders in which to create cgroups.

    The first of the returned folders is in the hierarchy of the memory controller. On a machine
    with this hierarchy on v1 and a v2 tree, the second folder is in the v2 tree, which has PSI.

    Raises:
        IsolationUnavailable: this user may not create a cgroup with a memory limit.
    """
    root = delegation.groups_root()
    if root is None:
        raise IsolationUnavailable("this user may not create memory cgroups", _repair())
    is_v1 = memory_hierarchy() == (1, root)
    pressure = pressure_hierarchy() if is_v1 else None
    return [root, pressure] if pressure else [root]


def _repair() -> str:
    if os.geteuid() == 0:
        return "in a container, start it with the option --privileged"
    if shutil.which("sudo"):
        return "run it as root: sudo env PATH=$PATH weighin ..."
    return "run it as root"


def _make_groups() -> list[Path]:
    name = f"{_PREFIX}{owned_name(next(_numbers))}"
    groups: list[Path] = []
    for root in _roots():
        try:
            (root / name).mkdir()
        except OSError as error:
            if groups:
                break  # the second group only adds PSI, which a record may lack
            raise IsolationUnavailable(
                f"cannot create a memory cgroup in {root}: {error.strerror}", _repair()
            ) from None
        groups.append(root / name)
    return groups


@contextlib.contextmanager
def temporary_group() -> Iterator[Path]:
    """Create an empty cgroup whose memory can be limited; remove it after the ``with`` block.

    Raises:
        IsolationUnavailable: this user may not create a cgroup, or the cgroup has no memory
            controller.
    """
    groups = _make_groups()
    try:
        yield groups[0]
    finally:
        remove(groups)


def limit(group: Path, limit_bytes: int) -> None:
    """Limit the memory of a cgroup, and disable swap so that the kernel kills instead of swapping.

    Raises:
        IsolationUnavailable: the machine has swap, and this kernel cannot disable swap for one
            cgroup.
    """
    (cgroup := MemoryCgroup(group)).file("limit").write_text(str(limit_bytes))
    if cgroup.version == 1:
        (group / "memory.swappiness").write_text("0")
        swap, value = group / "memory.memsw.limit_in_bytes", str(limit_bytes)
    else:
        swap, value = group / "memory.swap.max", "0"
        # The kernel then kills one process and not the group, as on v1 and in Docker.
        (group / "memory.oom.group").write_text("0")
    if swap.exists():
        swap.write_text(value)
    elif len(_SWAPS.read_text().splitlines()) > 1:
        raise IsolationUnavailable(
            f"the kernel does not count swap for each cgroup ({swap.name} is missing), so a process"
            " under a RAM limit could swap",
            "turn swap off (sudo swapoff -a), or boot with swapaccount=1",
        )
