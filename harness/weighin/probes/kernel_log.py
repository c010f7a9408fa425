"""Read from the kernel's log which processes the OOM killer killed, and for which cgroup's limit.

The kernel writes two lines for each kill: "oom-kill:constraint=..." names the cgroups, and "... Killed
process ..." has the victim's memory. It leaves out the first line after ten kills within five seconds.
Source: mm/oom_kill.c of the kernel, Documentation/ABI/testing/dev-kmsg.
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
_FIRST: Final = {"pid": 0xEFFF_FFFC, "cgroup": 0xEFFF_FFFB}  # namespaces, of the kernel's proc_ns.h
_CAUSE: Final = re.compile(
    r"oom-kill:constraint=\w+,.*?(?:,oom_memcg=(?P<limited>.*?))?(?:,task_memcg=(?P<group>.*?))?"
    r",task=(?P<name>.*),pid=(?P<pid>\d+),uid=\d+\Z"
)
_VICTIM: Final = re.compile(
    r"out of memory.*: Killed process (?P<pid>\d+) \((?P<name>.*)\),? total-vm:\d+kB,"
    r" anon-rss:(?P<anon>\d+)kB, file-rss:(?P<file>\d+)kB, shmem-rss:(?P<shmem>\d+)kB",
    re.IGNORECASE,
)


def position() -> int | None:
    """Open the log at its end; None if this user may not read it, or in a container, whose pids and paths of cgroups
    it does not have.
    """
    try:
        if {kind: Path("/proc/self/ns", kind).stat().st_ino for kind in _FIRST} != _FIRST:
            return None
        log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    os.lseek(log, 0, os.SEEK_END)
    return log


def kills_since(
    log: int | None,
    group: Path | None,
    main_pid: int,
    pids: Collection[int] = (),
    home: Path | None = None,
) -> tuple[Kill, ...] | None:
    """Return the kills in or below ``group``, of ``main_pid`` and of ``pids`` since ``position`` opened ``log``, which is
    closed; None without a log. ``home`` is the cgroup in which a command without a ``group`` started.
    """
    if log is None:
        return None
    _, mount = memory_hierarchy() or (0, None)
    own, around = (
        f"/{each.relative_to(mount)}" if each and mount and each.is_relative_to(mount) else None
        for each in (group, group or home)
    )
    kills: dict[int, Kill] = {}
    cause: re.Match[str] | None = None
    time.sleep(0.05)  # a victim may end before the kernel writes the line with its memory
    for line in _read(log):
        sizes: dict[str, int] = {}
        if match := _CAUSE.search(line):
            cause = match
        elif match := _VICTIM.search(line):
            sizes = {f"{kind}_bytes": int(match[kind]) * KIB for kind in ("anon", "file", "shmem")}
        else:
            continue
        path, limited = "", UNKNOWN if "cgroup" in line.partition(": Killed")[0] else MACHINE
        if cause and cause["pid"] == match["pid"]:
            # The constraint is not used: before Linux 5.3, it is CONSTRAINT_NONE also for a cgroup.
            path, limited = cause["group"] or "", cause["limited"] or MACHINE
        pid, is_inside = int(match["pid"]), bool(own and Path(path).is_relative_to(own))
        if not is_inside and pid != main_pid and pid not in pids:
            continue
        limit_of, limit_is = "" if limited == own else limited, ""
        if around and limit_of.startswith("/"):
            limit_is = "below" if Path(limited).is_relative_to(around) else "elsewhere"
            if Path(around).is_relative_to(limited):
                limit_is = "around"
        name, is_main = one_line(match["name"]), pid == main_pid
        kills[pid] = Kill(pid, name, is_main, limit_of, limit_is=limit_is, **sizes)
    return tuple(kills.values())


def _read(log: int) -> Iterator[str]:
    """Yield the first line of each message from the kernel up to the log's end, oldest first, and close it."""
    with os.fdopen(log, "rb", buffering=0):
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
