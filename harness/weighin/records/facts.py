"""Find the kinds of memory at a command's peak, and the process and line of code that used most."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath
from typing import Final

from weighin.result import OpenFile, Outcome, Process, Ran, Result, Sample, Stack
from weighin.text import few, one_line
from weighin.units import GIB, MIB, format_bytes

_FRAME: Final = re.compile(r"(?P<function>.*) \((?P<path>.*):(?P<line>\d+)\)")
_INSTALLED: Final = re.compile(
    r"(?:.*/)?(?:site-packages|dist-packages|lib(?:64)?/python\d(?:\.\d+)?t?)/(?P<inside>.*)"
)
_INNER: Final = re.compile(
    r"(?:\.?<locals>)?\.?<(?:module|lambda|listcomp|genexpr|dictcomp|setcomp)>"
)
_GENERIC: Final = ("__init__.py", "__main__.py")
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
_EXIT_HOOK: Final = re.compile(r"_exitfunc|_exit_function|_python_exit|_?shutdown|__del__")
_CHECKPOINT: Final = re.compile(
    r".*\.(?:pt|pth|bin|ckpt|safetensors|gguf|pkl|npy|npz|h5|msgpack|distcp)"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a stack; ``line`` is the line number, counted from 1."""

    function: str
    path: str
    line: int

    @property
    def is_library(self) -> bool:
        return self.path.startswith("<frozen") or bool(_INSTALLED.fullmatch(self.path))

    @property
    def name(self) -> str:
        """The function with its class: "Server.answer"; empty in the body of a module."""
        return _INNER.sub("", self.function).replace(".<locals>", "")

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        """The file's name and line: "script.py:14"; for a library, with the package's folders."""
        inside = _INSTALLED.fullmatch(self.path)
        parts = (inside["inside"] if inside else self.path).split("/")
        kept = len(parts) if inside else 2 if parts[-1] in _GENERIC else 1
        return f"{'/'.join(parts[-kept:])}:{self.line}"


def read_all(texts: Iterable[str]) -> tuple[Frame, ...]:
    """Parse the frames of a stack, the innermost first; leave out texts of another form."""
    matches = (match for text in texts if (match := _FRAME.fullmatch(text)))
    return tuple(Frame(match["function"], match["path"], int(match["line"])) for match in matches)


def own(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame outside of libraries; None if all frames belong to libraries."""
    return next((frame for frame in frames if not frame.is_library), None)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the program that ran when ``stack`` was recorded: the frame with the number ``at``."""

    stack: Stack
    frames: tuple[Frame, ...]
    at: int

    @property
    def frame(self) -> Frame:
        return self.frames[self.at]

    @property
    def function(self) -> str:
        """The function that the line called; without one, the function that contains the line, or
        empty in the body of a module.
        """
        name = ""
        if self.at:
            called = self.frames[self.at - 1]
            name = "import" if is_import(called) else called.short_name
        # In Python 3.11, a comprehension has a frame of its own without a name, which is skipped.
        for frame in self.frames[self.at :]:
            if name or frame.path != self.frame.path or frame.function == "<module>":
                break
            name = frame.name
        return name

    @property
    def title(self) -> str:
        """The line as text: "`load_state_dict` (script.py:14)"."""
        is_innermost = self.frame == (own(self.frames) or self.frames[0])
        code = self.stack.code if is_innermost and len(self.stack.code) <= _SHORT_CODE else ""
        name = self.function or code
        return f"`{name}` ({self.frame.place})" if name else self.frame.place


def place_of(stack: Stack) -> Place | None:
    """Return a stack's innermost line outside of libraries, or without one, the innermost line."""
    frames = read_all(stack.frames)
    return Place(stack, frames, frames.index(own(frames) or frames[0])) if frames else None


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
    def at_peak(self) -> Sample:
        """The sample at the peak; without one, the sums over the processes that ran then."""
        if self.ran.at_peak:
            return self.ran.at_peak
        if self.samples and self.ran.peak_ns is not None:
            return self._sample_at(self.ran.peak_ns)
        anon, file, shmem = (
            sum(getattr(one, name) or 0 for one in self.present)
            for name in ("anon_bytes", "file_bytes", "shmem_bytes")
        )
        return Sample(0, 0, anon, file, shmem, 0, 0, 0)

    @property
    def locked_bytes(self) -> int:
        return self.at_peak.locked_bytes or 0

    @property
    def kernel_bytes(self) -> int:
        """The kernel memory that could not be reclaimed, with TCP sockets.

        The kernel's own mark (v1) or its log of a kill counts if it is higher than the sample, up
        to what no other kind of memory accounts for: such memory often grows between two samples.
        """
        marks = [self.result.peaks.kernel_bytes, *(kill.kernel_bytes for kill in self.ran.kills)]
        mark = max(each or 0 for each in marks) - (self.at_peak.kernel_reclaimable_bytes or 0)
        known = self.held_bytes + self.locked_bytes
        unseen = min(mark, (self.ran.needed_bytes or 0) - known)
        return max(self.at_peak.needed_bytes - known, unseen, 0)

    @property
    def held_bytes(self) -> int:
        return self.at_peak.anon_bytes + self.at_peak.shmem_bytes

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
        most = max(self.present, key=lambda one: one.grown_bytes or 0, default=None)
        return most if most and (most.grown_bytes or 0) >= MIB else None

    @cached_property
    def place(self) -> Place | None:
        """The line that ran last near the memory peak; None without a stack, or if all threads waited."""

        def weight(place: Place) -> tuple[int, bool, int]:
            process = self.process(place.stack.pid)
            grown, held = (process.grown_bytes or 0, held_by(process)) if process else (0, 0)
            return grown, own(place.frames) is not None, held

        least = _NEAR * self.needed_bytes
        near = [place for place in self.places if place.stack.usage_bytes >= least]
        last = None
        for t_ns in dict.fromkeys(place.stack.t_ns for place in reversed(near)):
            now = [place for place in near if place.stack.t_ns == t_ns]
            for place in sorted(now, key=weight, reverse=True):
                end = place.frames[
                    -1
                ]  # a library's hook runs after the end of the program's own code
                if is_waiting(place) or (end.is_library and _EXIT_HOOK.fullmatch(end.short_name)):
                    continue
                if own(place.frames) or place.frames[-1].function == "<module>":
                    return place
                # A library's own thread: a line of the user in another thread waits for it.
                for other in now:
                    if other.stack.pid == place.stack.pid and own(other.frames):
                        return other
                last = last or place
        return last

    @cached_property
    def places(self) -> list[Place]:
        """The lines of all stacks, sorted by the command's memory at the time of the stack."""
        found = [place for stack in self.ran.stacks if (place := place_of(stack))]
        return sorted(found, key=lambda place: (place.stack.usage_bytes, place.stack.t_ns))

    def process(self, pid: int) -> Process | None:
        """Return the last process that had the pid ``pid``."""
        return next((one for one in reversed(self.ran.processes) if one.pid == pid), None)

    def grown(self, pid: int, holds: Callable[[Place], bool]) -> int:
        """Return a lower bound of how much the command's memory grew while ``holds`` was true: the sum
        over each two successive stacks of the process ``pid`` for which it is true, in bytes.
        """
        places = [one for one in self.places if one.stack.pid == pid and not is_waiting(one)]
        places.sort(key=lambda one: one.stack.t_ns)
        return sum(
            max(after.stack.usage_bytes - before.stack.usage_bytes, 0)
            for before, after in pairwise(places)
            if holds(before) and holds(after)
        )

    def grown_since(self, files: Sequence[OpenFile]) -> int:
        """Return a lower bound of the growth of anonymous memory since the first of ``files`` was opened,
        in bytes: 0 without samples, or if no sample found the file open.
        """
        seen_ns = min(files, key=lambda file: file.seen_ns or 0).seen_ns
        if seen_ns is None or not self.samples:
            return 0
        return self.at_peak.anon_bytes - self._sample_at(seen_ns).anon_bytes

    def _sample_at(self, t_ns: int) -> Sample:
        return min(self.samples, key=lambda sample: abs(sample.t_ns - t_ns))

    def read_files(self, pid: int) -> list[OpenFile]:
        """Return a process's checkpoint files that it mapped to less than half, the largest first."""
        files = process.files if (process := self.process(pid)) else ()
        read = [file for file in files if file.mapped_bytes < file.size_bytes // 2]
        found = [file for file in read if _CHECKPOINT.fullmatch(file.path)]
        return sorted(found, key=lambda file: -file.size_bytes)

    @property
    def outer_limit(self) -> str:
        """The limit of another cgroup at which the kernel killed: "limit of 1 GiB of the cgroup /x around it"."""
        kill = next((kill for kill in self.ran.kills if kill.limit_of.startswith("/")), None)
        if kill is None:
            return ""
        of = f" of {size(kill.limit_bytes)}" if kill.limit_bytes else ""
        return f"limit{of} of the cgroup {kill.limit_of} {kill.limit_place}".strip()


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
    return (process.anon_bytes or 0) + (process.shmem_bytes or 0)


def title_of(process: Process) -> str:
    return f"{program(process.command)} (pid {process.pid})"


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
