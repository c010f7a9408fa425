"""Run the worker in a memory cgroup of its own: the kernel's limit without a container.

On a hybrid machine (v1 memory controller beside a v2 tree) the worker also enters a group in the
v2 tree, which alone has PSI. Groups are named after their owner, so that what a killed parent
left behind can be told from what a living one uses.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from weighin.cell import Job
from weighin.errors import IsolationUnavailable, StillRunning
from weighin.isolation import delegation
from weighin.isolation.process import WORKER, LocalRunning
from weighin.probes.cgroup import (
    MemoryCgroup,
    is_alive,
    memory_hierarchy,
    pressure_hierarchy,
    this_process,
)
from weighin.protocol import encode_job

_PREFIX = "weighin."
_PATIENCE_S = 10.0
_REPAIR = (
    "run as root, or in a scope that the systemd user manager hands over (systemd-run --user --scope"
    " -p Delegate=yes weighin ...), or use --isolation docker"
)
_numbers = itertools.count()


class CgroupIsolation:
    """Processes in memory cgroups, one group a cell."""

    name = "cgroup"
    limits = True

    def check(self) -> None:
        """Raise IsolationUnavailable where no group can be made and limited."""
        if memory_hierarchy() is None:
            raise IsolationUnavailable(
                "this machine has no memory controller (neither cgroup v2 nor v1)",
                "boot with cgroup_enable=memory, or use --isolation docker",
            )
        with temporary_group() as group:
            limit(group, 2**40)

    def prepare(self, _progress: Callable[[str], None] = lambda _: None, /) -> None:
        return

    def start(self, job: Job) -> "CgroupRunning":
        """Start a worker that enters its limited group before its first instruction."""
        groups = _make_groups()
        try:
            if job.cell.ram_limit_bytes is not None:
                limit(groups[0], job.cell.ram_limit_bytes)
            if job.cell.ram_high_bytes is not None:
                (groups[0] / "memory.high").write_text(str(job.cell.ram_high_bytes))
            running = CgroupRunning(WORKER, groups)
        except BaseException:
            _remove(groups)
            raise
        running.channel.send(encode_job(job))
        return running

    def remove_stale(self) -> list[str]:
        """Kill and remove the groups whose owner is dead."""
        removed = []
        for root in _roots():
            for group in root.glob(f"{_PREFIX}*"):
                is_ours = is_alive(group.name.removeprefix(_PREFIX).rpartition(".")[0])
                if not is_ours and _is_removed(group):  # else a process in it cannot be killed
                    removed.append(f"cgroup {group}")
        return removed

    def describe(self) -> dict[str, str]:
        return {"groups": str(delegation.groups_root())}


class CgroupRunning(LocalRunning):
    """A worker inside groups that live and die with it."""

    def __init__(self, command: tuple[str, ...], groups: list[Path]) -> None:
        enter = "".join(f'echo $$ > "${n}/cgroup.procs" && ' for n, _ in enumerate(groups, 1))
        script = f'{enter}shift {len(groups)} && exec "$@"'
        super().__init__(
            ("/bin/sh", "-c", script, "weighin", *map(str, groups), *command), cgroup=groups[0]
        )
        self._groups = groups

    def kill(self) -> None:
        """Kill all that is in the group, children that left the process group included."""
        super().kill()
        _kill_members(self._groups[0])

    def close(self) -> None:
        try:
            super().close()
        except StillRunning:
            _is_removed(*self._groups, patience_s=0)
            raise
        _remove(self._groups)


def _roots() -> list[Path]:
    """Return where groups are made: the memory hierarchy, and the v2 tree where that is another.

    Raises:
        IsolationUnavailable: this user may make no group with a memory limit.
    """
    root = delegation.groups_root()
    if root is None:
        raise IsolationUnavailable("this user may not make memory cgroups", _REPAIR)
    is_v1 = memory_hierarchy() == (1, root)
    pressure = pressure_hierarchy() if is_v1 else None
    return [root, pressure] if pressure else [root]


def _make_groups() -> list[Path]:
    name = f"{_PREFIX}{this_process()}.{next(_numbers)}"
    groups: list[Path] = []
    for root in _roots():
        try:
            (root / name).mkdir()
        except OSError as error:
            if groups:
                break  # the second group only adds PSI
            raise IsolationUnavailable(
                f"cannot make a memory cgroup in {root}: {error.strerror}", _REPAIR
            ) from None
        groups.append(root / name)
    return groups


@contextlib.contextmanager
def temporary_group() -> Iterator[Path]:
    """Make an empty group that can be limited, and remove it at the end.

    Raises:
        IsolationUnavailable: this user may make none, or it would have no memory controller.
    """
    groups = _make_groups()
    try:
        yield groups[0]
    finally:
        _remove(groups)


def limit(group: Path, limit_bytes: int) -> None:
    """Set the limit with swap off: what does not fit is killed, not swapped out.

    Raises:
        IsolationUnavailable: there is swap, and this kernel cannot turn it off for a group.
    """
    (cgroup := MemoryCgroup(group)).limit_path.write_text(str(limit_bytes))
    if cgroup.version == 1:
        (group / "memory.swappiness").write_text("0")
        swap, value = group / "memory.memsw.limit_in_bytes", str(limit_bytes)
    else:
        swap, value = group / "memory.swap.max", "0"
        # What survives a kill shows what the strategy makes of it, as on v1 and in Docker.
        (group / "memory.oom.group").write_text("0")
    if swap.exists():
        swap.write_text(value)
    elif len(Path("/proc/swaps").read_text().splitlines()) > 1:
        raise IsolationUnavailable(
            f"the kernel does not account swap per cgroup ({swap.name} is missing)",
            "sudo swapoff -a, or boot with swapaccount=1",
        )


def _kill_members(group: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _remove(groups: list[Path]) -> None:
    """Remove groups, and kill what still runs in them.

    Raises:
        StillRunning: something in one of them does not end.
    """
    if not _is_removed(*groups):
        left = ", ".join(str(group) for group in groups if group.exists())
        raise StillRunning(
            f"a process does not end, not even by SIGKILL: it is in the cgroup {left}"
        )


def _is_removed(*groups: Path, patience_s: float = _PATIENCE_S) -> bool:
    """Remove groups; tells whether all are gone after the time to give their memory back."""
    deadline = time.monotonic() + patience_s
    for group in groups:
        while group.exists():
            _kill_members(group)
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
    return not any(group.exists() for group in groups)
