"""Find processes, cgroups and containers that a run left behind; there should be none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weighin.disk import throttle
from weighin.probes.cgroup import memory_hierarchy, pressure_hierarchy

_PATIENCE_S = 60.0


def processes(mark: str) -> list[str]:
    """Return the other processes whose environment contains ``mark``, each as "pid command"."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        try:
            # Both files are empty for zombies, which have ended and only wait for their parent.
            if mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{folder.name} {command}")
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
    return found


def lives(pid: int) -> bool:
    """Return whether a process has not ended; one that only waits for its parent has."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def end(found: list[str]) -> None:
    """Kill the ``processes`` that were found."""
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(int(process.split()[0]), signal.SIGKILL)


def groups(owner: int) -> list[Path]:
    """Return the cgroups in which process ``owner`` ran its cells."""
    hierarchy = memory_hierarchy()
    reads = throttle.hierarchy()
    roots = {each[1] for each in (hierarchy, reads) if each} | {pressure_hierarchy()} - {None}
    found = [Path(folder) for root in roots if root for folder, _, _ in os.walk(root)]  # some end
    return [group for group in found if group.name.startswith(f"weighin.{owner}-")]


def containers(owner: int) -> list[str]:
    """Return the names of the containers that process ``owner`` started; empty without an engine."""
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


def mounts(owner: int) -> list[str]:
    """Return the slow disks that process ``owner`` mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if f" fuse.weighin {owner}-" in line]


def all_of(owner: int, mark: str) -> list[str]:
    """Return all leftovers of process ``owner``, whose children have ``mark`` in their environment."""
    leftovers = [*groups(owner), *containers(owner), *processes(mark), *mounts(owner)]
    return [str(leftover) for leftover in leftovers]


def wait_until(happened: Callable[[], object], what: str, patience_s: float = _PATIENCE_S) -> None:
    """Poll until ``happened`` returns a true value; fail with ``what`` after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
