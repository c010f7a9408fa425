"""Record a command's processes: when each process ran, its share of the memory, and its files."""

import heapq
import os
import re
import stat
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Final, Self

from weighin.phase_reporter import read_text
from weighin.probes.cgroup import is_exiting, parent_of
from weighin.probes.process import Shares, read_status
from weighin.result import OpenFile, Process
from weighin.text import one_line
from weighin.units import MIB

_SHARE: Final = 0.05  # of a processor's time in which to examine processes, as this disturbs them
_MOST_PROCESSES: Final = 200  # in a record: those with the most memory


class Pause:
    """Limits a repeated action to 5 % of one processor's time: ``with`` returns whether the action is due. What
    the block does before it is due (``ProcessTable.keep``, after a steep rise) does not count.
    """

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s
        self._start_s = self._due_s = 0.0
        self._counts = False

    def __enter__(self) -> bool:
        self._start_s = time.thread_time()
        self._counts = time.monotonic() >= self._due_s
        return self._counts

    def __exit__(self, *_: object) -> None:
        if self._counts:
            took_s = time.thread_time() - self._start_s  # without the time for which it waited
            self._due_s = time.monotonic() + max(self._least_s, took_s / _SHARE)


@dataclass(slots=True)
class _Seen(Process):
    """A process with its first parent, and what some of its fields are computed from."""

    readings: tuple[int, ...] = ()  # the last two of its anonymous memory, the newest first
    least_anon_bytes: int = 0  # since the fork, when the memory was its parent's
    parent_anon_bytes: int = 0

    def weight(self) -> tuple[int, int]:
        sizes = (self.anon_bytes, self.file_bytes, self.shmem_bytes)
        return sum(size or 0 for size in sizes), self.highest_rss_bytes or 0

    def read(self, running: Mapping[int, Self]) -> None:
        """Read the name, the first parent and the memory; ``running`` has all processes of the command."""
        with suppress(OSError, KeyError):  # the process has ended
            # A process that ends loses its command line, and a process whose parent ends gets another.
            self.command = command_of(self.pid) or self.command or command_of(self.pid, "comm")
            self.parent_pid = self.parent_pid or parent_of(self.pid) or 0
            parent, status = running.get(self.parent_pid), read_status(self.pid)
            now, self.highest_rss_bytes = status["RssAnon"], status["VmHWM"]
            since = (parent.readings if parent else ())[: 1 if self.readings else 2]
            known = (self.least_anon_bytes,) if self.readings else since
            self.least_anon_bytes = min((now, *known))
            self.parent_anon_bytes = max((self.parent_anon_bytes, *since))
            self.readings = (now, *self.readings[:1])

    def note_files(self) -> None:
        """Record what is open, and files of earlier calls as closed: their content may still be in memory."""
        with suppress(OSError):  # the process has ended, or is another user's
            found, now_ns = open_files(self.pid), time.monotonic_ns()
            if is_exiting(self.pid):  # it was killed, so that the kernel has closed its files
                return
            files, known = [], {file.path: file for file in self.files}
            for file in found:
                was = known.pop(file.path, None)
                files.append(replace(file, seen_ns=was.seen_ns if was else now_ns))
            read = (file for file in known.values() if file.position_bytes is not None)
            self.files = (*files, *(replace(file, is_open=False) for file in read))[:32]


class ProcessTable:
    def __init__(self) -> None:
        self._running: dict[int, _Seen] = {}
        self._ended: list[_Seen] = []
        self._reading = Pause()
        self._past: list[dict[int, int]] = [{}]  # the anonymous memory of each, at each rise
        self.most_anon_bytes = 0  # of a single process

    def look(self, pids: Collection[int], t_ns: int) -> None:
        for pid in self._running.keys() - pids:
            self._ended.append(self._running.pop(pid))
        for pid in pids:  # ``read`` finds its parent and command
            self._running.setdefault(pid, _Seen(pid, 0, "", t_ns, t_ns)).end_ns = t_ns
        running = self._running.values()
        # Within 0.2 s of its start, a forked child may call exec.
        new = [seen for seen in running if t_ns - seen.start_ns < 200_000_000]
        with self._reading as is_due:
            for seen in running if is_due else new:
                seen.read(self._running)
                self.most_anon_bytes = max((self.most_anon_bytes, *seen.readings))
            now = self._anon_now() if is_due else {}
            if sum(now.values()) >= 1.1 * sum(self._past[-1].values()) + MIB:
                self._past.append(now)
        if len(self._ended) > 2000:  # so many are kept while the command runs
            self._ended = heapq.nlargest(_MOST_PROCESSES, self._ended, key=_Seen.weight)

    def keep(self, shares: Mapping[int, Shares]) -> None:
        """Store each process's share of the memory, and list the files of the 8 largest processes."""
        for seen in (*self._ended, *self._running.values()):
            seen.anon_bytes = seen.file_bytes = seen.shmem_bytes = seen.grown_bytes = None
        found = [self._running[pid] for pid in shares if pid in self._running]
        for seen in found:
            seen.read(self._running)
            seen.anon_bytes, seen.file_bytes, seen.shmem_bytes, *_ = shares[seen.pid]
        for seen in heapq.nlargest(8, found, key=_Seen.weight):
            seen.note_files()
        now = self._anon_now()
        recent_bytes = 0.75 * sum(now.values())  # growth counts since all together had so much
        before = next((p for p in reversed(self._past) if sum(p.values()) <= recent_bytes), {})
        for seen in found:
            seen.grown_bytes = max(now.get(seen.pid, 0) - before.get(seen.pid, 0), 0)
            parent, private = self._running.get(seen.parent_pid), shares[seen.pid].private
            if parent and parent.readings and seen.readings:
                # What became private since the fork was copied, unless it is new or the parent gave it back.
                grown = seen.readings[0] - seen.least_anon_bytes
                given_back = max(seen.parent_anon_bytes - parent.readings[0], 0)
                seen.copied_bytes = max(private - grown - given_back, 0)
            elif not parent and seen.copied_bytes:  # the copies that were seen before remain
                seen.copied_bytes = min(seen.copied_bytes, private)
            else:
                seen.copied_bytes = None

    def _anon_now(self) -> dict[int, int]:
        return {pid: seen.readings[0] for pid, seen in self._running.items() if seen.readings}

    def processes(self) -> tuple[Process, ...]:
        known = (*self._ended, *self._running.values())
        largest = heapq.nlargest(_MOST_PROCESSES, known, key=_Seen.weight)
        largest.sort(key=lambda seen: seen.start_ns)
        names = [field.name for field in fields(Process)]
        return tuple(Process(**{name: getattr(seen, name) for name in names}) for seen in largest)


def open_files(pid: int) -> tuple[OpenFile, ...]:
    """Return up to 16 data files of at least 1 MiB that a process reads, the largest first; no programs and libraries."""
    mapped, sizes, positions = _mapped(pid), dict[str, int](), dict[str, int]()
    for path in mapped:
        with suppress(OSError):  # the file was deleted
            sizes[path] = _size(f"/proc/{pid}/root{path}")
    for link in islice(Path(f"/proc/{pid}/fd").iterdir(), 512):  # a server may have ten thousand
        with suppress(OSError):  # the file was closed
            if (size := _size(str(link))) < MIB:
                continue
            path = str(link.readlink()).removesuffix(" (deleted)")
            if re.search(r"\.so(\.[\d.]+)?$", path):  # the linker has it open to read its header
                continue
            position, flags, *_ = read_text(f"/proc/{pid}/fdinfo/{link.name}").split("\n")
            if int(flags.split()[1], 8) & os.O_ACCMODE != os.O_WRONLY:
                sizes[path] = size
                furthest = max(int(position.split()[1]), positions.get(path, 0))
                positions[path] = furthest  # it may be open twice
    return tuple(
        OpenFile(one_line(path), sizes[path], positions.get(path), mapped.get(path, 0))
        for path in heapq.nlargest(16, sizes, key=sizes.__getitem__)
        if sizes[path] >= MIB
    )


def _size(path: str) -> int:
    found = os.stat(path)  # noqa: PTH116 (quicker than Path.stat)
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _mapped(pid: int) -> dict[str, int]:
    mapped: dict[str, int] = {}
    programs: set[str] = set()
    for line in filter(None, read_text(f"/proc/{pid}/maps").split("\n")):
        addresses, mode, *_, path = line.split(maxsplit=5)  # the last is the inode without a path
        if path.startswith("/"):
            if "x" in mode or path.endswith(("/locale-archive", " (deleted)")):
                programs.add(path)
            start, _, end = addresses.partition("-")
            mapped[path] = mapped.get(path, 0) + int(end, 16) - int(start, 16)
    return {path: size for path, size in mapped.items() if path not in programs}


def command_of(pid: int, source: str = "cmdline") -> str:
    """Return a process's command line, empty for a zombie; or with "comm" the name of the program."""
    return one_line(read_text(f"/proc/{pid}/{source}").replace("\0", " "))
