"""Explain a command's end and memory use in at most three lines of text, from its record alone.

For each rule that finds a cause, tests/unit/test_causes.py has a record for which the rule holds and one
for which it does not.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePath
from shlex import quote
from typing import Final

from weighin.records.metrics import grouped
from weighin.records.run_folder import read_samples
from weighin.result import OpenFile, Outcome, Process, Ran, Result, Sample, Stack
from weighin.text import few, one_line
from weighin.units import GIB, MIB, format_bytes, format_exact

_LEAST_BYTES: Final = 48 * MIB
"""Most rules do not explain less memory than this: Python with a few libraries needs as much."""
_NEAR: Final = 0.75  # of the command's highest memory: a stack below it does not count
_MORE_THAN_ONE: Final = 1.15  # memory of this many times the bytes read is more than one copy
_WHOLE_SHARE: Final = 0.95  # of a file that was read to its end
_MOST_OF_FILE: Final = 1.1  # strings and buffers may take a tenth more than the file
_LEAST_SAMPLES, _LEAST_STACKS, _STEADY_NS = 12, 3, 300_000_000
_UNSEEN_SHARE, _UNSEEN_BYTES = 0.1, 8 * MIB  # of the need; a kind of memory was not seen
_NEAR_LIMIT = 0.98  # page cache fills memory up to a limit, so that a peak this near shows no need

_FRAME: Final = r"(?P<function>.*) \((?P<path>.*):(?P<line>\d+)\)"
_INSTALLED: Final = (
    r"(?:.*/)?(?:site-packages|dist-packages|lib(?:64)?/python\d(?:\.\d+)?t?)/(?P<inside>.*)"
)
_INNER: Final = r"(?:\.?<locals>)?\.?<(?:module|lambda|listcomp|genexpr|dictcomp|setcomp)>"
_WAITING: Final = (
    r"_?wait|waitpid|wait4|poll|select|join|acquire|sleep|_?recv|accept|(?:monitored_)?barrier"
)
_WAITING_FILE: Final = r"(?:.*/)?(?:threading|selectors|queue|socket|subprocess|multiprocessing/\w+|concurrent/futures/\w+)\.py"
_WAITING_CODE: Final = r"\b(?:os\.wait\w*|\w+\.(?:wait|join|sleep|communicate))\("
_EXIT_HOOK: Final = r"_exitfunc|_exit_function|_python_exit|_?shutdown|__del__"
_CHECKPOINT: Final = r".*\.(?:pt|pth|bin|ckpt|safetensors|gguf|pkl|npy|npz|h5|msgpack|distcp)"
_PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt")
_LOADS: Final = r"load_state_dict|_load_from_state_dict|load_checkpoint_in_model"
_READS: Final = ("torch/serialization.py", "safetensors/torch.py")
_BUILDS: Final = ("torch/nn/modules/", "torch/nn/init.py")
_KEEPERS: Final = ("torch/optim/", "torch/autograd/", "torch/nn/init.py", "numpy/lib/", *_READS)
_IN_PLACE: Final = r"[\w.\[\]]+\.\w+_\(.*\)"
_CONVERTS: Final = r"\.(?:(?:float|half|bfloat16|double)\(\)|astype\(|(?:to|type)\([^)]*(?:dtype|float|half|int\d))"
_WHOLE: Final = r"\.(?:read|readlines|readall)\(\s*\)|\.read_(?:bytes|text)\(|\bfromfile\("
_READERS: Final = r".*\b(?:torch/serialization|numpy/lib/\w+|(?P<parser>json/\w+|pandas/io/.+))\.py"


@dataclass(frozen=True, slots=True)
class Frame:
    function: str
    path: str
    line: int

    @property
    def is_library(self) -> bool:
        return self.path.startswith("<frozen") or bool(re.fullmatch(_INSTALLED, self.path))

    @property
    def is_import(self) -> bool:
        return self.path.startswith("<frozen importlib")

    @property
    def name(self) -> str:
        """The function with its class: "Server.answer"; empty in the body of a module."""
        return re.sub(_INNER, "", self.function).replace(".<locals>", "")

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        """The file's name and line: "script.py:14"; for a library, with the package's folders."""
        inside = re.fullmatch(_INSTALLED, self.path)
        parts = (inside["inside"] if inside else self.path).split("/")
        kept = len(parts) if inside else 2 if parts[-1] in ("__init__.py", "__main__.py") else 1
        return f"{'/'.join(parts[-kept:])}:{self.line}"


def read_all(texts: Iterable[str]) -> tuple[Frame, ...]:
    """Parse the frames of a stack, the innermost first; leave out texts of another form."""
    matches = (match for text in texts if (match := re.fullmatch(_FRAME, text)))
    return tuple(Frame(match["function"], match["path"], int(match["line"])) for match in matches)


def own(frames: Iterable[Frame]) -> Frame | None:
    return next((frame for frame in frames if not frame.is_library), None)


class Place:
    """A line of the program that ran when ``stack`` was recorded: the frame with the number ``at``; it
    called the ``inner`` frames. One that ``keeps`` only fills tensors, or a library keeps what it makes.
    """

    def __init__(self, stack: Stack, frames: tuple[Frame, ...], at: int) -> None:
        self.stack, self.frames, self.at, self.pid = stack, frames, at, stack.pid
        self.frame, self.inner, first = frames[at], frames[:at], frames[0]
        self.waits = bool(
            re.fullmatch(_WAITING, first.short_name)
            or (first.is_library and re.fullmatch(_WAITING_FILE, first.path))
            or (first == self.frame and re.search(_WAITING_CODE, stack.code))
        )
        called = any(re.fullmatch(_LOADS, frame.short_name) for frame in frames)
        self.copies = called or ".copy_(" in stack.code
        self.builds = self.runs(_BUILDS) and not self.copies
        self.keeps = bool(re.fullmatch(_IN_PLACE, stack.code)) or any(
            one.is_import or any(part in one.path for part in _KEEPERS) for one in self.inner
        )

    def runs(self, files: Iterable[str]) -> bool:
        return any(file in frame.path for frame in self.frames for file in files)

    @property
    def title(self) -> str:
        """The line, with the function that it called or is in: "`load_state_dict` (script.py:14)"."""
        name = ""
        if self.at:
            name = "import" if self.inner[-1].is_import else self.inner[-1].short_name
        # In Python 3.11, a comprehension has a frame of its own without a name, which is skipped.
        for frame in self.frames[self.at :]:
            if name or frame.path != self.frame.path or frame.function == "<module>":
                break
            name = frame.name
        is_innermost = self.frame == (own(self.frames) or self.frames[0])
        if not name and is_innermost and len(self.stack.code) <= 48:
            name = self.stack.code
        return f"`{name}` ({self.frame.place})" if name else self.frame.place


@dataclass(frozen=True, slots=True)
class Cause:
    """What caused the memory use, the certain remedy, if any, and the line that allocated the memory."""

    name: str
    words: str
    hint: str = ""
    place: Place | None = None


class Facts:
    """Facts from a command's record; all sizes are those at the command's highest memory use.

    ``place`` is the line that ran last near the peak: None without a stack, or if all threads waited. Its
    process mapped less than half of the checkpoint ``files``.
    """

    def __init__(self, result: Result, ran: Ran, samples: Sequence[Sample]) -> None:
        self.result, self.ran, self.samples = result, ran, samples
        self.killed = result.outcome is Outcome.OOM_KILLED
        self.present = [process for process in ran.processes if process.anon_bytes is not None]
        self.processes = {process.pid: process for process in ran.processes}
        self.holder = max(self.present, key=held_by, default=None)
        self.at_peak = ran.at_peak or self._sample_at(ran.peak_ns)
        self.held_bytes = self.at_peak.anon_bytes + self.at_peak.shmem_bytes
        self.needed_bytes = max(ran.needed_bytes or 0, self.held_bytes)
        found = [
            Place(stack, frames, frames.index(own(frames) or frames[0]))
            for stack in ran.stacks
            if (frames := read_all(stack.frames))
        ]
        self.places = sorted(found, key=lambda one: (one.stack.usage_bytes, one.stack.t_ns))
        self.place = self._last_place()
        process = self.processes.get(self.place.pid) if self.place else None
        self.files = [
            file
            for file in sorted(process.files if process else (), key=lambda one: -one.size_bytes)
            if file.mapped_bytes < file.size_bytes // 2 and re.fullmatch(_CHECKPOINT, file.path)
        ]

    @cached_property
    def cause(self) -> Cause | None:
        """What the first rule that holds finds; its place is ``place`` if the rule names none."""
        # The most specific rule comes first.
        rules = (_copies, _whole_file, _import, _copy_on_write, _held, _growth, _page_cache)
        cause = next((found for rule in rules if (found := rule(self))), None)
        return cause and replace(cause, place=cause.place or self.place)

    def _last_place(self) -> Place | None:
        def weight(place: Place) -> tuple[int, bool, int]:
            process = self.processes.get(place.pid)
            grown, held = (process.grown_bytes or 0, held_by(process)) if process else (0, 0)
            return grown, not place.frame.is_library, held

        least, last = _NEAR * self.needed_bytes, None
        near = [place for place in self.places if place.stack.usage_bytes >= least]
        for latest in grouped(near[::-1], lambda one: one.stack.t_ns).values():
            now = latest[::-1]
            for place in sorted(now, key=weight, reverse=True):
                end = place.frames[-1]
                # A library's hook runs after the end of the program's own code.
                if place.waits or (end.is_library and re.fullmatch(_EXIT_HOOK, end.short_name)):
                    continue
                if own(place.frames) or end.function == "<module>":
                    return place
                # A library's own thread: a line of the user in another thread waits for it.
                users = (one for one in now if one.pid == place.pid and own(one.frames))
                if waiting := next(users, None):
                    return waiting
                last = last or place
        return last

    def grown(self, pid: int, holds: Callable[[Place], bool]) -> int:
        """Return by how much memory grew at least between successive stacks of a process that ``holds``."""
        places = [one for one in self.places if one.pid == pid and not one.waits]
        places.sort(key=lambda one: one.stack.t_ns)
        return sum(
            max(after.stack.usage_bytes - before.stack.usage_bytes, 0)
            for before, after in pairwise(places)
            if holds(before) and holds(after)
        )

    def grown_since(self, files: Sequence[OpenFile]) -> int:
        """Return by how much anonymous memory grew at least since the first of ``files`` was opened."""
        seen_ns = min(files, key=lambda file: file.seen_ns or 0).seen_ns
        if seen_ns is None or not self.samples:
            return 0
        return self.at_peak.anon_bytes - self._sample_at(seen_ns).anon_bytes

    def _sample_at(self, t_ns: int | None) -> Sample:
        if self.samples and t_ns is not None:
            return min(self.samples, key=lambda sample: abs(sample.t_ns - t_ns))
        anon, file, shmem = (
            sum(getattr(one, name) or 0 for one in self.present)
            for name in ("anon_bytes", "file_bytes", "shmem_bytes")
        )
        return Sample(0, 0, anon, file, shmem, 0, 0, 0)


def held_by(process: Process) -> int:
    return (process.anon_bytes or 0) + (process.shmem_bytes or 0)


def size(number: int) -> str:
    """Return a size for a sentence: "757 MiB", "2.41 GiB"."""
    return format_bytes(number, digits=2 if number >= GIB else 0 if number >= 10 * MIB else 1)


def _names(files: Sequence[OpenFile]) -> str:
    return few([PurePath(file.path).name for file in files], 2)


def _title_of(process: Process) -> str:
    return f"{_program(process.command)} (pid {process.pid})"


def _program(command: str) -> str:
    """Shorten a command line for a sentence: remove folders from absolute paths, and cut the end."""
    words = (PurePath(word).name if word.startswith("/") else word for word in command.split())
    return one_line(" ".join(words), 72)


def answer(run: Path, result: Result) -> list[str]:
    """Return the explanation of a command's result in a run's folder; empty without a command."""
    return explain(result, read_samples(run, result.samples_path)) if result.cell.command else []


def explain(result: Result, samples: Sequence[Sample] = ()) -> list[str]:
    """Return up to three lines: the end; the memory use and the line that took most; a proven cause."""
    lines = [_ending(result)]
    if result.ran:
        facts = Facts(result, result.ran, samples)
        lines.append(" ".join(filter(None, (_need(facts), _where(facts), _cache(facts)))))
        if cause := facts.cause:
            lines.append(f"{cause.words} {cause.hint}".strip())
    return [line for line in lines if line]


def _ending(result: Result) -> str:
    limit = result.cell.ram_limit_bytes
    text = result.message[:1].upper() + result.message[1:] or f"Ended: {result.outcome}"
    if result.outcome is Outcome.OK:
        text = "The command ended well" + (f" under its limit of {size(limit)}" if limit else "")
    if result.ran and result.ran.ended:
        counts = Counter(map(_program, result.ran.ended)).most_common()
        texts = [f"{command} ({count})" if count > 1 else command for command, count in counts]
        text += f". weighin stopped processes that still ran at the end: {few(texts)}"
    return f"{text}."


def _need(facts: Facts) -> str:
    needed, peaks = facts.ran.needed_bytes, facts.result.peaks
    limit = facts.result.cell.ram_limit_bytes
    if needed is None:
        return ""
    amount = f"{size(needed)} of {_kinds(facts, needed)}"
    if facts.killed:
        return f"The command had {amount}, not counting page cache, and tried to allocate more."
    text = f"The command needs {'at least ' * facts.ran.needed_is_sampled}{amount}"
    if (peak := peaks.cgroup_bytes) is None:
        return f"{text}, as sampled."
    freed, cached = facts.at_peak.freed_bytes or 0, peaks.file_sampled_bytes
    what = "with page cache"
    if freed >= MIB:
        what = f"with {size(freed)} that it gave back (MADV_FREE)"
    elif peak - needed < MIB or (cached is not None and cached < MIB):
        what = "of its cgroup"
    elif limit and peak >= _NEAR_LIMIT * limit:
        return f"{text}: page cache filled memory up to the limit of {size(peak)}."
    return f"{text}; the peak {what} is {size(peak)}."


def _kinds(facts: Facts, needed: int) -> str:
    at_peak, kills, locked = facts.at_peak, facts.ran.kills, facts.at_peak.locked_bytes or 0
    killed_with = max((kill.anon_bytes or 0 for kill in kills), default=0)
    # The kernel's own mark (v1) or its log of a kill count, if they are higher than the sample, up to
    # what no other kind of memory accounts for.
    marks = [facts.result.peaks.kernel_bytes, *(kill.kernel_bytes for kill in kills)]
    mark = max(each or 0 for each in marks) - (at_peak.kernel_reclaimable_bytes or 0)
    known = facts.held_bytes + locked
    sizes = {
        "anonymous": min(max(at_peak.anon_bytes, killed_with), needed),
        "shared": at_peak.shmem_bytes,
        "locked": locked,
        "kernel": max(at_peak.needed_bytes - known, min(mark, needed - known), 0),
    }
    named = {name: number for name, number in sizes.items() if number >= max(MIB, needed // 100)}
    if not named:
        return "memory"
    if sum(sizes.values()) < needed - max(_UNSEEN_SHARE * needed, _UNSEEN_BYTES):
        each = "; ".join(f"{size(number)} {name}" for name, number in named.items())
        return f"memory that the kernel cannot reclaim (samples saw {each})"
    *others, last = named
    if not others:
        return f"{last} memory"
    return f"{', '.join(others)} and {last} memory ({' and '.join(map(size, named.values()))})"


def _where(facts: Facts) -> str:
    place = facts.cause.place if facts.cause else facts.place
    holder, by, of = facts.holder, "", ""
    if facts.needed_bytes < _LEAST_BYTES and not facts.killed:
        place = None
    if holder and len(facts.present) > 1 and held_by(holder) > facts.held_bytes // 2:
        who = "the first process" if holder.pid == facts.ran.pid else _title_of(holder)
        by = f" in {who}"
        if place and place.pid != holder.pid:
            runner = facts.processes.get(place.pid)
            by = f" in {_title_of(runner)}" if runner else ""
            of = f"; {who} had {size(held_by(holder))} of it"
    marks = [mark.text for mark in facts.ran.marks if mark.t_ns <= (facts.ran.peak_ns or 0)]
    text = "Most of this memory was"
    if place:
        return f"{text} in use when {place.title} ran{by}{of}."
    if marks:
        return f"{text} in use after the command printed {marks[-1]!r}{by}."
    return f"{text}{by}." if by else ""


def _cache(facts: Facts) -> str:
    most, cold = facts.result.peaks.file_sampled_bytes, facts.ran.cold
    if facts.result.peaks.cgroup_bytes is None or most is None:
        return ""
    most -= facts.at_peak.locked_bytes or 0  # which can be reclaimed at the program's end
    found = {file.path: file for process in facts.present for file in process.files}
    files = sorted(found.values(), key=lambda file: -file.size_bytes)
    amount, start = "none", f"{', '.join(cold[:2])} cold at the start"
    if most >= MIB:
        amount = f"at most {size(most)}" + (f" of {_names(files)}" if files else "")
    elif not (files or cold):
        return ""
    if not cold:
        start = "pages that other programs had read before are not charged (--cold PATH drops such pages)"
    return f"Page cache: {amount}; {start}."


def _copies(facts: Facts) -> Cause | None:
    """The weights were read into memory (not mapped), and the model has a copy of them, too; or other
    tensors were made of them.
    """
    place, files, at = facts.place, facts.files, "" if facts.killed else " at the peak"
    if place is None or not files:
        return None
    grown, read_bytes = facts.grown_since(files), sum(file.size_bytes for file in files)
    read = f"{size(read_bytes)} read from {_names(files)}"

    def since(places: Iterable[Place]) -> int:
        usages = (one.stack.usage_bytes for one in places if one.pid == place.pid)
        return facts.held_bytes - min(usages, default=facts.held_bytes)

    begun = read_bytes // 16  # so much of a copy shows that there is one
    # Of several files, one may have been read after another was freed.
    second = files[0].size_bytes if len(files) > 1 else int((_MORE_THAN_ONE - 1) * read_bytes)
    is_read = len(files) == 1 and grown > _WHOLE_SHARE * read_bytes
    copied_bytes = since(one for one in facts.places if one.copies)
    built_bytes = since(one for one in facts.places if one.builds)
    copied = place.copies and (grown > read_bytes + second or (is_read and copied_bytes > begun))
    is_beside = built_bytes - grown > read_bytes // 2 and grown > begun
    is_beside = is_beside and (place.runs(_READS) or place.copies)
    if facts.at_peak.anon_bytes >= _LEAST_BYTES and (copied or is_beside):
        what = f"Two copies of the weights were in memory{at}: {read}, and the model's own."
        if not copied and grown < _WHOLE_SHARE * read_bytes:
            what = f"A second copy of the weights was being read{at}, beside the model's own: {size(read_bytes)} of {_names(files)}."
        return Cause("two copies", what, _try(facts, files))
    code = re.search(_CONVERTS, place.stack.code)
    if code is None or grown < max(_LEAST_BYTES, _MORE_THAN_ONE * read_bytes):
        return None
    call = f"{code[0]})" if code[0].count("(") > code[0].count(")") else code[0]
    return Cause(
        "dtype conversion",
        f"`{call}` made new tensors in addition to the {read}: memory grew by {size(grown)}.",
        "Convert one tensor after the other and free the original, or use a strategy that does so:"
        f" {_recommend(facts, files)}",
    )


def _whole_file(facts: Facts) -> Cause | None:
    """While a process's position in a file is before its end, the process still reads it, so that its
    last stack counts even if memory grew much afterwards.
    """
    last = facts.place or next(iter(facts.places[-1:]), None)
    process = facts.processes.get(last.pid) if last else None
    if last is None or process is None:
        return None
    calls = [call for one in last.inner if (call := re.fullmatch(_READERS, one.path))]
    for file in process.files if calls or re.search(_WHOLE, last.stack.code) else ():
        if file.mapped_bytes or file.position_bytes is None:
            continue
        if facts.place is None and not (file.is_open and file.position_bytes < file.size_bytes):
            continue
        grown, most = facts.grown_since([file]), _MOST_OF_FILE * file.size_bytes
        is_its = file.is_open or max(file.position_bytes, grown) > _WHOLE_SHARE * file.size_bytes
        parses = any(call["parser"] for call in calls)
        if is_its and grown > _LEAST_BYTES and (parses or grown < most):
            what = f"The program read a whole file into memory: {_names([file])} has {size(file.size_bytes)}"
            more = f", and memory grew by {size(grown)}" if grown > most else ""
            parts = "Read the file in parts, or map the file (mmap)."
            hint = _try(facts, [file]) if last.runs(_READS) else parts
            return Cause("a whole file", f"{what}{more}.", hint, last)
    return None


def _import(facts: Facts) -> Cause | None:
    place = facts.place
    frames = place.frames if place else ()
    at = next((index for index, frame in enumerate(frames) if frame.is_import), 0)
    if place is None or at == 0:
        return None
    outside = [frame for frame in frames[at:] if not frame.is_library]

    def by_it(one: Place) -> bool:
        return any(frame.is_import for frame in one.frames) and {*outside} <= {*one.frames}

    if facts.grown(place.pid, by_it) < max(_LEAST_BYTES, facts.held_bytes // 4):
        return None
    module = frames[at - 1].place.rpartition(":")[0]
    by = f" by {outside[0].place}" if outside else ""
    return Cause("import", f"Most of the memory was allocated while {module} was imported{by}.")


def _copy_on_write(facts: Facts) -> Cause | None:
    for parent in facts.ran.processes:
        children = [
            one
            for one in facts.present
            if one.parent_pid == parent.pid and one.command == parent.command and one.copied_bytes
        ]
        copied = sum(one.copied_bytes or 0 for one in children)
        together = held_by(parent) + sum(map(held_by, children))
        if together > _LEAST_BYTES and copied > together // 4:
            count = f"{len(children)} forked processes" if len(children) > 1 else "a forked process"
            return Cause(
                "copy-on-write",
                f"Copy-on-write: {count} wrote to pages shared with the parent process:"
                f" {size(copied)} of the {size(together)} that all have together are copies.",
                "In Python, reading an object writes the object's reference count: keep shared data"
                " in arrays, or start fewer processes.",
            )
    return None


def _held(facts: Facts) -> Cause | None:
    """What the kinds of memory, the kernel's log or the processes show, without a stack."""
    held, shared = facts.held_bytes, facts.at_peak.shmem_bytes
    holder, first = facts.holder, facts.ran.pid
    if held >= _LEAST_BYTES and shared >= held // 2:
        words = f"{size(shared)} of the memory is shared memory: files in /dev/shm or another tmpfs, or shared mappings."
        return Cause(
            "shared memory", words, "A file in a tmpfs takes memory until the file is removed."
        )
    if any(kill.limit_of.startswith("/") for kill in facts.ran.kills):
        words = "The command did not reach its own limit, but that of another cgroup."
        return Cause("a limit around", words, "Raise the limit of that cgroup.")
    # Without the first process, the children are what a killed parent left.
    is_child = holder and holder.pid != first and first in [one.pid for one in facts.present]
    if (
        holder
        and is_child
        and held >= _LEAST_BYTES
        and held_by(holder) >= 0.7 * sum(map(held_by, facts.present))
    ):
        child = f"{_title_of(holder)} has {size(held_by(holder))}"
        return Cause("a child", f"A child process of the command has most of the memory: {child}.")
    return None


def _growth(facts: Facts) -> Cause | None:
    place = facts.place
    if place is None or place.keeps:
        return None
    process = facts.processes.get(place.pid)
    parent = facts.processes.get(process.parent_pid) if process else None
    if process and parent and parent.command == process.command:
        copied_bytes = process.copied_bytes  # None: a forked process may have copied much
        if copied_bytes is None or copied_bytes > held_by(process) // 4:
            return None
    usual, how = _usual_place(facts, place), "steadily "
    if not (rise := _steady_rise(facts, usual)):
        how = ""
        rise = [
            (one.stack.t_ns, one.stack.usage_bytes)
            for one in facts.places
            if one.pid == place.pid and one.frame.place == place.frame.place
        ]
        if len({*rise}) < _LEAST_STACKS or rise[-1][1] - rise[0][1] < _LEAST_BYTES:
            return None
    (start_ns, low), (end_ns, high) = rise[0], rise[-1]
    seconds = f"{(end_ns - start_ns) / 1e9:.1f} s"
    words = f"Anonymous memory grew {how}from {size(low)} to {size(high)} in {seconds}."
    return Cause("growth", words, "Look for objects that this line of code keeps.", usual)


def _steady_rise(facts: Facts, usual: Place) -> list[tuple[int, int]]:
    """Return time and anonymous memory of the samples from a fifth of its maximum up to the maximum,
    if memory grew by a similar amount in each quarter of this time, at one line; else nothing.
    """
    samples = [(one.t_ns, one.anon_bytes) for one in facts.samples]
    most = max(range(len(samples)), key=lambda index: samples[index][1], default=-1)
    start = next((i for i in range(most + 1) if samples[i][1] >= samples[most][1] // 5), 0)
    rising = samples[start : most + 1]
    if len(rising) < _LEAST_SAMPLES or usual.keeps:
        return []
    (start_ns, low), (end_ns, high) = rising[0], rising[-1]
    span_ns, grown = end_ns - start_ns, high - low
    ends = [start_ns + span_ns * quarter // 4 for quarter in range(5)]
    levels = [min(rising, key=lambda one: abs(one[0] - end))[1] for end in ends]
    if not all(1 / 3 < (b - a) / (grown / 4) < 2 for a, b in pairwise(levels)):
        return []
    mine = [one.stack.usage_bytes for one in facts.places if one.pid == usual.pid]
    line = usual.frame.place
    stays = facts.grown(usual.pid, lambda one: line in {frame.place for frame in one.frames})
    is_long = span_ns >= _STEADY_NS and grown >= _LEAST_BYTES and len(mine) >= _LEAST_STACKS
    return rising if is_long and stays >= (max(mine) - min(mine)) / 2 else []


def _usual_place(facts: Facts, last: Place) -> Place:
    """Return the innermost line that is in two thirds of a process's stacks, and in nine tenths of those
    of its caller: where memory grows at several lines of a function, the caller's line is meant.
    """
    places = [
        (one, [None if frame.is_library else (frame.path, frame.line) for frame in one.frames])
        for one in facts.places
        if one.pid == last.pid and not one.waits
    ]
    counts = Counter(line for _, lines in places for line in {*lines})
    found = []
    for one, lines in places:
        for at, line in enumerate(lines):
            caller = next(filter(None, lines[at + 1 :]), line)
            if line and counts[line] >= max(2 / 3 * len(places), 0.9 * counts[caller]):
                found.append((len(one.frames) - at, Place(one.stack, one.frames, at)))
    return max(found, key=lambda each: each[0], default=(0, last))[1]


def _page_cache(facts: Facts) -> Cause | None:
    peak, cached = facts.result.peaks.cgroup_bytes or 0, facts.at_peak.page_cache_bytes
    is_measured = facts.result.outcome is Outcome.OK and facts.ran.needed_bytes is not None
    if not is_measured or peak < _LEAST_BYTES or cached < peak // 2:
        return None
    words = f"{size(cached)} of the peak of {size(peak)} is page cache, which the kernel reclaims under a lower limit."
    return Cause("page cache only", words, "Find the smallest limit with weighin floor.")


def _recommend(facts: Facts, files: Sequence[OpenFile]) -> str:
    limit, path = facts.result.cell.ram_limit_bytes, PurePath(files[0].path)
    ram = f" --ram {format_exact(limit)}" if limit else ""
    return f"weighin recommend {quote(str(path if len(files) == 1 else path.parent))}{ram}"


def _try(facts: Facts, files: Sequence[OpenFile]) -> str:
    maps = "torch.load(..., mmap=True): " if files[0].path.endswith(_PICKLES) else ""
    return f"Try {maps}{_recommend(facts, files)}"
