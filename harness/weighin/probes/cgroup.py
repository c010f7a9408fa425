"""Read what the kernel counts for a memory cgroup, and find the cgroup of a process.

This module works on cgroup v2, on cgroup v1 and on the hybrid of v1 and v2. A function whose result
may be None returns None, and not 0, if the kernel lacks the file that the function reads. Source:
Documentation/filesystems/proc.rst, admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1/memory.rst
of the kernel.
"""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weighin.probes import mounts
from weighin.probes.mounts import Mounted

LOCK_VARIABLE: Final = "WEIGHIN_LOCK"
"""The environment variable with the path of a lock file that replaces the machine's default one."""
_VMSTAT = Path("/proc/vmstat")
_UNLIMITED: Final = 2**60
_V1: Final = {
    "usage": "memory.usage_in_bytes",
    "peak": "memory.max_usage_in_bytes",
    "limit": "memory.limit_in_bytes",
    "oom": "memory.oom_control",
    "swap": "memory.memsw.limit_in_bytes",
    "kernel": "memory.kmem.usage_in_bytes",
    "kernel_peak": "memory.kmem.max_usage_in_bytes",
    "reset": "0",
    "unlimited": "-1",
}
"""The names of v1's files, and what is written to reset the peak, and to remove a limit."""
_V2: Final = {
    "usage": "memory.current",
    "peak": "memory.peak",
    "limit": "memory.max",
    "oom": "memory.events.local",
    "oom_below": "memory.events",
    "soft": "memory.high",
    "swap": "memory.swap.max",
    "reset": "reset\n",
    "unlimited": "max",
}
_V1_NAMES: Final = {  # in memory.stat, by those of v2
    "anon": "total_rss",
    "file": "total_cache",
    "shmem": "total_shmem",
    "file_mapped": "total_mapped_file",
    "swap": "total_swap",
    "pgfault": "total_pgfault",
    "pgmajfault": "total_pgmajfault",
    "active_file": "total_active_file",
    "inactive_file": "total_inactive_file",
    "unevictable": "total_unevictable",
}
_LINKS_OF_EMPTY: Final = 2  # of a folder without subfolders
_PF_EXITING: Final = 0x4  # a flag of a task: include/linux/sched.h


def read_kernel(path: Path) -> str:
    """Return the text of a file in /proc; bytes that are not UTF-8 become surrogates."""
    return os.fsdecode(path.read_bytes())


def start_time(pid: int) -> int | None:
    """Return a process's start time, in clock ticks since boot; None if the process has ended.

    A pid alone does not identify a process, because Linux reuses pids; pid and start time together
    do.
    """
    return _number(pid, 19)


def all_pids() -> list[int]:
    """Return the pids of all processes that /proc shows in this pid namespace."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def pids_in(group: Path) -> list[int]:
    """Return a cgroup's pids in this pid namespace; none if the cgroup was removed or is threaded."""
    try:
        # The file is opened at each call, because v1 caches the list of an open file for a second.
        found = map(int, (group / "cgroup.procs").read_text().split())
    except OSError:  # removed, or threaded
        return []
    return [pid for pid in found if pid]  # 0 stands for a process of another pid namespace


def folders_of(group: Path) -> list[str]:
    """Return the folders of the cgroups below a cgroup, the innermost first, and then its own folder;
    none if the cgroup was removed.
    """
    try:
        if group.stat().st_nlink <= _LINKS_OF_EMPTY:
            return [str(group)]
    except OSError:  # removed
        return []
    return [folder for folder, _, _ in os.walk(group, topdown=False)]


def members_of(group: Path) -> list[int]:
    """Return the pids in a group and the groups below it; those of other pid namespaces are left out."""
    return [pid for folder in folders_of(group) for pid in pids_in(Path(folder))]


def parent_of(pid: int) -> int | None:
    """Return the pid of a process's parent; None if the process has ended."""
    return _number(pid, 1)


def is_exiting(pid: int) -> bool:
    """Return whether a process has ended, or is exiting and so loses its memory and files."""
    flags = _number(pid, 6)
    return flags is None or bool(flags & _PF_EXITING)


def _number(pid: int, index: int) -> int | None:
    """Return field ``index`` after the name in /proc/PID/stat; None if the process has ended."""
    try:
        text = read_kernel(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[index])


def this_process() -> str:
    """Return a unique name for this process: its pid, start time and pid namespace, joined by "-"."""
    return f"{os.getpid()}-{start_time(os.getpid())}-{_pid_namespace()}"


def is_alive(name: str) -> bool:
    """Return whether the process ``name``, a result of ``this_process``, may still run.

    ``is_alive`` returns True for a process of another pid namespace, because weighin cannot see
    whether such a process has ended.
    """
    pid, _, rest = name.partition("-")
    ticks, _, namespace = rest.partition("-")
    if namespace and namespace != _pid_namespace():
        return True
    return pid.isdigit() and ticks == str(start_time(int(pid)))


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def owned_name(number: int) -> str:
    """Return a name for a cgroup, mount or container that this process makes:
    "pid-ticks-namespace.number".

    If the environment variable ``WEIGHIN_LOCK`` is set, ``lock_suffix`` follows the number.
    """
    return f"{this_process()}.{number}{lock_suffix()}"


def is_left_behind(name: str) -> bool:
    """Return whether this process may remove the cgroup, mount or container ``name``.

    ``name`` is a result of ``owned_name``. The process that made the name must be of this pid
    namespace, and must have ended. A process with a lock file of its own removes only what others
    with this lock file left, so that tests can look at what they left.
    """
    owner, _, number = name.rpartition(".")
    lock = "".join(number.partition("-")[1:])
    return lock_suffix() in ("", lock) and not is_alive(owner)


def lock_suffix() -> str:
    """Return "-" and a digest of the lock file's path; empty for the machine's default lock file."""
    lock = os.environ.get(LOCK_VARIABLE)
    return f"-{zlib.crc32(os.fsencode(lock)):08x}" if lock else ""


def memory_hierarchy() -> tuple[int, Path] | None:
    """Return (cgroup version, mount point) of the hierarchy with the memory controller, or None."""
    version1, version2 = hierarchies(mounts.read())
    if version1:
        return 1, version1
    if version2 and "memory" in (version2 / "cgroup.controllers").read_text().split():
        return 2, version2
    return None


def pressure_hierarchy() -> Path | None:
    """Return the mount point of cgroup v2, which alone has PSI files; None if it is not mounted."""
    return hierarchies(mounts.read())[1]


def hierarchies(found: Sequence[Mounted]) -> tuple[Path | None, Path | None]:
    """Return the mount points of cgroup v1's memory controller and of cgroup v2; None if missing."""
    version1 = (one.place for one in found if one.kind == "cgroup" and "memory" in one.options)
    version2 = (one.place for one in found if one.kind == "cgroup2")
    return next(version1, None), next(version2, None)


def memory_cgroup_of(pid: int) -> Path | None:
    """Return the folder of a process's memory cgroup; None if the folder is not visible here."""
    hierarchy = memory_hierarchy()
    path = _group_of(pid, hierarchy[0]) if hierarchy else None
    if hierarchy is None or path is None:
        return None
    folder = _folder(hierarchy[1], path)
    return folder if folder.is_dir() else None


def has_left(pid: int, group: Path) -> bool:
    """Return whether a process has moved out of the memory cgroup ``group`` and those below it.

    The result is False if the process is exiting, or if its cgroup is not visible here.
    """
    now = memory_cgroup_of(pid)
    if now is None or now.is_relative_to(group):
        return False
    return not is_exiting(pid)  # on cgroup v1, an exiting process is in the root group


def pressure_file_of(pid: int) -> Path | None:
    """Return the path of the PSI file of a process's cgroup (v2).

    ``pressure_file_of`` returns None without cgroup v2 or PSI, and for a process that has ended. It
    also returns None for the root group, whose PSI file describes the whole machine.
    """
    mount, path = pressure_hierarchy(), _group_of(pid, 2)
    if mount is None or path is None or path == "/":
        return None
    file = _folder(mount, path) / "memory.pressure"
    return file if file.exists() else None


def _folder(mount: Path, group: str) -> Path:
    """Return the folder of the cgroup that has the path ``group`` in /proc/PID/cgroup.

    In a container, ``mount`` may show the container's own group, not the hierarchy's root group.
    """
    root = next((one.root for one in mounts.read() if one.place == mount), "/").rstrip("/")
    inside = group == root or group.startswith(f"{root}/")
    return mount / (group.removeprefix(root) if inside else group).lstrip("/")


def parse_group(text: str, version: int) -> str | None:
    """Return the path of the v1 memory cgroup or the v2 cgroup in the text of /proc/PID/cgroup."""
    for line in filter(None, text.split("\n")):
        number, controllers, path = line.split(":", 2)
        if number == "0" if version == 2 else "memory" in controllers.split(","):
            return path
    return None


def _group_of(pid: int, version: int) -> str | None:
    try:
        return parse_group(read_kernel(Path(f"/proc/{pid}/cgroup")), version)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def read_machine_oom_kills() -> int | None:
    """Return how many processes of the whole machine the OOM killer has killed since boot."""
    return _read_field(_VMSTAT, "oom_kill")


class MemoryCgroup:
    """The files of one memory cgroup, which exists.

    Attributes:
        pressure_path: the PSI file. On cgroup v1, it is not in ``path``, but in a folder of v2.
        version: 1 or 2.
        words: what is written to reset the peak ("reset"), and to remove a limit ("unlimited").
        usage_path: the file with the current charge: the memory counted for the cgroup, in bytes.
        peak_path: the file with the highest charge so far; v2 has it since Linux 5.19.
        oom_path: the file whose line ``oom_kill N`` counts the kills in this group without its child
            groups.
        soft_limit_path: the file memory.high with the usage above which the kernel throttles the
            group; None on v1.
    """

    def __init__(self, path: Path, pressure_path: Path | None = None) -> None:
        self.path, self.pressure_path = path, pressure_path
        self.version = 1 if (path / _V1["usage"]).exists() else 2
        self.words = _V1 if self.version == 1 else _V2
        self.usage_path, self.peak_path = self._file("usage"), self._file("peak")
        self.limit_path, self.oom_path = self._file("limit"), self._file("oom")
        self.stat_path, soft = path / "memory.stat", self._file("soft")
        self.soft_limit_path = soft if soft.exists() else None

    def _file(self, name: str) -> Path:
        return self.path / self.words.get(name, f"no file of v{self.version}")

    def read(self, name: str) -> int | None:
        """Return the number in a file in bytes: usage, limit, or (only on v1) kernel or kernel_peak.

        Without a limit, v1's is a huge number.
        """
        text = (_read(self._file(name)) or "").strip()
        return int(text) if text.isdigit() else None

    def parse_stat(self, text: str) -> dict[str, int]:
        """Return the numbers in the text of memory.stat, of the group and those below it, by v2's names."""
        numbers = parse_numbers(text)
        if self.words is _V1:
            numbers |= {name: numbers.get(field, 0) for name, field in _V1_NAMES.items()}
        return numbers

    def read_stat(self) -> dict[str, int]:
        return self.parse_stat(_read(self.stat_path) or "")

    def read_oom_kills(self) -> int | None:
        """Return how many processes the OOM killer has killed in this cgroup, not in child groups."""
        return _read_field(self.oom_path, "oom_kill")

    def read_oom_kills_below(self) -> int | None:
        """Return the OOM kills in the cgroup and in all cgroups ever below it, in sum; None on v1."""
        return _read_field(self._file("oom_below"), "oom_kill")

    def read_limit_events(self) -> dict[str, int] | None:
        """Return the counters of memory.events.local, which tell how often the cgroup met its limits.

        ``max`` counts allocations that met the limit, ``high`` those above memory.high, and ``oom``
        those for which the kernel could reclaim nothing. On cgroup v1,
        ``read_limit_events`` returns None, because v1's ``failcnt`` stays 0 if RAM and swap have
        the same limit (seen on Linux 6.18).
        """
        text = _read(self.oom_path) if self.words is _V2 else None
        return parse_numbers(text) if text else None

    def read_refaults(self) -> int | None:
        """Return how many file pages were read again after their eviction."""
        return _read_field(self.stat_path, "workingset_refault_file")

    def read_pressure_ns(self) -> tuple[int | None, int | None]:
        """Return PSI's total stall times (some, full) in ns; (None, None) if PSI is off."""
        text = _read(self.pressure_path) if self.pressure_path else None
        return parse_pressure(text) if text else (None, None)

    def raise_limit(self) -> None:
        """Remove the memory limits, so that a killed process that thrashes can exit quickly."""
        # v1 refuses a limit above that of memory and swap.
        first = self._file("swap") if self.words is _V1 else self._file("soft")
        for path in (first, self.limit_path):
            try:
                if path.exists():
                    path.write_text(self.words["unlimited"])
            except OSError:  # the file is read-only; the killed process then needs longer to exit
                return


def limits_around(folder: Path) -> list[tuple[int, Path]]:
    """Return (limit in bytes, cgroup) for each cgroup with a limit among ``folder`` and its parents.

    The smallest limit comes first. In a container, groups above the mount point are not visible.
    On v1, a number above 2**60 means that the group has no limit.
    """
    limits = [(MemoryCgroup(group).read("limit"), group) for group in (folder, *folder.parents)]
    return sorted((limit, group) for limit, group in limits if limit and limit < _UNLIMITED)


def room_in(folder: Path) -> int | None:
    """Return the most bytes that a cgroup can use under its own limit and the limits of its parents.

    The anonymous and shared memory of other groups under the same limit reduces the result. Without
    any limit, ``room_in`` returns None.
    """
    own = _unreclaimable(folder)
    return min(
        (
            max(limit - max(_unreclaimable(group) - own, 0), 0)
            for limit, group in limits_around(folder)
        ),
        default=None,
    )


def _unreclaimable(folder: Path) -> int:
    """Return the anonymous and shared memory of a group and all groups below it, in bytes."""
    stat = MemoryCgroup(folder).read_stat()
    return stat.get("anon", 0) + stat.get("shmem", 0)


@dataclass(frozen=True, slots=True)
class Counters:
    """What the kernel has counted for a cgroup so far; without a cgroup, all numbers are None.

    ``peak_bytes`` is the high-water mark since its last reset, or since the group's creation.
    ``kernel_peak_bytes`` is that of the kernel memory, which only v1 keeps. ``some_ns`` and
    ``full_ns`` are PSI's stall times.
    """

    usage_bytes: int | None = None
    peak_bytes: int | None = None
    kernel_peak_bytes: int | None = None
    refaults: int | None = None
    some_ns: int | None = None
    full_ns: int | None = None
    oom_kills: int | None = None
    limit_events: dict[str, int] | None = None


def grown(before: int | None, after: int | None) -> int | None:
    """Return the growth of a counter; None if one of the two readings is missing."""
    return None if before is None or after is None else after - before


class PeakMark:
    """The kernel's high-water mark of a cgroup's charge (the memory that the kernel counts for it).

    ``resets`` tells whether the kernel can reset the mark. On cgroup v1, a write of 0 resets the
    mark for all readers. On cgroup v2 since Linux 6.12, a write to an open file resets the mark
    only for reads from this open file. Other kernels cannot reset the mark: it is the peak since
    the cgroup's creation.
    """

    def __init__(self, cgroup: MemoryCgroup) -> None:
        self.cgroup = cgroup
        self.resets = True
        try:
            self._file = os.open(cgroup.peak_path, os.O_RDWR)
        except FileNotFoundError:
            self._file, self.resets = -1, False
        except OSError:  # not writable, or mounted read-only as in a container
            self._file, self.resets = os.open(cgroup.peak_path, os.O_RDONLY), False

    def read(self) -> int | None:
        """Return the highest charge in bytes since the last reset; None without a mark or a cgroup."""
        if self._file < 0:
            return None
        try:
            return int(os.pread(self._file, 32, 0))
        except OSError:  # the group was removed
            return None

    def counters(self) -> Counters:
        group = self.cgroup
        some_ns, full_ns = group.read_pressure_ns()
        return Counters(
            usage_bytes=group.read("usage"),
            peak_bytes=self.read(),
            kernel_peak_bytes=group.read("kernel_peak"),
            refaults=group.read_refaults(),
            some_ns=some_ns,
            full_ns=full_ns,
            oom_kills=group.read_oom_kills(),
            limit_events=group.read_limit_events(),
        )

    def reset(self) -> bool:
        """Reset the high-water mark to the current charge; return whether the kernel can do so."""
        if self.resets:
            try:
                os.pwrite(self._file, self.cgroup.words["reset"].encode(), 0)
            except OSError:
                self.resets = False
        return self.resets

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def parse_pressure(text: str) -> tuple[int | None, int | None]:
    """Return the total stall times (some, full) from the text of a PSI file, in nanoseconds."""
    totals: dict[str, int] = {}
    for line in text.splitlines():
        kind, *fields = line.split()
        totals[kind] = int(dict(field.split("=") for field in fields)["total"]) * 1000
    return totals.get("some"), totals.get("full")


def parse_numbers(text: str) -> dict[str, int]:
    """Return the number of each name, from a text of lines "name number"."""
    return {name: int(value) for name, value in (line.split() for line in text.splitlines())}


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # this kernel lacks the file, or the group was removed
        return None


def _read_field(path: Path, name: str) -> int | None:
    return parse_numbers(_read(path) or "").get(name)
