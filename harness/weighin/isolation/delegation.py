"""Find the folder in which this user may create memory cgroups: the root, or a delegated subtree.

cgroup v2 lets an ordinary user limit memory in a *delegated* subtree. The systemd user manager
provides such a subtree (a scope) on request: ``enter`` restarts this command inside a scope.
See "Delegation" in the kernel's admin-guide/cgroup-v2.rst, and systemd's CGROUP_DELEGATION.md.
"""

import errno
import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from weighin.probes.cgroup import memory_cgroup_of, memory_hierarchy

PARENT_LEAF = "weighin-parent"
"""The leaf group for this process: a group that enables controllers must not contain a process."""

_ENTERED = "WEIGHIN_DELEGATED"


@cache
def groups_root() -> Path | None:
    """Return a folder in which groups with a memory limit can be created, if one exists.

    The function may move this process, and other processes in the same delegated group, into a leaf
    of that group.
    """
    hierarchy = memory_hierarchy()
    if hierarchy is None:
        return None
    version, mount = hierarchy
    if version == 1:
        return mount if os.access(mount, os.W_OK) else None
    candidates = [mount]
    if own := memory_cgroup_of(os.getpid()):
        candidates.append(own.parent if own.name == PARENT_LEAF else own)
    return next((folder for folder in candidates if _enables_memory(folder)), None)


def helps() -> bool:
    """Tell whether a scope of the systemd user manager would let this user create groups."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return (
        _ENTERED not in os.environ
        and bool(shutil.which("systemd-run"))
        and Path(runtime, "systemd", "private").exists()
        and (memory_hierarchy() or (0,))[0] == 2
        and groups_root() is None
    )


def enter(arguments: Sequence[str]) -> None:
    """Replace this process by ``python -m weighin ARGUMENTS`` inside a delegated scope."""
    scope = ("systemd-run", "--user", "--scope", "--quiet", "--collect", "-p", "Delegate=yes")
    command = (*scope, "--", sys.executable, "-m", "weighin", *arguments)
    os.environ[_ENTERED] = "1"
    os.execvp(command[0], command)  # noqa: S606 (no shell is wanted)


def _enables_memory(folder: Path) -> bool:
    """Enable the memory controller for the groups in ``folder``; return whether that worked."""
    control = folder / "cgroup.subtree_control"
    try:
        if "memory" in control.read_text().split():
            return os.access(folder, os.W_OK)
        try:
            control.write_text("+memory")
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            _move_to_leaf(folder)
            control.write_text("+memory")
    except OSError:  # this user may not enable it
        return False
    return True


def _move_to_leaf(folder: Path) -> None:
    leaf = folder / PARENT_LEAF
    leaf.mkdir(exist_ok=True)
    for pid in (folder / "cgroup.procs").read_text().split():
        (leaf / "cgroup.procs").write_text(pid)
