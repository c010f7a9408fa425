"""Read what the kernel counts for a memory cgroup, and find the cgroup of a process by the table of mounts.

None, and not 0, stands for what the kernel lacks. Source: admin-guide/cgroup-v2.rst,
admin-guide/cgroup-v1/memory.rst and filesystems/proc.rst of the kernel's Documentation.
"""

import os
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from weighin.phase_reporter import read_text

MOUNTS: Final = Path("/proc/self/mountinfo")
LOCK_VARIABLE: Final = "WEIGHIN_LOCK"  # names a lock that replaces the machine's default one
_OWNED: Final = re.compile(r"([0-9]{1,19})-([0-9]+)-([0-9]+)\.[0-9]*(-[0-9a-f]{8})?")
_UNLIMITED: Final = 2**60  # a larger number means on v1 that there is no limit
_FILES: Final = {  # on v1, on v2; empty for what there is not
    "stat": ("memory.stat", "memory.stat"),
    "usage": ("memory.usage_in_bytes", "memory.current"),
    "peak": ("memory.max_usage_in_bytes", "memory.peak"),
    "limit": ("memory.limit_in_bytes", "memory.max"),
    "swap": ("memory.memsw.limit_in_bytes", "memory.swap.max"),
    "oom": ("memory.oom_control", "memory.events.local"),
    "oom_below": ("", "memory.events"),
    "kernel": ("memory.kmem.usage_in_bytes", ""),
    "kernel_peak": ("memory.kmem.max_usage_in_bytes", ""),
}
_V1_STAT: Final = {"anon": "rss", "file": "cache", "file_mapped": "mapped_file"}  # of v2, of v1


def start_time(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; None if the process has ended."""
    return _number(pid, 19)


def parent_of(pid: int) -> int | None:
    return _number(pid, 1)


def is_exiting(pid: int) -> bool:
    """Return whether a process has ended, or is losing its memory and files."""
    flags = _number(pid, 6)
    return flags is None or bool(flags & 0x4)  # a flag of a task: include/linux/sched.h


def _number(pid: int, index: int) -> int | None:
    try:
        text = read_text(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[index])


def this_process() -> str:
    """Return a unique name for this process: its pid, start time and pid namespace, joined by "-"."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{os.getpid()}-{start_time(os.getpid())}-{namespace}"


def owned_name(number: int) -> str:
    """Return a name for what this process makes, which ``is_left_behind`` reads."""
    return f"{this_process()}.{number}{lock_suffix()}"


def is_left_behind(name: str) -> bool:
    """Return whether the process that made ``name`` (``owned_name``) has ended; False for another pid namespace,
    and for another lock than that of this process, so that tests can look at what they left.
    """
    if not (found := _OWNED.fullmatch(name)):
        return False
    pid, ticks, namespace, lock = found.groups("")
    is_ours = lock_suffix() in ("", lock) and namespace == this_process().split("-")[2]
    return is_ours and ticks != str(start_time(int(pid)))


def lock_suffix() -> str:
    """Return "-" and a digest of the lock's name; empty for the machine's default lock."""
    lock = os.environ.get(LOCK_VARIABLE)
    return f"-{zlib.crc32(os.fsencode(lock)):08x}" if lock else ""


class Mounted(NamedTuple):
    root: str  # the folder of the file system that is mounted at ``place``
    place: Path
    kind: str
    source: str
    options: list[str]  # of the file system, not of the mount


def mounts() -> list[Mounted]:
    found = []
    # Split only at "\n" and " ", because paths may contain Unicode's other line ends and blanks.
    for line in filter(None, os.fsdecode(MOUNTS.read_bytes()).split("\n")):
        before, _, after = line.partition(" - ")
        _, _, _, root, place, *_ = before.split(" ")
        kind, source, options = after.split(" ", 2)
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place)  # \040: a blank
        found.append(Mounted(root, Path(place), kind, source, options.split(",")))
    return found


def memory_hierarchy() -> tuple[int, Path] | None:
    """Return the cgroup version that has the memory controller, and where it is mounted."""
    for one in mounts():
        if one.kind == "cgroup" and "memory" in one.options:
            return 1, one.place
    version2 = pressure_hierarchy()
    if version2 and "memory" in (version2 / "cgroup.controllers").read_text().split():
        return 2, version2
    return None


def pressure_hierarchy() -> Path | None:
    """Return the mount point of cgroup v2, which alone has PSI files."""
    return next((one.place for one in mounts() if one.kind == "cgroup2"), None)


def memory_cgroup_of(pid: int) -> Path | None:
    version, mount = memory_hierarchy() or (0, None)
    folder = _folder(mount, _group_of(pid, version))
    return folder if folder and folder.is_dir() else None


def pressure_file_of(pid: int) -> Path | None:
    """Return the PSI file of a process's cgroup (v2); None for the root group, the whole machine."""
    group = _group_of(pid, 2)
    folder = None if group == "/" else _folder(pressure_hierarchy(), group)
    file = folder / "memory.pressure" if folder else None
    return file if file and file.exists() else None


def outside(pid: int, group: Path) -> Path | None:
    """Return a process's memory cgroup if it is another one than ``group`` and those below."""
    now = memory_cgroup_of(pid)
    if now is None or now.is_relative_to(group) or is_exiting(pid):  # v1 moves those into the root
        return None
    return now


def _folder(mount: Path | None, group: str | None) -> Path | None:
    """Return the folder of a ``group`` of /proc/PID/cgroup; ``mount`` may show only a container's own group."""
    if mount is None or group is None:
        return None
    root = next((one.root for one in mounts() if one.place == mount), "/").rstrip("/")
    inside = group == root or group.startswith(f"{root}/")
    return mount / (group.removeprefix(root) if inside else group).lstrip("/")


def _group_of(pid: int, version: int) -> str | None:
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in filter(None, read_text(f"/proc/{pid}/cgroup").split("\n")):
            number, controllers, path = line.split(":", 2)
            if number == "0" if version == 2 else "memory" in controllers.split(","):
                return path
    return None


def folders_of(group: Path) -> list[str]:
    """Return a cgroup's folder and those below, the innermost first; none if it was removed."""
    with suppress(OSError):  # removed
        if group.stat().st_nlink <= 2:  # it has no subfolders; a walk takes four times as long
            return [str(group)]
    return [folder for folder, _, _ in os.walk(group, topdown=False)]


def members_of(group: Path) -> list[int]:
    found: list[int] = []
    for folder in folders_of(group):
        # The file is opened at each call, because v1 caches the list of an open file for a second.
        with suppress(OSError):  # removed, or threaded
            found += map(int, Path(folder, "cgroup.procs").read_text().split())
    return [pid for pid in found if pid]  # 0 stands for a process of another pid namespace


@dataclass(frozen=True, slots=True)
class Counters:
    usage_bytes: int | None = None
    peak_bytes: int | None = None
    kernel_peak_bytes: int | None = None  # only on v1
    refaults: int | None = None  # file pages that were read again after their eviction
    some_ns: int | None = None  # of PSI
    full_ns: int | None = None
    oom_kills: int | None = None
    # How often the group met its limits. v1's failcnt stays 0 if RAM and swap have the same limit.
    limit_events: dict[str, int] | None = None


class Cgroup:
    """The files of one memory cgroup; on v1, ``pressure_path`` (PSI) is in a folder of v2.

    The line "oom_kill" of "oom" counts kills in this group, that of "oom_below" also below it. A write
    resets the mark "peak": on v1 for all readers; on v2, since Linux 6.12, only for reads from the open
    file, which ``close`` closes.
    """

    def __init__(self, path: Path, pressure_path: Path | None = None) -> None:
        self.path, self.pressure_path = path, pressure_path
        self.version = 1 if (path / _FILES["usage"][0]).exists() else 2
        self._mark: int | None = None  # the opened "peak"; -1 after ``close``

    def file(self, name: str) -> Path:
        return self.path / (_FILES[name][self.version - 1] or f"no {name} on v{self.version}")

    def read(self, name: str) -> int | None:
        text = text_of(self.file(name))
        return int(text) if text.isdigit() else None

    def numbers(self, name: str) -> dict[str, int]:
        return parse_numbers(text_of(self.file(name)))

    def read_stat(self) -> dict[str, int]:
        return self.parse_stat(text_of(self.file("stat")))

    def parse_stat(self, text: str) -> dict[str, int]:
        """Return the numbers of memory.stat, of the group and those below it, by v2's names."""
        numbers = parse_numbers(text)
        if self.version == 1:
            totals = [name for name in numbers if name.startswith("total_")]
            below = {name.removeprefix("total_"): numbers[name] for name in totals}
            numbers |= below | {name: below.get(of_v1, 0) for name, of_v1 in _V1_STAT.items()}
        return numbers

    def raise_limit(self) -> None:
        """Remove the memory limits: a process that thrashes otherwise exits slowly after SIGKILL."""
        with suppress(OSError):  # a file is read-only; the killed process then exits more slowly
            first = self.file("swap") if self.version == 1 else self.path / "memory.high"
            for path in (first, self.file("limit")):  # v1 needs this order
                if path.exists():
                    path.write_text("-1" if self.version == 1 else "max")

    def read_peak(self) -> int | None:
        with suppress(OSError):  # there is none, or the group was removed
            return int(os.pread(self._opened(), 32, 0))
        return None

    def reset_peak(self) -> bool:
        with suppress(OSError):  # this kernel cannot, or it is mounted read-only as in a container
            return bool(os.pwrite(self._opened(), (b"0", b"reset\n")[self.version - 1], 0))
        return False

    def _opened(self) -> int:
        if self._mark is None:
            try:
                self._mark = os.open(self.file("peak"), os.O_RDWR)
            except OSError:  # not writable, or mounted read-only as in a container
                self._mark = os.open(self.file("peak"), os.O_RDONLY)
        return self._mark

    def counters(self) -> Counters:
        oom = self.numbers("oom")
        psi = text_of(self.pressure_path) if self.pressure_path else ""
        stalls_us = re.findall(r"^(some|full) .*total=(\d+)", psi, re.MULTILINE)
        stalls_ns = {kind: int(us) * 1000 for kind, us in stalls_us}
        return Counters(
            usage_bytes=self.read("usage"),
            peak_bytes=self.read_peak(),
            kernel_peak_bytes=self.read("kernel_peak"),
            refaults=self.numbers("stat").get("workingset_refault_file"),
            some_ns=stalls_ns.get("some"),
            full_ns=stalls_ns.get("full"),
            oom_kills=oom.get("oom_kill"),
            limit_events=oom or None if self.version == 2 else None,
        )

    def close(self) -> None:
        if self._mark is not None and self._mark >= 0:
            os.close(self._mark)
        self._mark = -1


def limits_around(folder: Path) -> list[tuple[int, Path]]:
    """Return (limit in bytes, cgroup) of ``folder`` and its visible parents, the smallest limit first."""
    limits = [(Cgroup(group).read("limit"), group) for group in (folder, *folder.parents)]
    return sorted((limit, group) for limit, group in limits if limit and limit < _UNLIMITED)


def room_in(folder: Path) -> int | None:
    """Return how much a cgroup can use under the limits around it, without the others' unreclaimable memory."""

    def unreclaimable(group: Path) -> int:
        stat = Cgroup(group).read_stat()
        return stat.get("anon", 0) + stat.get("shmem", 0)

    own, around = unreclaimable(folder), limits_around(folder)
    room = [max(limit - max(unreclaimable(group) - own, 0), 0) for limit, group in around]
    return min(room, default=None)


def read_machine_oom_kills() -> int | None:
    return parse_numbers(text_of(Path("/proc/vmstat"))).get("oom_kill")


def grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def parse_numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in text.splitlines())}


def text_of(path: Path) -> str:
    """Return the stripped text of a kernel's file; empty if the kernel lacks it, or the group was removed."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""
