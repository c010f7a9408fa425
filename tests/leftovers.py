"""What runs of this machine left behind: processes, cgroups and containers. Nothing, they should."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from weighin.probes.cgroup import memory_hierarchy, pressure_hierarchy

_PATIENCE_S = 10.0


def processes(mark: str) -> list[str]:
    """Return the processes whose environment holds ``mark``, but for this one: "pid command"."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        try:
            # Both end up empty for zombies: these are dead, and only wait for their parent.
            if mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{folder.name} {command}")
        except OSError:  # it ended meanwhile, or is not ours
            continue
    return found


def groups(owner: int) -> list[Path]:
    """Return the cgroups that cells of process ``owner`` were run in."""
    hierarchy = memory_hierarchy()
    roots = {hierarchy[1] if hierarchy else None, pressure_hierarchy()} - {None}
    return [group for root in roots if root for group in root.rglob(f"weighin.{owner}-*")]


def containers(owner: int) -> list[str]:
    """Return the names of containers that process ``owner`` started; none without an engine."""
    from weighin.errors import IsolationUnavailable
    from weighin.isolation.docker.engine import connect

    try:
        client = connect()
    except IsolationUnavailable:
        return []
    try:
        found = client.containers(all=True, filters={"label": "weighin.owner"})
    finally:
        client.close()
    mine = f"{owner}-"
    return [c["Names"][0] for c in found if c["Labels"]["weighin.owner"].startswith(mine)]


def all_of(owner: int, mark: str) -> list[str]:
    """Return all that is left of what process ``owner`` started under ``mark``."""
    found = [*groups(owner), *containers(owner), *processes(mark)]
    return [str(one) for one in found]


def wait_until(happened: Callable[[], object], what: str, patience_s: float = _PATIENCE_S) -> None:
    """Wait for what has no event to wait for; fails with ``what`` where it does not come."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
