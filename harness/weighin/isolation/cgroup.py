"""The memory cgroups of cells: where this user may make them, and their start, limits and end.

cgroup v2 lets an ordinary user limit memory only in a *delegated* subtree (a scope), which the systemd user
manager creates on request: "Delegation" in the kernel's admin-guide/cgroup-v2.rst, and systemd's
CGROUP_DELEGATION.md. Beside the memory controller on v1, a cell also has a group in a v2 tree (hybrid), because
only v2 has PSI. A group's name has the pid of its weighin process, so that a later run can remove it.
"""

import errno
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from weighin import child_process
from weighin.cell import Cell
from weighin.child_process import PATIENCE_S, signal_each
from weighin.errors import IsolationUnavailable, StillRunning
from weighin.probes import cgroup as probe
from weighin.probes import environment

# cgroup v2 allows no process in a group that enables controllers for its children.
PARENT_LEAF = "weighin-parent"  # the leaf into which the processes of weighin's own group move
PREFIX = "weighin."  # of the names of cells' groups
_ENTERED = "WEIGHIN_DELEGATED"
_SWAPS = Path("/proc/swaps")
_REPAIR = "run it as root (sudo env PATH=$PATH weighin ...) or, with Docker, add --isolation docker; start a container with --privileged"
_numbers = itertools.count()


@cache
def groups_root() -> Path | None:
    """Return a folder in which this user can create cgroups with a memory limit."""
    hierarchy = probe.memory_hierarchy()
    if hierarchy is None:
        return None
    version, mount = hierarchy
    if version == 1:
        return mount if os.access(mount, os.W_OK) else None
    candidates = [mount]
    if own := _group_of(os.getpid()):
        # A container without a cgroup namespace sees the host's root, but must keep its cells inside.
        in_container = own == _group_of(1) or probe.limits_around(own)
        candidates = [own, mount] if in_container else [mount, own]
    return next((folder for folder in candidates if _enables_memory(folder)), None)


def ram_bytes(isolation: str = "cgroup") -> tuple[int, int]:
    """Return the RAM that cells can have here, and how much of it is free: a limit around this process also
    applies to the cells, unless a Docker engine runs them.
    """
    total, free = environment.total_ram_bytes(), environment.free_ram_bytes()
    if isolation == "docker":
        return total, free
    for limit, group in probe.limits_around(groups_root() or _group_of(os.getpid()) or Path("/")):
        total = min(total, limit)
        cgroup = probe.Cgroup(group)
        reclaimed_first = cgroup.read_stat().get("inactive_file", 0)
        free = min(free, limit - (cgroup.read("usage") or 0) + reclaimed_first)
    return total, free


def enter_scope(arguments: Sequence[str]) -> None:
    """Replace this process by ``python -m weighin ARGUMENTS`` in a delegated scope of the systemd user manager, if
    this user can create cgroups only there. If the manager refuses, systemd-run says why, and nothing changes.
    """
    manager = Path(os.environ.get("XDG_RUNTIME_DIR", ""), "systemd", "private")
    if _ENTERED in os.environ or not (shutil.which("systemd-run") and os.access(manager, os.W_OK)):
        return
    if (probe.memory_hierarchy() or (0,))[0] != 2 or groups_root():
        return
    scope = ("systemd-run", "--user", "--scope", "--quiet", "--collect", "-p", "Delegate=yes", "--")
    if not subprocess.run((*scope, "true"), check=False).returncode:
        os.environ[_ENTERED] = "1"
        command = (*scope, *child_process.module("weighin", *arguments))
        os.execvp(command[0], command)  # noqa: S606 (no shell is wanted)


def _group_of(pid: int) -> Path | None:
    """Return the memory cgroup of a process; if that is a ``PARENT_LEAF``, the group above it."""
    group = probe.memory_cgroup_of(pid)
    return group.parent if group and group.name == PARENT_LEAF else group


def _enables_memory(folder: Path) -> bool:
    """Enable the memory controller for groups in ``folder``; say if this user can make such groups. The kernel
    refuses it while the group has processes, which therefore move into a leaf, and stay.
    """
    control, leaf = folder / "cgroup.subtree_control", folder / PARENT_LEAF
    if not os.access(folder, os.W_OK):
        return False
    for _ in range(10):  # while other processes start and end
        try:
            if "memory" not in control.read_text().split():
                control.write_text("+memory")
        except OSError as error:
            if error.errno != errno.EBUSY:
                break
        else:
            return True
        with suppress(OSError):  # a group of threads cannot be read
            leaf.mkdir(exist_ok=True)
            for pid in (folder / "cgroup.procs").read_text().split():
                with suppress(OSError):  # it has ended, or is not to be moved
                    (leaf / "cgroup.procs").write_text(pid)
    with suppress(OSError):  # it was never made, or has processes
        leaf.rmdir()
    return False


def roots() -> list[Path]:
    """Return the folders in which to make cgroups: in the memory controller's hierarchy and, if that is v1 beside a v2 tree, in the v2 tree, for PSI."""
    if (root := groups_root()) is None:
        raise IsolationUnavailable("this user may not create memory cgroups", _REPAIR)
    pressure = probe.pressure_hierarchy() if probe.memory_hierarchy() == (1, root) else None
    return [root, pressure] if pressure else [root]


def make(cell: Cell | None = None) -> list[Path]:
    name = f"{PREFIX}{probe.owned_name(next(_numbers))}"
    groups = [root / name for root in roots()]
    with ExitStack() as made:
        made.callback(remove, groups)
        try:
            for group in groups:
                group.mkdir()
        except OSError as error:
            if group == groups[0]:
                why = f"cannot create the memory cgroup {group}: {error.strerror}"
                raise IsolationUnavailable(why, _REPAIR) from None
            groups.remove(group)  # it only adds PSI, which a record may lack
        if cell and cell.ram_limit_bytes is not None:
            limit(groups[0], cell.ram_limit_bytes)
        if cell and cell.ram_high_bytes is not None:
            (groups[0] / "memory.high").write_text(str(cell.ram_high_bytes))
        made.pop_all()
    return groups


@contextmanager
def temporary_group() -> Iterator[Path]:
    groups = make()
    try:
        yield groups[0]
    finally:
        remove(groups)


def limit(group: Path, limit_bytes: int) -> None:
    """Limit a cgroup's memory, without swap, so that the kernel kills instead of swapping."""
    cgroup = probe.Cgroup(group)
    cgroup.file("limit").write_text(str(limit_bytes))
    swap, is_v1 = cgroup.file("swap"), cgroup.version == 1
    # With oom.group, the kernel would kill the whole group, unlike on v1 and in Docker.
    (group / ("memory.swappiness" if is_v1 else "memory.oom.group")).write_text("0")
    if swap.exists():
        swap.write_text(str(limit_bytes) if is_v1 else "0")
    elif swap_is_on():
        raise IsolationUnavailable(
            f"the kernel does not count swap for each cgroup ({swap.name} is missing), so a process"
            " under a RAM limit could swap",
            "turn swap off (sudo swapoff -a), or boot with swapaccount=1",
        )


def swap_is_on() -> bool:
    return len(_SWAPS.read_text().splitlines()) > 1


def kill_members(group: Path) -> None:
    if (kill := group / "cgroup.kill").exists():  # cgroup v2 since Linux 5.14
        with suppress(OSError):
            kill.write_text("1")
    else:
        signal_each(probe.members_of(group))


def remove(groups: Sequence[Path], *, waits: bool = True) -> None:
    """Kill the processes in cgroups and below, ``waits`` for 10 s, and remove the cgroups. Raises StillRunning if a
    process does not end, IsolationUnavailable if the kernel refuses; the other cgroups are removed.
    """
    deadline = time.monotonic() + PATIENCE_S * waits
    left: OSError | None = None
    for group in groups:
        while group.exists():
            kill_members(group)
            try:
                for folder in probe.folders_of(group):
                    Path(folder).rmdir()
            except FileNotFoundError:  # another process removed a group
                continue
            except OSError as error:
                if time.monotonic() > deadline or error.errno in (errno.EROFS, errno.EACCES):
                    left = error
                    break
                time.sleep(0.005)
    if left:
        why = f"the cgroup {left.filename} cannot be removed after SIGKILL to its processes: {left.strerror}"
        if left.errno != errno.EBUSY:
            raise IsolationUnavailable(why, f"rmdir {left.filename}")
        raise StillRunning(why)
