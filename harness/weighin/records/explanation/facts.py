"""Find the kinds of memory at a command's peak, and the process and line of code that used most."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath
from typing import Final

from weighin.records.explanation.frames import Frame, own, read_all
from weighin.result import OpenFile, Outcome, Process, Ran, Result, Sample, Stack
from weighin.text import few, one_line
from weighin.units import GIB, MIB, format_bytes

_NEAR: Final = 0.75
"""A stack counts only if the command then used at least this share of its highest memory."""
_SHORT_CODE: Final = 48
_COMMAND_LENGTH: Final = 72
_WAITING: Final = re.compile(
    r"_?wait|waitpid|wait4|poll|select|join|acquire|sleep|_?recv|accept|(?:monitored_)?barrier"
)
_WAITING_FILE: Final = re.compile(
    r"(?:.*/)?(?:threading|selectors|queue|socket|subprocess|multiprocessing/\w+|concurrent/futures/\w+)\.py"
)
_WAITING_CODE: Final = re.compile(r"\b(?:os\.wait\w*|\w+\.(?:wait|join|sleep|communicate))\(")
_CHECKPOINT: Final = re.compile(
    r".*\.(?:pt|pth|bin|ckpt|safetensors|gguf|pkl|npy|npz|h5|msgpack|distcp)"
)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the program that ran when ``stack`` was recorded.

    ``function`` is the function that the line called. If the line called none, ``function`` is the
    function that contains the line, or empty in the body of a module.
    """

    stack: Stack
    frames: tuple[Frame, ...]
    frame: Frame
    function: str = ""

    @property
    def title(self) -> str:
        """The line as text: "`load_state_dict` (script.py:14)"."""
        is_innermost = self.frame == (own(self.frames) or self.frames[0])
        code = self.stack.code if is_innermost and len(self.stack.code) <= _SHORT_CODE else ""
        name = self.function or code
        return f"`{name}` ({self.frame.place})" if name else self.frame.place


@dataclass(frozen=True)
class Facts:
    """Facts from a command's record; all sizes are those at the command's highest memory use."""

    result: Result
    ran: Ran
    samples: Sequence[Sample] = ()

    @property
    def killed(self) -> bool:
        return self.result.outcome is Outcome.OOM_KILLED

    @cached_property
    def split(self) -> tuple[int, int, int] | None:
        """Anonymous memory, shared memory and page cache at the peak, in bytes; None if unknown."""
        if at := self.at_peak:
            return at.anon_bytes, at.shmem_bytes, at.page_cache_bytes
        if self.present:
            parts = [
                (p.anon_bytes or 0, p.shmem_bytes or 0, p.file_bytes or 0) for p in self.present
            ]
            anon, shmem, file = (sum(part) for part in zip(*parts, strict=True))
            return anon, shmem, file
        return None

    @cached_property
    def at_peak(self) -> Sample | None:
        """The sample at the peak; None without samples."""
        peak_ns = self.ran.peak_ns
        if self.ran.at_peak or not self.samples or peak_ns is None:
            return self.ran.at_peak
        return min(self.samples, key=lambda sample: abs(sample.t_ns - peak_ns))

    @property
    def locked_bytes(self) -> int:
        """The file pages that were locked, so that the kernel could not reclaim them."""
        return (self.at_peak.locked_bytes if self.at_peak else None) or 0

    @property
    def kernel_bytes(self) -> int:
        """The kernel memory that could not be reclaimed, with TCP sockets.

        The kernel's own mark (v1) or its log of a kill counts if it is higher than the sample, up
        to what no other kind of memory accounts for: such memory often grows between two samples.
        """
        at, logged = self.at_peak, [kill.kernel_bytes or 0 for kill in self.ran.kills]
        mark = max(self.result.peaks.kernel_bytes or 0, *logged, 0)
        caches = (at.kernel_reclaimable_bytes if at else None) or 0
        known = self.held_bytes + self.locked_bytes
        unseen = min(mark - caches, (self.ran.needed_bytes or 0) - known)
        return max(at.needed_bytes - known if at else 0, unseen, 0)

    @property
    def anon_bytes(self) -> int:
        return self.split[0] if self.split else 0

    @property
    def anon_of_killed(self) -> int:
        """The anonymous memory of the killed process with most of it, from the kernel's log."""
        return max((kill.anon_bytes or 0 for kill in self.ran.kills), default=0)

    @property
    def shmem_bytes(self) -> int:
        return self.split[1] if self.split else 0

    @property
    def held_bytes(self) -> int:
        """The sum of the anonymous and shared memory."""
        return self.anon_bytes + self.shmem_bytes

    @property
    def needed_bytes(self) -> int:
        return max(self.ran.needed_bytes or 0, self.held_bytes)

    @property
    def present(self) -> list[Process]:
        """The processes that ran when the command used most memory."""
        return [process for process in self.ran.processes if process.anon_bytes is not None]

    @cached_property
    def holder(self) -> Process | None:
        """The process with the most memory at the peak; None if no process's memory was read."""
        return max(self.present, key=held_by, default=None)

    @cached_property
    def grower(self) -> Process | None:
        """The process whose memory grew most before the peak; None if none grew by 1 MiB."""
        grown = (process for process in self.present if grown_by(process) >= MIB)
        return max(grown, key=grown_by, default=None)

    @cached_property
    def place(self) -> Place | None:
        """The line that ran last near the memory peak; None without a stack, or if all threads waited."""
        least = _NEAR * self.needed_bytes
        near = [place for place in self.places if place.stack.usage_bytes >= least]
        last = None
        for t_ns in dict.fromkeys(place.stack.t_ns for place in reversed(near)):
            now = [place for place in near if place.stack.t_ns == t_ns]
            for place in sorted(now, key=self._weight, reverse=True):
                if not is_waiting(place):
                    if found := _walk_up(place, now):
                        return found
                    last = last or place
        return last

    @cached_property
    def places(self) -> list[Place]:
        """The lines of all stacks, sorted by the command's memory at the time of the stack."""
        found = [place for stack in self.ran.stacks if (place := place_of(stack))]
        return sorted(found, key=lambda place: (place.stack.usage_bytes, place.stack.t_ns))

    def _weight(self, place: Place) -> tuple[int, bool, int]:
        process = self.process(place.stack.pid)
        grown, held = (grown_by(process), held_by(process)) if process else (0, 0)
        return grown, own(place.frames) is not None, held

    def process(self, pid: int) -> Process | None:
        """Return the last process that had the pid ``pid``."""
        return next((one for one in reversed(self.ran.processes) if one.pid == pid), None)

    def grown(self, pid: int, holds: Callable[[Place], bool]) -> int:
        """Return how much the command's memory grew, in bytes, while ``holds`` was true.

        The result is the sum of the growth between each two successive stacks of the process
        ``pid``, if ``holds`` is true for both stacks. It is a lower bound, because it leaves out
        the growth just before and just after these stacks.
        """
        places = sorted(
            (one for one in self.places if one.stack.pid == pid and not is_waiting(one)),
            key=lambda one: one.stack.t_ns,
        )
        steps = [
            after.stack.usage_bytes - before.stack.usage_bytes
            for before, after in pairwise(places)
            if holds(before) and holds(after)
        ]
        return sum(step for step in steps if step > 0)

    def grown_since(self, file: OpenFile) -> int:
        """Return the growth of anonymous memory from the first sight of ``file`` to the peak.

        The result, in bytes, is a lower bound of the growth since the file was opened. It is 0 if
        there are no samples, or if no sample found the file open.
        """
        if file.seen_ns is None or not self.samples:
            return 0
        seen_ns = file.seen_ns
        before = min(self.samples, key=lambda sample: abs(sample.t_ns - seen_ns))
        return self.anon_bytes - before.anon_bytes

    def read_files(self, pid: int) -> list[OpenFile]:
        """Return the checkpoint files that a process opened and mapped to less than half.

        The largest file comes first.
        """
        process = self.process(pid)
        files = process.files if process else ()
        found = [
            file
            for file in files
            if _CHECKPOINT.fullmatch(file.path) and file.mapped_bytes < file.size_bytes // 2
        ]
        return sorted(found, key=lambda file: -file.size_bytes)


def place_of(stack: Stack) -> Place | None:
    """Return a stack's innermost line outside of libraries, or without one, the innermost line."""
    frames = read_all(stack.frames)
    frame = own(frames) or next(iter(frames), None)
    return place_at(stack, frames, frames.index(frame)) if frame else None


def place_at(stack: Stack, frames: tuple[Frame, ...], at: int) -> Place:
    called = frames[at - 1] if at else None
    name = "" if called is None else "import" if is_import(called) else called.short_name
    return Place(stack, frames, frames[at], name or _function(frames[at:]))


def _function(frames: Sequence[Frame]) -> str:
    """Return the first frame's function, or "" in a module's body.

    In Python 3.11, a comprehension has a frame of its own, which is skipped.
    """
    for frame in frames:
        if frame.path != frames[0].path or frame.function == "<module>":
            return ""
        if frame.name:
            return frame.name
    return ""


def _walk_up(place: Place, now: Sequence[Place]) -> Place | None:
    """Return the user's line: for a library's own thread, a line of another thread, which waits for it."""
    if own(place.frames) or place.frames[-1].function == "<module>":
        return place
    same = (one for one in now if one.stack.pid == place.stack.pid and own(one.frames))
    return next(same, None)


def is_import(frame: Frame) -> bool:
    return frame.path.startswith("<frozen importlib")


def is_waiting(place: Place) -> bool:
    """Return whether the thread of a stack only waits for a child process or for another thread."""
    return bool(
        _WAITING.fullmatch(place.frames[0].short_name)
        or (place.frames[0].is_library and _WAITING_FILE.fullmatch(place.frames[0].path))
        or (place.frames[0] == place.frame and _WAITING_CODE.search(place.stack.code))
    )


def held_by(process: Process) -> int:
    """Return the anonymous and shared memory of a process at the peak, in bytes."""
    return (process.anon_bytes or 0) + (process.shmem_bytes or 0)


def title_of(process: Process) -> str:
    return f"{program(process.command)} (pid {process.pid})"


def grown_by(process: Process) -> int:
    return process.grown_bytes or 0


def names(files: Sequence[OpenFile]) -> str:
    """Return the names of the first two files: "a.pt, b.pt and 3 more"."""
    return few([PurePath(file.path).name for file in files], 2)


def program(command: str) -> str:
    """Shorten a command line for a sentence: remove folders from absolute paths, and cut the end."""
    words = (PurePath(word).name if word.startswith("/") else word for word in command.split())
    return one_line(" ".join(words), _COMMAND_LENGTH)


def size(number: int) -> str:
    """Return a size for a sentence: "757 MiB", "2.41 GiB"."""
    return format_bytes(number, digits=2 if number >= GIB else 0 if number >= 10 * MIB else 1)
