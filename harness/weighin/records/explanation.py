"""Explain a command's end and memory use in at most three lines of text, from its record alone.

For each rule that finds a cause, tests/unit/test_causes.py has a record for which the rule holds and one
for which it does not.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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

_FRAME: Final = r"(.*) \((.*):(\d+)\)"
_INSTALLED: Final = (
    r"(?:.*/)?(?:site-packages|dist-packages|lib(?:64)?/python\d(?:\.\d+)?t?)/(?P<inside>.*)"
)
# These match a frame's ``call``, "function path/file.py".
_WAITS: Final = (
    r"(?:_?wait|waitpid|wait4|poll|select|join|acquire|sleep|_?recv|accept|(?:monitored_)?barrier) |"
    r".*/python\d[^/]*/(?:threading|selectors|queue|socket|subprocess|multiprocessing/\w+|concurrent/futures/\w+)\.py$"
)
_EXITS: Final = r"(?:_exitfunc|_exit_function|_?shutdown|__del__) "
_LOADS: Final = r"(?:load_state_dict|_load_from_state_dict|load_checkpoint_in_model) "
_READS: Final = r".*(?:torch/serialization|safetensors/torch|numpy/lib/\w+)\.py"
_PARSES: Final = r".*\b(?:json/\w+|pandas/io/.+)\.py"
_BUILDS: Final = r".*torch/nn/(?:modules/|init\.py)"
_KEEPS: Final = rf".* <frozen importlib|.*torch/(?:optim/|autograd/|nn/init\.py)|{_READS}"
# These match in a line of code.
_WAITS_HERE: Final = r"\b(?:os\.wait\w*|\w+\.(?:wait|join|sleep|communicate))\("
_FILLS: Final = r"[\w.\[\]]+\.\w+_\(.*\)"
_CONVERTS: Final = (
    r"\.(float|half|bfloat16|double|astype|(?:to|type)(?=\([^)]*(?:dtype|float|half|int\d)))\("
)
_READS_WHOLE: Final = r"\.(?:read|readlines|readall)\(\s*\)|\.read_(?:bytes|text)\(|\bfromfile\("
_CHECKPOINT: Final = r".*\.(?:pt|pth|bin|ckpt|safetensors|gguf|pkl|npy|npz|h5|msgpack|distcp)"
_PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt")


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
        return re.sub(r"\.?<\w+>", "", self.function)

    @property
    def file(self) -> str:
        """The file's name: "script.py", "tool/__main__.py"; for a library, with the package's folders."""
        if inside := re.fullmatch(_INSTALLED, self.path):
            return inside["inside"]
        path = PurePath(self.path)
        return "/".join(path.parts[-2:]) if path.name.startswith("__") else path.name

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def call(self) -> str:
        return f"{self.name.rpartition('.')[2]} {self.path}"


def read_all(texts: Iterable[str]) -> tuple[Frame, ...]:
    """Parse the frames of a stack, innermost first; skip texts that are no frames."""
    found = [match.groups() for text in texts if (match := re.fullmatch(_FRAME, text))]
    return tuple(Frame(function, path, int(line)) for function, path, line in found)


def own(frames: Iterable[Frame]) -> Frame | None:
    return next((frame for frame in frames if not frame.is_library), None)


class Place:
    """The innermost line of the program that ran when ``stack`` was recorded, and the frames that it ``called``."""

    def __init__(self, stack: Stack, frames: tuple[Frame, ...]) -> None:
        self.frame = own(frames) or frames[0]
        self.stack, self.frames, self.pid = stack, frames, stack.pid
        self.called = frames[: frames.index(self.frame)]
        waits_here = not self.called and re.search(_WAITS_HERE, stack.code)
        # A library's hook runs after the end of the program's own code.
        ends = self.frame.is_library and re.match(_EXITS, frames[-1].call)
        self.waits = bool(re.match(_WAITS, frames[0].call) or waits_here or ends)
        self.copies = self.runs(_LOADS) or ".copy_(" in stack.code
        self.builds = self.runs(_BUILDS) and not self.copies

    def runs(self, pattern: str) -> bool:
        """Return whether a library's function that the line called matches, by its name or file."""
        frames = (*self.called, self.frame)
        return any(one.is_library and re.match(pattern, one.call) for one in frames)

    @property
    def title(self) -> str:
        """The function that the line called, else the one around it, and the line: "`load_state_dict` (script.py:14)"."""
        called = self.called[-1] if self.called else self.frame
        name = "import" if called.is_import else called.name
        return f"`{name}` ({self.frame.place})" if name else self.frame.place


@dataclass(frozen=True, slots=True)
class Cause:
    """What caused the memory use; a remedy if one is sure; the line if it is not the last one that ran."""

    name: str
    words: str
    hint: str = ""
    place: Place | None = None


class Facts:
    """Facts from a command's record; all sizes are those at the command's highest memory use.

    ``place`` is the last line that was running near the peak, if any, ``process`` the process that ran it, and
    ``files`` the checkpoints which that process read rather than mapped.
    """

    def __init__(self, result: Result, ran: Ran, samples: Sequence[Sample]) -> None:
        self.result, self.ran, self.samples = result, ran, samples
        self.present = [process for process in ran.processes if process.anon_bytes is not None]
        self.processes = {process.pid: process for process in ran.processes}
        self.at_peak = ran.at_peak or self._sample_at(ran.peak_ns)
        self.held_bytes = self.at_peak.anon_bytes + self.at_peak.shmem_bytes
        self.needed_bytes = max(ran.needed_bytes or 0, self.held_bytes)
        found = [Place(one, frames) for one in ran.stacks if (frames := read_all(one.frames))]
        self.places = sorted(found, key=lambda one: one.stack.t_ns)
        self.place = self._last_place()
        self.process = self.processes.get(self.place.pid) if self.place else None
        self.files = [
            file
            for file in (self.process.files if self.process else ())
            if file.mapped_bytes < file.size_bytes // 2 and re.fullmatch(_CHECKPOINT, file.path)
        ]

    @property
    def cause(self) -> Cause | None:
        # The most specific rule comes first.
        rules = (_copies, _whole_file, _import, _copy_on_write, _held, _growth, _page_cache)
        return next((found for rule in rules if (found := rule(self))), None)

    def _last_place(self) -> Place | None:
        def weight(place: Place) -> tuple[int, int, int]:
            process = self.processes.get(place.pid)
            grown = (process.grown_bytes if process else None) or 0
            return place.stack.usage_bytes, place.stack.t_ns, grown

        near = [one for one in self.places if one.stack.usage_bytes >= _NEAR * self.needed_bytes]
        last = max((one for one in near if not one.waits), key=weight, default=None)
        if last is None:
            return None
        # While a library's own thread works, a line of the user in another thread waits for it.
        when = last.pid, last.stack.t_ns
        at_once = [last, *(one for one in near if (one.pid, one.stack.t_ns) == when)]
        at_once.sort(key=lambda one: one.waits)
        return next((one for one in at_once if own(one.frames)), last)

    def grown_since(self, files: Sequence[OpenFile]) -> int:
        """Return how much anonymous memory has grown, at least, since the first of ``files`` was opened."""
        seen_ns = [file.seen_ns for file in files if file.seen_ns is not None]
        if len(seen_ns) < len(files) or not self.samples:
            return 0
        return self.at_peak.anon_bytes - self._sample_at(min(seen_ns)).anon_bytes

    def _sample_at(self, t_ns: int | None) -> Sample:
        if self.samples and t_ns is not None:
            return min(self.samples, key=lambda sample: abs(sample.t_ns - t_ns))
        shared = sum(process.shmem_bytes or 0 for process in self.present)
        anon = sum(map(held_by, self.present)) - shared
        return Sample(0, 0, anon, 0, shared, 0, 0, 0)


def held_by(process: Process) -> int:
    return (process.anon_bytes or 0) + (process.shmem_bytes or 0)


def size(number: int) -> str:
    """Return a size for a sentence: "757 MiB", "2.41 GiB"."""
    return format_bytes(number, digits=2 if number >= GIB else 0 if number >= 10 * MIB else 1)


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
        left = few(list(dict.fromkeys(map(_program, result.ran.ended))))
        text += f". weighin stopped processes that still ran at the end: {left}"
    return f"{text}."


def _need(facts: Facts) -> str:
    needed, peaks = facts.ran.needed_bytes, facts.result.peaks
    if needed is None:
        return ""
    amount = f"{size(needed)} of {_kinds(facts, needed)}"
    if facts.result.outcome is Outcome.OOM_KILLED:
        return f"The command had {amount}, not counting page cache, and tried to allocate more."
    text = f"The command needs {'at least ' * facts.ran.needed_is_sampled}{amount}"
    if (peak := peaks.cgroup_bytes) is None:
        return f"{text}."
    more, cached = peak - needed - (facts.at_peak.freed_bytes or 0), peaks.file_sampled_bytes
    is_cached = more >= MIB and (cached is None or cached >= MIB)
    of = "with page cache" if is_cached else "of its cgroup"
    return f"{text}; the peak {of} is {size(peak)}."


def _kinds(facts: Facts, needed: int) -> str:
    at_peak, peaks = facts.at_peak, facts.result.peaks
    anonymous = max([at_peak.anon_bytes, *(kill.anon_bytes or 0 for kill in facts.ran.kills)])
    locked, caches = at_peak.locked_bytes or 0, at_peak.kernel_reclaimable_bytes or 0
    # The kernel's own mark (v1) may be higher than the last sample.
    kernel = min((peaks.kernel_bytes or 0) - caches, needed - facts.held_bytes - locked)
    sizes = {
        "anonymous": min(anonymous, needed),
        "shared": at_peak.shmem_bytes,
        "locked": locked,
        "kernel": max(at_peak.kernel_needed_bytes, kernel),
    }
    named = {name: number for name, number in sizes.items() if number >= max(MIB, needed // 100)}
    if not named or sum(sizes.values()) < 0.9 * needed - 8 * MIB:  # samples saw too little
        return "memory"
    split = f" ({' and '.join(map(size, named.values()))})" if len(named) > 1 else ""
    return f"{' and '.join(named)} memory{split}"


def _where(facts: Facts) -> str:
    cause, process = facts.cause, facts.process
    place = (cause and cause.place) or facts.place
    marks = [mark.text for mark in facts.ran.marks if mark.t_ns <= (facts.ran.peak_ns or 0)]
    is_told = facts.needed_bytes >= _LEAST_BYTES or facts.result.outcome is Outcome.OOM_KILLED
    if place and is_told:
        by = f" in {_title_of(process)}" if process and len(facts.present) > 1 else ""
        return f"Most of this memory was in use when {place.title} ran{by}."
    text = "Most of this memory was in use after the command printed"
    return f"{text} {marks[-1]!r}." if marks else ""


def _cache(facts: Facts) -> str:
    most, cold = facts.result.peaks.file_sampled_bytes, facts.ran.cold
    if facts.result.peaks.cgroup_bytes is None or most is None:
        return ""
    most -= facts.at_peak.locked_bytes or 0  # which can be reclaimed at the program's end
    if most < MIB and not cold and not any(process.files for process in facts.present):
        return ""
    start = f"{few(cold)} cold at the start"
    if not cold:
        start = "pages that other programs had read before are not charged (--cold PATH drops such pages)"
    return f"Page cache: {f'at most {size(most)}' if most >= MIB else 'none'}; {start}."


def _copies(facts: Facts) -> Cause | None:
    place, files = facts.place, facts.files
    if place is None or not files:
        return None
    grown, sizes = facts.grown_since(files), [file.size_bytes for file in files]
    read_bytes, names = sum(sizes), few([PurePath(file.path).name for file in files], 2)
    read = f"{size(min(grown, read_bytes))} read from {names}"
    # Of several files, one may have been read after another was freed.
    second = max(sizes) if len(files) > 1 else (_MORE_THAN_ONE - 1) * read_bytes
    copied = place.copies and grown > read_bytes + second
    usages = [one.stack.usage_bytes for one in facts.places if one.pid == place.pid and one.builds]
    built_bytes = facts.held_bytes - min(usages, default=facts.held_bytes)
    reads_beside = (place.runs(_READS) or place.copies) and grown > read_bytes // 16
    is_beside = reads_beside and built_bytes - grown > read_bytes // 2
    if facts.at_peak.anon_bytes >= _LEAST_BYTES and (copied or is_beside):
        words = f"Two copies of the weights were in memory: {read}, and the model's own."
        return Cause("two copies", words, _try(facts, files))
    code = re.search(_CONVERTS, place.stack.code)
    if code is None or grown < max(_LEAST_BYTES, _MORE_THAN_ONE * read_bytes):
        return None
    return Cause(
        "dtype conversion",
        f"`.{code[1]}()` made new tensors in addition to the {read}: memory grew by {size(grown)}.",
        f"Convert one tensor after the other and free the original. {_try(facts, files)}",
    )


def _whole_file(facts: Facts) -> Cause | None:
    place, process = facts.place, facts.process
    if place is None or process is None:
        return None
    parses = place.runs(_PARSES)
    reads = place.runs(_READS) or re.search(_READS_WHOLE, place.stack.code)
    for file in process.files if parses or reads else ():
        if file.mapped_bytes or file.position_bytes is None:
            continue
        grown = facts.grown_since([file])
        is_its = file.is_open or max(file.position_bytes, grown) > 0.95 * file.size_bytes
        is_one = parses or grown < _MORE_THAN_ONE * file.size_bytes
        if is_its and is_one and grown > _LEAST_BYTES:
            has = f"{PurePath(file.path).name} has {size(file.size_bytes)}, and memory grew by {size(grown)}"
            parts = "Read the file in parts, or map the file (mmap)."
            is_pickle = place.runs(_READS) and file.path.endswith(_PICKLES)
            hint = _try(facts, [file]) if is_pickle else parts
            return Cause("a whole file", f"The program read a whole file into memory: {has}.", hint)
    return None


def _import(facts: Facts) -> Cause | None:
    place = facts.place
    frames = place.frames if place else ()
    at = next((index for index, frame in enumerate(frames) if frame.is_import), 0)
    if place is None or at == 0:
        return None
    outside = [frame for frame in frames[at:] if not frame.is_library]

    def is_its(one: Place) -> bool:
        return any(frame.is_import for frame in one.frames) and {*outside} <= {*one.frames}

    mine = [one for one in facts.places if one.pid == place.pid and not one.waits]
    readings = grouped(mine, lambda one: one.stack.t_ns).values()  # of all threads at once
    grown = sum(
        max(after[0].stack.usage_bytes - before[0].stack.usage_bytes, 0)
        for before, after in pairwise(readings)
        if any(map(is_its, before)) and any(map(is_its, after))
    )
    if grown < max(_LEAST_BYTES, facts.held_bytes // 4):
        return None
    by = f" by {outside[0].place}" if outside else ""
    words = f"Most of the memory was allocated while {frames[at - 1].file} was imported{by}."
    return Cause("import", words)


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
            who = f"{len(children)} forked processes" if len(children) > 1 else "a forked process"
            return Cause(
                "copy-on-write",
                f"Copy-on-write: {who} wrote to pages shared with the parent"
                f" process: {size(copied)} of the {size(together)} that all have together are copies.",
                "In Python, reading an object writes the object's reference count: keep shared data"
                " in arrays, or start fewer processes.",
            )
    return None


def _held(facts: Facts) -> Cause | None:
    """What the kinds of memory, the kernel's log or the processes show, without a stack."""
    held, shared, first = facts.held_bytes, facts.at_peak.shmem_bytes, facts.ran.pid
    if held >= _LEAST_BYTES and shared >= held // 2:
        words = f"{size(shared)} of the memory is shared memory: files in /dev/shm or another tmpfs, or shared mappings."
        hint = "A file in a tmpfs takes memory until the file is removed."
        return Cause("shared memory", words, hint)
    if any(kill.limit_of.startswith("/") for kill in facts.ran.kills):
        words = "The command did not reach its own limit, but that of another cgroup."
        return Cause("a limit around", words, "Raise the limit of that cgroup.")
    # Without the first process, the children are what a killed parent left.
    if held < _LEAST_BYTES or first not in [process.pid for process in facts.present]:
        return None
    holder = max(facts.present, key=held_by)
    if holder.pid != first and held_by(holder) >= 0.7 * sum(map(held_by, facts.present)):
        child = f"{_title_of(holder)} has {size(held_by(holder))}"
        return Cause("a child", f"A child process of the command has most of the memory: {child}.")
    return None


def _growth(facts: Facts) -> Cause | None:
    """Three stacks or more with one line of the program, between which memory grew."""
    place = facts.place
    if place is None or re.fullmatch(_FILLS, place.stack.code) or place.runs(_KEEPS):
        return None
    process = facts.process
    parent = facts.processes.get(process.parent_pid) if process else None
    if process and parent and parent.command == process.command:
        copied_bytes = process.copied_bytes  # None: a forked process may have copied much
        if copied_bytes is None or copied_bytes > held_by(process) // 4:
            return None
    mine = [one for one in facts.places if one.pid == place.pid and not one.waits]
    for at, frame in enumerate(place.frames):
        stacks = [one.stack for one in mine if frame in one.frames]
        rise = sorted((one.t_ns, one.usage_bytes) for one in stacks if one.t_ns <= place.stack.t_ns)
        times = {one.t_ns for one in stacks}
        is_usual = frame == place.frame or len(times) >= len({m.stack.t_ns for m in mine}) / 2
        if frame.is_library or len({*rise}) < 3 or not is_usual:
            continue
        (start_ns, low), (end_ns, high) = rise[0], rise[-1]
        if high - low >= _LEAST_BYTES:
            seconds = (end_ns - start_ns) / 1e9
            words = f"Anonymous memory grew from {size(low)} to {size(high)} in {seconds:.1f} s."
            line = Place(place.stack, place.frames[at:])
            return Cause("growth", words, "Look for objects that this line keeps.", line)
    return None


def _page_cache(facts: Facts) -> Cause | None:
    peak, cached = facts.result.peaks.cgroup_bytes or 0, facts.at_peak.page_cache_bytes
    is_measured = facts.result.outcome is Outcome.OK and facts.ran.needed_bytes is not None
    if not is_measured or peak < _LEAST_BYTES or cached < peak // 2:
        return None
    words = f"{size(cached)} of the peak of {size(peak)} is page cache, which the kernel reclaims under a lower limit."
    return Cause("page cache only", words, "Find the smallest limit with weighin floor.")


def _try(facts: Facts, files: Sequence[OpenFile]) -> str:
    limit, path = facts.result.cell.ram_limit_bytes, PurePath(files[0].path)
    maps = "torch.load(..., mmap=True), or ask: " if files[0].path.endswith(_PICKLES) else ""
    ram = f" --ram {format_exact(limit)}" if limit else ""
    folder = path if len(files) == 1 else path.parent
    return f"Try {maps}weighin recommend {quote(str(folder))}{ram}"
