"""The memory cgroups of cells: where this user may make them, and their start, limits and end.

cgroup v2 lets an ordinary user limit memory only in a *delegated* subtree. The systemd user manager
creates a delegated subtree (a scope) on request. ``enter_scope`` runs weighin again inside one.
Sources: "Delegation" in the kernel's admin-guide/cgroup-v2.rst, and systemd's CGROUP_DELEGATION.md.

If the machine has the memory controller on cgroup v1 and also a v2 tree (hybrid), a cell also has a
group in the v2 tree, because only v2 has PSI. A group's name contains the pid of the weighin process
that made the group, so that a later run can remove the groups of a killed run.
"""

import errno
import itertools
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from weighin import child_process
from weighin.cell import Cell
from weighin.child_process import PATIENCE_S, signal_each
from weighin.errors import IsolationUnavailable, StillRunning
from weighin.phase_reporter import read_text
from weighin.probes import environment
from weighin.probes.cgroup import (
    Cgroup,
    folders_of,
    is_left_behind,
    limits_around,
    members_of,
    memory_cgroup_of,
    memory_hierarchy,
    mounts,
    owned_name,
    pressure_hierarchy,
)

PARENT_LEAF = "weighin-parent"
"""The leaf cgroup into which weighin moves the processes of its own group. cgroup v2 allows no
process in a group that enables controllers for its children.
"""

_ENTERED = "WEIGHIN_DELEGATED"
_PREFIX = "weighin."
_SWAPS = Path("/proc/swaps")
_PAUSE_S = 0.005
_numbers = itertools.count()


@cache
def groups_root() -> Path | None:
    """Return a folder in which this user can create cgroups with a memory limit. The processes of a delegated
    group, this one among them, may move into a leaf of it.
    """
    hierarchy = memory_hierarchy()
    if hierarchy is None:
        return None
    version, mount = hierarchy
    if version == 1:
        return mount if os.access(mount, os.W_OK) else None
    candidates = [mount]
    if own := _group_of(os.getpid()):
        # A container without a cgroup namespace sees the host's root, but must keep its cells inside.
        in_container = own == _group_of(1) or limits_around(own)
        candidates = [own, mount] if in_container else [mount, own]
    return next((folder for folder in candidates if _enables_memory(folder)), None)


def ram_bytes(isolation: str = "cgroup") -> tuple[int, int]:
    """Return the RAM that cells can have here, and how much of it is free: a limit around this process also
    applies to the cells, unless a Docker engine runs them.
    """
    total, free = environment.total_ram_bytes(), environment.free_ram_bytes()
    if isolation == "docker":
        return total, free
    for limit, group in limits_around(groups_root() or _group_of(os.getpid()) or Path("/")):
        total = min(total, limit)
        cgroup = Cgroup(group)
        reclaimed_first = cgroup.read_stat().get("inactive_file", 0)
        free = min(free, limit - (cgroup.read("usage") or 0) + reclaimed_first)
    return total, free


def needs_scope() -> bool:
    """Tell whether this user can create cgroups only in a scope of the systemd user manager."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return (
        _ENTERED not in os.environ
        and bool(shutil.which("systemd-run"))
        and Path(runtime, "systemd", "private").exists()
        and (memory_hierarchy() or (0,))[0] == 2
        and groups_root() is None
    )


def enter_scope(arguments: Sequence[str]) -> None:
    """Replace this process by ``python -m weighin ARGUMENTS`` in a delegated scope of systemd."""
    scope = ("systemd-run", "--user", "--scope", "--quiet", "--collect", "-p", "Delegate=yes")
    command = (*scope, "--", *child_process.module("weighin", *arguments))
    os.environ[_ENTERED] = "1"
    os.execvp(command[0], command)  # noqa: S606 (no shell is wanted)


def _group_of(pid: int) -> Path | None:
    """Return the memory cgroup of a process; if that is a ``PARENT_LEAF``, the group above it."""
    group = memory_cgroup_of(pid)
    return group.parent if group and group.name == PARENT_LEAF else group


def _enables_memory(folder: Path) -> bool:
    """Enable the memory controller for groups in ``folder``; say if this user can make such groups. The kernel
    refuses it while the group has processes, which therefore move into a leaf, and stay. If the kernel
    refuses it for another reason, they move back.
    """
    control, leaf = folder / "cgroup.subtree_control", folder / PARENT_LEAF
    if not os.access(folder, os.W_OK):
        return False
    before = members_of(leaf)
    for _ in range(10):  # while other processes start and end
        try:
            if "memory" not in control.read_text().split():
                control.write_text("+memory")
        except OSError as error:
            if error.errno != errno.EBUSY:
                break
        else:
            return True
        with suppress(OSError):
            leaf.mkdir(exist_ok=True)
            _move((folder / "cgroup.procs").read_text().split(), leaf)
    _move([pid for pid in members_of(leaf) if pid not in before], folder)
    with suppress(OSError):  # it was never made, or has processes of an earlier run
        leaf.rmdir()
    return False


def _move(pids: Iterable[int | str], group: Path) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended, or is not to be moved
            (group / "cgroup.procs").write_text(str(pid))


def roots() -> list[Path]:
    """Return the folders for cgroups: in the memory controller's hierarchy, and in a hybrid's v2 tree."""
    if (root := groups_root()) is None:
        raise IsolationUnavailable("this user may not create memory cgroups", _repair())
    pressure = pressure_hierarchy() if memory_hierarchy() == (1, root) else None
    return [root, pressure] if pressure else [root]


def _repair() -> str:
    if os.geteuid() == 0:
        return "in a container, start it with the option --privileged"
    if shutil.which("sudo"):
        return "run it as root: sudo env PATH=$PATH weighin ..."
    return "run it as root"


def make(cell: Cell | None = None) -> list[Path]:
    """Create cgroups with the limits of a cell."""
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
    groups = make()
    try:
        yield groups[0]
    finally:
        remove(groups)


def limit(group: Path, limit_bytes: int) -> None:
    """Limit a cgroup's memory, without swap, so that the kernel kills instead of swapping."""
    cgroup = Cgroup(group)
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
    pids = members_of(group)
    if (kill := group / "cgroup.kill").exists():  # cgroup v2 since Linux 5.14
        with suppress(OSError):
            kill.write_text("1")
    else:
        signal_each(pids)
    thaw(pids)


def thaw(pids: Sequence[int]) -> None:
    """Thaw the freezer groups of killed processes: on cgroup v1, SIGKILL ends no frozen process."""
    freezers = [one.place for one in mounts() if "freezer" in one.options] if pids else []
    for pid, mount in itertools.product(pids, freezers):
        with suppress(OSError):  # it has ended, or the group is not this user's
            lines = read_text(f"/proc/{pid}/cgroup").splitlines()
            group = next((line.split(":", 2)[2] for line in lines if ":freezer:" in line), "/")
            for above in (own := Path(f"{mount}{group}"), *own.parents):
                if (state := above / "freezer.state").exists():
                    state.write_text("THAWED")


def remove(groups: Sequence[Path], *, waits: bool = True) -> None:
    """Kill the processes in cgroups and below, with ``waits`` for up to 10 s, and remove the cgroups.
    StillRunning: a process does not end; the others were removed.
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
    removed = []
    for group in [group for root in roots() for group in root.glob(f"{_PREFIX}*")]:
        if is_left_behind(group.name.removeprefix(_PREFIX)):
            with suppress(StillRunning, IsolationUnavailable):
                remove([group])
                removed.append(f"cgroup {group}")
    return removed
