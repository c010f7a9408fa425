"""Read from the kernel's log which processes the OOM killer killed, and for which cgroup's limit.

The kernel writes two lines for each kill: "oom-kill:constraint=..." names the cgroups, and "... Killed
process ..." has the victim's memory. It leaves out the first line after ten kills within five seconds, and
for all but the first victim if memory.oom.group is set. Source: mm/oom_kill.c and mm/memcontrol.c of the
kernel, Documentation/ABI/testing/dev-kmsg.
"""

import os
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from weighin.probes.cgroup import memory_hierarchy
from weighin.result import Kill
from weighin.text import one_line
from weighin.units import KIB

MACHINE: Final = "machine"  # in ``Kill.limit_of``: not a cgroup was out of memory
UNKNOWN: Final = "unknown"  # a cgroup, which the log does not name
_LOG: Final = Path("/dev/kmsg")
_CAUSE: Final = re.compile(
    r"oom-kill:constraint=\w+,.*?(?:,oom_memcg=(?P<limited>.*?))?(?:,task_memcg=(?P<group>.*?))?"
    r",task=(?P<name>.*),pid=(?P<pid>\d+),uid=\d+\Z"
)
_KERNEL: Final = re.compile(r"(?:kmem: usage (?P<kib>\d+)kB,|kernel (?P<bytes>\d+)\Z)")  # v1 | v2
_WHOLE_GROUP: Final = re.compile(r"Tasks in (?P<group>.*) are going to be killed due to memory")
_VICTIM: Final = re.compile(
    r"(?P<kind>.*out of memory.*): Killed process (?P<pid>\d+) \((?P<name>.*)\),? total-vm:\d+kB,"
    r" anon-rss:(?P<anon>\d+)kB, file-rss:(?P<file>\d+)kB, shmem-rss:(?P<shmem>\d+)kB",
    re.IGNORECASE,
)
_FIRST_NAMESPACE: Final = 0xEFFF_FFFC  # PROC_PID_INIT_INO, of the kernel's proc_ns.h


def position() -> int | None:
    """Open the log at its end; None if this user may not read the log."""
    try:
        log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    os.lseek(log, 0, os.SEEK_END)
    return log


def has_our_pids() -> bool:
    return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_NAMESPACE


def kills_since(
    log: int | None,
    group: Path | None,
    main_pid: int,
    pids: Collection[int] = (),
    home: Path | None = None,
) -> tuple[Kill, ...] | None:
    """Return the kills in or below ``group``, of the process ``main_pid``, and of ``pids``, since ``position`` opened
    ``log``, which is closed; None if this user may not read it. ``home`` is the cgroup in which a command
    without a ``group`` started. In a container, the log's pids are others.
    """
    if log is None:
        return None
    _, mount = memory_hierarchy() or (0, None)

    def inside(group: Path | None) -> str | None:
        """Return a cgroup's path from the mount point on, as in the log; None if it is not below it."""
        if group is None or mount is None or not group.is_relative_to(mount):
            return None
        return f"/{group.relative_to(mount)}".rstrip(".")

    lines: list[str] = []
    with os.fdopen(log, "rb", buffering=0):  # which closes it
        for _ in range(2):
            lines += _read(log)
            found = parse_kills(lines, inside(group), main_pid, pids, inside(group or home))
            if all(kill.anon_bytes is not None for kill in found):
                break
            time.sleep(0.05)  # a victim may end before the kernel writes the line with its memory
    return found


def _read(log: int) -> Iterator[str]:
    """Yield the first line of each message from the kernel up to the log's end, oldest first."""
    while True:
        try:
            message = os.read(log, 8192)
        except BlockingIOError:  # the end
            return
        except BrokenPipeError:  # the kernel has overwritten the oldest messages
            continue
        numbers, _, text = message.decode(errors="replace").partition(";")
        if int(numbers.partition(",")[0]) >> 3 == 0:  # the facility; else a program wrote it
            yield text.split("\n", 1)[0]


def parse_kills(
    lines: list[str],
    group: str | None,
    main_pid: int,
    pids: Collection[int] = (),
    home: str | None = None,
) -> tuple[Kill, ...]:
    """Return the kills that concern us (``kills_since``); in the log, a cgroup may have more folders before it."""
    kills: dict[int, Kill] = {}
    cause: tuple[int, str, str] | None = None  # the victim, its cgroup, and that at its limit
    is_whole_group = False
    kernel_bytes: int | None = None  # of the group whose limit was met; the lines before the cause
    for line in lines:
        sizes: dict[str, int] = {}
        if match := _KERNEL.match(line):
            kernel_bytes = int(match["bytes"] or int(match["kib"]) * KIB)
            continue
        if match := _CAUSE.search(line):
            # The constraint is not used: before Linux 5.3, it is CONSTRAINT_NONE also for a cgroup.
            is_whole_group = False
            cause = int(match["pid"]), match["group"] or "", match["limited"] or MACHINE
        elif match := _VICTIM.search(line):
            if not cause or (cause[0] != int(match["pid"]) and not is_whole_group):
                limited = UNKNOWN if "cgroup" in match["kind"].lower() else MACHINE
                cause = int(match["pid"]), "", limited
            sizes = {f"{kind}_bytes": int(match[kind]) * KIB for kind in ("anon", "file", "shmem")}
        else:
            is_whole_group = is_whole_group or bool(_WHOLE_GROUP.search(line))
            continue
        pid, (_, path, limited) = int(match["pid"]), cause
        own = _up_to(path, group)
        if own is None and pid != main_pid and pid not in pids:
            continue
        limit_of, limit_is = "" if limited == own else limited, ""
        around = own or _up_to(path, home) or home
        if around and limit_of.startswith("/"):
            limit_is = "below" if Path(limited).is_relative_to(around) else "elsewhere"
            if Path(around).is_relative_to(limited):
                limit_is = "around"
        kills[pid] = Kill(
            pid,
            one_line(match["name"]),
            pid == main_pid,
            limit_of,
            limit_is=limit_is,
            kernel_bytes=None if limit_of else kernel_bytes,
            **sizes,
        )
    return tuple(kills.values())


def _up_to(path: str, group: str | None) -> str | None:
    if group is None:
        return None
    before, found, _ = f"{path}/".partition(f"{group}/")
    return before + group if found else None
