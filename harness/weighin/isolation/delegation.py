"""Find the folder in which this user may create memory cgroups: the root, or a delegated subtree.

cgroup v2 lets an ordinary user limit memory only in a *delegated* subtree. The systemd user manager
creates a delegated subtree (a scope) on request. ``enter`` runs weighin again inside a scope.
Sources: "Delegation" in the kernel's admin-guide/cgroup-v2.rst, and systemd's CGROUP_DELEGATION.md.
"""

import atexit
import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from weighin import child_process
from weighin.probes import environment
from weighin.probes.cgroup import MemoryCgroup, limits_around, memory_cgroup_of, memory_hierarchy

PARENT_LEAF = "weighin-parent"
"""The leaf cgroup into which weighin moves the processes of its own group. cgroup v2 allows no
process in a group that enables controllers for its children.
"""

_ENTERED = "WEIGHIN_DELEGATED"
_TRIES = 10  # while other processes start and end


@cache
def groups_root() -> Path | None:
    """Return a folder in which this user can create cgroups with a memory limit, or None.

    ``groups_root`` may move the processes of a delegated group, this process among them, into a
    leaf of that group. They move back when the last process of weighin that uses the group exits.
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
    """Return the RAM that cells can have on this machine, and how much of it is free, in bytes.

    The limit of a container or pod around this process also applies to the cells, unless a Docker
    engine runs them.
    """
    total, free = environment.total_ram_bytes(), environment.free_ram_bytes()
    if isolation == "docker":
        return total, free
    for limit, group in limits_around(groups_root() or _group_of(os.getpid()) or Path("/")):
        total = min(total, limit)
        cgroup = MemoryCgroup(group)
        reclaimed_first = cgroup.read_stat().get("inactive_file", 0)
        free = min(free, limit - (cgroup.read("usage") or 0) + reclaimed_first)
    return total, free


def left_limit() -> tuple[int, Path] | None:
    """Return the limit and path of a cgroup that limits this process but not its cells, or None.

    Such a cgroup can exist because, for example on cgroup v1, weighin creates the cells' groups at
    the top of the hierarchy, outside this process's group.
    """
    root, own = groups_root(), _group_of(os.getpid())
    if root is None or own is None:
        return None
    limits = [each for each in limits_around(own) if not root.is_relative_to(each[1])]
    return limits[0] if limits else None


def helps() -> bool:
    """Tell whether this user can create cgroups only in a scope of the systemd user manager."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return (
        _ENTERED not in os.environ
        and bool(shutil.which("systemd-run"))
        and Path(runtime, "systemd", "private").exists()
        and (memory_hierarchy() or (0,))[0] == 2
        and groups_root() is None
    )


def enter(arguments: Sequence[str]) -> None:
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
    """Enable the memory controller for groups in ``folder``; say if this user can make such groups.

    The lock on the leaf comes before the look at the controller: the last weighin that uses the leaf
    switches the controller off and removes the leaf when it exits, under a lock that excludes others.
    """
    control, leaf = folder / "cgroup.subtree_control", folder / PARENT_LEAF
    if not os.access(folder, os.W_OK):
        return False
    for _ in range(_TRIES):
        users = None
        try:
            users = _lock(leaf)
            if "memory" not in control.read_text().split():
                if users is not None:
                    _move(folder, leaf)
                try:
                    control.write_text("+memory")
                except OSError as error:
                    if error.errno != errno.EBUSY or users is not None:
                        raise
                    leaf.mkdir(exist_ok=True)
            if users is None and leaf.exists():  # made just now, here or by another weighin
                continue
        except OSError:  # this user may not enable it
            if users is not None:
                _give_back(folder, users, os.getpid())
            return False
        if users is not None:
            atexit.register(_give_back, folder, users, os.getpid())
        return True
    return False


def _lock(leaf: Path) -> int | None:
    """Open the leaf and lock it together with others; None if it does not exist, or no longer."""
    with contextlib.suppress(FileNotFoundError):
        users = os.open(leaf, os.O_RDONLY)
        fcntl.flock(users, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(users), leaf.stat()):
                return users
        os.close(users)  # while this process waited for the lock, another weighin removed the leaf
    return None


def _give_back(folder: Path, users: int, owner: int) -> None:
    """Move the processes of the leaf back into ``folder``, unless another weighin uses the group.

    ``users`` is the open leaf, which each process of weighin locks together with others.
    """
    if os.getpid() != owner:  # a fork of the process that uses the group
        return
    with contextlib.suppress(OSError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "cgroup.subtree_control").write_text("-memory")
        _move(folder / PARENT_LEAF, folder)
        (folder / PARENT_LEAF).rmdir()
    os.close(users)


def _move(source: Path, target: Path) -> None:
    """Move the processes of a group, also those that they start meanwhile."""
    for _ in range(_TRIES):
        pids = (source / "cgroup.procs").read_text().split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                (target / "cgroup.procs").write_text(pid)
        if not pids:
            break
