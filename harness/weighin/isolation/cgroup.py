"""The memory cgroups of cells: make and limit them, and kill and remove what is in them.

If the machine has the memory controller on cgroup v1 and also a v2 tree (hybrid), a cell also has a
group in the v2 tree, because only v2 has PSI. A group's name contains the pid of the weighin process
that made the group, so that a later run can remove the groups of a killed run.
"""

import errno
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from weighin.cell import Cell
from weighin.child_process import PATIENCE_S, signal_each
from weighin.errors import IsolationUnavailable, StillRunning
from weighin.isolation import delegation
from weighin.probes import mounts
from weighin.probes.cgroup import (
    MemoryCgroup,
    folders_of,
    is_left_behind,
    members_of,
    memory_hierarchy,
    owned_name,
    pressure_hierarchy,
    read_kernel,
)

_PREFIX = "weighin."
_SWAPS = Path("/proc/swaps")
_PAUSE_S = 0.005
_numbers = itertools.count()


def roots() -> list[Path]:
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


def make(cell: Cell | None = None) -> list[Path]:
    """Create cgroups with the limits of a cell; raise IsolationUnavailable if that is not possible."""
    name = f"{_PREFIX}{owned_name(next(_numbers))}"
    groups: list[Path] = []
    for root in roots():
        try:
            (root / name).mkdir()
        except OSError as error:
            if groups:
                break  # the second group only adds PSI, which a record may lack
            raise IsolationUnavailable(
                f"cannot create a memory cgroup in {root}: {error.strerror}", _repair()
            ) from None
        groups.append(root / name)
    try:
        if cell and cell.ram_limit_bytes is not None:
            limit(groups[0], cell.ram_limit_bytes)
        if cell and cell.ram_high_bytes is not None:
            (groups[0] / "memory.high").write_text(str(cell.ram_high_bytes))
    except BaseException:
        remove(groups)
        raise
    return groups


@contextmanager
def temporary_group() -> Iterator[Path]:
    """Create an empty cgroup whose memory can be limited; remove it after the ``with`` block."""
    groups = make()
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


def kill_members(group: Path) -> None:
    """Kill all processes in a cgroup and below it."""
    pids = members_of(group)
    if (kill := group / "cgroup.kill").exists():  # cgroup v2 since Linux 5.14
        with suppress(OSError):
            kill.write_text("1")
    else:
        signal_each(pids)
    thaw(pids)


def thaw(pids: Sequence[int]) -> None:
    """Thaw the freezer groups of killed processes: on cgroup v1, SIGKILL ends no frozen process."""
    freezers = [one.place for one in mounts.read() if "freezer" in one.options] if pids else []
    for pid, mount in itertools.product(pids, freezers):
        with suppress(OSError):  # it has ended, or the group is not this user's
            lines = read_kernel(Path(f"/proc/{pid}/cgroup")).splitlines()
            group = next((line.split(":", 2)[2] for line in lines if ":freezer:" in line), "/")
            for above in (own := Path(f"{mount}{group}"), *own.parents):
                if (state := above / "freezer.state").exists():
                    state.write_text("THAWED")


def remove(groups: Sequence[Path], *, waits: bool = True) -> None:
    """Kill the processes in cgroups and below, and remove the cgroups.

    With ``waits``, wait up to 10 s for the end of the processes.

    Raises:
        StillRunning: a process in one of the cgroups does not end; the others were removed.
        IsolationUnavailable: a cgroup without processes cannot be removed.
    """
    deadline = time.monotonic() + PATIENCE_S * waits
    left: OSError | None = None
    for group in groups:
        while group.exists():
            kill_members(group)
            try:
                for folder in folders_of(group):
                    Path(folder).rmdir()
            except FileNotFoundError:  # another process removed a group
                continue
            except OSError as error:
                if time.monotonic() > deadline:
                    left = error
                    break
                time.sleep(_PAUSE_S)
    if left and left.errno == errno.EBUSY:
        raise StillRunning(
            f"a process in the cgroup {left.filename} does not end, not even after SIGKILL"
        )
    if left:
        raise IsolationUnavailable(
            f"cannot remove the cgroup {left.filename}: {left.strerror}", f"rmdir {left.filename}"
        )


def remove_stale() -> list[str]:
    """Remove the cgroups of runs that were killed, and return a line for each."""
    removed = []
    for group in [group for root in roots() for group in root.glob(f"{_PREFIX}*")]:
        if is_left_behind(group.name.removeprefix(_PREFIX)):
            with suppress(StillRunning, IsolationUnavailable):
                remove([group])
                removed.append(f"cgroup {group}")
    return removed
