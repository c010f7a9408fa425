"""Find the cause of a command's memory use with a table of rules, which test the command's record.

The answer is the first rule in the table that holds. More specific rules therefore come first. For
each rule, tests/unit/test_causes.py has a record for which the rule holds and a record for which it
does not.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from shlex import quote
from typing import Final

from weighin.records.explanation.facts import (
    Facts,
    Place,
    held_by,
    is_import,
    is_waiting,
    names,
    place_at,
    size,
    title_of,
)
from weighin.result import OpenFile, Outcome, Process, Sample
from weighin.units import MIB, format_exact

Evidence = Mapping[str, str]
"""The texts that replace the names in braces, such as {read}, in a rule's sentences."""

LEAST_BYTES: Final = 48 * MIB
"""Most rules do not explain less memory than this: Python with a few libraries needs as much."""

_LOADS: Final = re.compile(r"load_state_dict|_load_from_state_dict|load_checkpoint_in_model")
_READS: Final = ("torch/serialization.py", "safetensors/torch.py")
_BUILDS: Final = ("torch/nn/modules/", "torch/nn/init.py")
_CONVERTS: Final = re.compile(
    r"\.(?:(?:float|half|bfloat16|double)\(\)|astype\(|(?:to|type)\([^)]*(?:dtype|float|half|int\d))"
)
_WHOLE: Final = re.compile(
    r"\.(?:read|readlines|readall)\(\s*\)|\.read_(?:bytes|text)\(|\bfromfile\("
)
_PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt")
_MORE_THAN_ONE: Final = 1.15  # memory of this many times the bytes read is more than one copy
_WHOLE_SHARE: Final = 0.95  # of a file that was read to its end
_MOST_OF_FILE: Final = 1.1  # strings and buffers may take a tenth more than the file
_READERS: Final = re.compile(
    r".*\b(?:torch/serialization|numpy/lib/\w+|(?P<parser>json/\w+|pandas/io/.+))\.py"
)
_IN_PLACE: Final = re.compile(r"[\w.\[\]]+\.\w+_\(.*\)")
_KEEPERS: Final = ("torch/optim/", "torch/autograd/", "torch/nn/init.py", "numpy/lib/", *_READS)
_SLICES: Final = 4
_LEAST_SAMPLES: Final = 12
_STEADY_S: Final = 0.3
_LEAST_STACKS: Final = 3
_MOST_STACKS: Final = 2 / 3
_NEARLY_ALL: Final = 0.9  # of the stacks in which the caller's line is


@dataclass(frozen=True, slots=True)
class Rule:
    """A possible cause of a command's memory use: a test ``when``, and sentences about the cause.

    ``when`` returns the evidence, or None if the cause does not apply. ``hint`` is a sentence with
    a remedy; empty where no remedy is certain. ``place`` finds the line of code that allocated the
    memory.
    """

    name: str
    when: Callable[[Facts], Evidence | None]
    words: str
    hint: str = ""
    place: Callable[[Facts], Place | None] = lambda facts: facts.place


@dataclass(frozen=True, slots=True)
class Cause:
    """A rule that holds, with the rule's completed sentences."""

    name: str
    words: str
    hint: str = ""
    place: Place | None = None


def find(facts: Facts) -> Cause | None:
    """Return the most specific cause that the record proves; None if it proves no cause."""
    for rule in RULES:
        if (evidence := rule.when(facts)) is not None:
            words, hint = (text.format(**evidence) for text in (rule.words, rule.hint))
            return Cause(rule.name, words, hint, rule.place(facts))
    return None


def _two_copies(facts: Facts) -> Evidence | None:
    """Test whether the weights were read into memory (not mapped) and the model has a copy too."""
    place = facts.place
    files = facts.read_files(place.stack.pid) if place else []
    if place is None or not files or facts.anon_bytes < LEAST_BYTES:
        return None
    read_bytes = sum(file.size_bytes for file in files)
    first = min(files, key=lambda file: file.seen_ns or 0)
    grown = facts.grown_since(first)
    mine = [one for one in facts.places if one.stack.pid == place.stack.pid]
    copying = facts.held_bytes - _first_usage(facts, filter(_copies, mine))
    building = facts.held_bytes - grown - _first_usage(facts, filter(_builds, mine))
    begun = read_bytes // 16  # so much of a copy shows that there is one
    # Of several files, one may have been read after another was freed.
    second = files[0].size_bytes if len(files) > 1 else int((_MORE_THAN_ONE - 1) * read_bytes)
    is_read = len(files) == 1 and grown > _WHOLE_SHARE * read_bytes
    copied = _copies(place) and (grown > read_bytes + second or (is_read and copying > begun))
    beside = building > read_bytes // 2 and grown > begun and (_reads(place) or _copies(place))
    if not copied and not beside:
        return None
    at = "" if facts.killed else " at the peak"
    what = f"Two copies of the weights were in memory{at}: {{read}} read from {{files}}, and the model's own."
    if not copied and grown < _WHOLE_SHARE * read_bytes:
        what = f"A second copy of the weights was being read{at}, beside the model's own: {{read}} of {{files}}."
    return {"what": what.format(**_about(files)), "try": _try(facts, files)}


def _first_usage(facts: Facts, places: Iterable[Place]) -> int:
    return min((one.stack.usage_bytes for one in places), default=facts.held_bytes)


def _dtype_conversion(facts: Facts) -> Evidence | None:
    place = facts.place
    if place is None or not (code := _CONVERTS.search(place.stack.code)):
        return None
    files = facts.read_files(place.stack.pid)
    read_bytes = sum(file.size_bytes for file in files)
    grown = facts.grown_since(min(files, key=lambda file: file.seen_ns or 0)) if files else 0
    if grown < max(LEAST_BYTES, _MORE_THAN_ONE * read_bytes):
        return None
    call = f"{code[0]})" if code[0].count("(") > code[0].count(")") else code[0]
    recommend = {"recommend": _recommend(facts, files)}
    return _about(files) | recommend | {"call": call, "grown": size(grown)}


def _whole_file(facts: Facts) -> Evidence | None:
    found = _whole_read(facts)
    if found is None:
        return None
    place, file = found
    grown = facts.grown_since(file)
    more = f", and memory grew by {size(grown)}" if grown > _MOST_OF_FILE * file.size_bytes else ""
    parts = "Read the file in parts, or map the file (mmap)."
    return _about([file]) | {"more": more, "hint": _try(facts, [file]) if _reads(place) else parts}


def _whole_read(facts: Facts) -> tuple[Place, OpenFile] | None:
    """Return the line that reads a whole file, and the file.

    While the process's position in the file is before the file's end, the process still reads it.
    The last stack then counts even if memory grew much between this stack and the peak.
    """
    last = facts.place or next(iter(facts.places[-1:]), None)
    process = facts.process(last.stack.pid) if last else None
    if last is None or process is None:
        return None
    calls = [_READERS.fullmatch(one.path) for one in last.frames[: last.frames.index(last.frame)]]
    if not _WHOLE.search(last.stack.code) and not any(calls):
        return None
    parses = any(call and call["parser"] for call in calls)
    for file in process.files:
        if file.mapped_bytes or file.position_bytes is None:
            continue
        if facts.place is None and not (file.is_open and file.position_bytes < file.size_bytes):
            continue
        grown, most = facts.grown_since(file), _MOST_OF_FILE * file.size_bytes
        is_its = file.is_open or max(file.position_bytes, grown) > _WHOLE_SHARE * file.size_bytes
        if is_its and grown > LEAST_BYTES and (parses or grown < most):
            return last, file
    return None


def _place_of_read(facts: Facts) -> Place | None:
    found = _whole_read(facts)
    return found[0] if found else None


def _import(facts: Facts) -> Evidence | None:
    place = facts.place
    if place is None:
        return None
    at = [index for index, frame in enumerate(place.frames) if is_import(frame)]
    if not at or at[0] == 0:
        return None
    outside = [frame for frame in place.frames[at[0] :] if not frame.is_library]
    by_it = lambda one: any(map(is_import, one.frames)) and {*outside} <= {*one.frames}  # noqa: E731
    if facts.grown(place.stack.pid, by_it) < max(LEAST_BYTES, facts.held_bytes // 4):
        return None
    module = next(frame for frame in reversed(place.frames[: at[0]]))
    by = f" by {outside[0].place}" if outside else ""
    return {"module": module.place.rpartition(":")[0], "by": by}


def _copy_on_write(facts: Facts) -> Evidence | None:
    """Test whether pages that processes shared with their parent have become private."""
    for parent in facts.ran.processes:
        children = [
            one
            for one in facts.present
            if one.parent_pid == parent.pid and one.command == parent.command and one.copied_bytes
        ]
        copied = sum(one.copied_bytes or 0 for one in children)
        together = held_by(parent) + sum(map(held_by, children))
        if together > LEAST_BYTES and copied > together // 4:
            count = f"{len(children)} forked processes" if len(children) > 1 else "a forked process"
            return {"count": count, "together": size(together), "copied": size(copied)}
    return None


def _shared_memory(facts: Facts) -> Evidence | None:
    if facts.held_bytes < LEAST_BYTES or facts.shmem_bytes < facts.held_bytes // 2:
        return None
    return {"shared": size(facts.shmem_bytes)}


def _other_limit(facts: Facts) -> Evidence | None:
    kill = next((kill for kill in facts.ran.kills if kill.limit_of.startswith("/")), None)
    if kill is None:
        return None
    of = f" of {size(kill.limit_bytes)}" if kill.limit_bytes else ""
    return {"group": f"{kill.limit_of} {kill.limit_place}".strip(), "of": of}


def _child(facts: Facts) -> Evidence | None:
    holder = facts.holder
    if holder is None or facts.held_bytes < LEAST_BYTES or holder.pid == facts.ran.pid:
        return None
    if held_by(holder) < 0.7 * sum(map(held_by, facts.present)):
        return None
    if facts.ran.pid not in {one.pid for one in facts.present}:
        return None  # it is what a killed parent left
    return {"child": title_of(holder), "held": size(held_by(holder))}


def _growth(facts: Facts) -> Evidence | None:
    """Test whether anonymous memory grew steadily, or between three readings at one line."""
    place = facts.place
    if place is None or _keeps(place) or _may_be_copies(facts, facts.process(place.stack.pid)):
        return None
    rising = [(one.t_ns, one.anon_bytes) for one in _rising(facts.samples)]
    at_line = [
        (one.stack.t_ns, one.stack.usage_bytes)
        for one in facts.places
        if one.stack.pid == place.stack.pid and one.frame.place == place.frame.place
    ]
    if how := "steadily " if _is_steady(facts, place, rising) else "":
        first, last = rising[0], rising[-1]
    else:
        first, last = at_line[0], at_line[-1]
        if len({*at_line}) < _LEAST_STACKS or last[1] - first[1] < LEAST_BYTES:
            return None
    seconds = f"{(last[0] - first[0]) / 1e9:.1f} s"
    return {"how": how, "low": size(first[1]), "high": size(last[1]), "seconds": seconds}


def _is_steady(facts: Facts, place: Place, rising: Sequence[tuple[int, int]]) -> bool:
    """Return whether memory grew by a similar amount in each quarter of its rise, at one line."""
    if len(rising) < _LEAST_SAMPLES:
        return False
    (start_ns, low), (end_ns, high) = rising[0], rising[-1]
    span_ns, grown = end_ns - start_ns, high - low
    ends = [start_ns + span_ns * number // _SLICES for number in range(_SLICES + 1)]
    levels = [min(rising, key=lambda one: abs(one[0] - end))[1] for end in ends]
    if not all(1 / 3 < (b - a) / (grown / _SLICES) < 2 for a, b in pairwise(levels)):
        return False
    mine = [one.stack.usage_bytes for one in facts.places if one.stack.pid == place.stack.pid]
    usual = _usual_place(facts) or place
    has_it = lambda one: usual.frame.place in {frame.place for frame in one.frames}  # noqa: E731
    stays = facts.grown(place.stack.pid, has_it) >= (max(mine) - min(mine)) / 2
    is_long = span_ns >= _STEADY_S * 1e9 and grown >= LEAST_BYTES and len(mine) >= _LEAST_STACKS
    return is_long and stays and not _keeps(usual)


def _may_be_copies(facts: Facts, process: Process | None) -> bool:
    """Return whether a process was forked, and it is not known that it copied little."""
    parent = facts.process(process.parent_pid) if process else None
    if process is None or parent is None or parent.command != process.command:
        return False
    return process.copied_bytes is None or process.copied_bytes > held_by(process) // 4


def _keeps(place: Place) -> bool:
    """Return whether a line only fills tensors that exist, or a library keeps what the line makes."""
    inner = place.frames[: place.frames.index(place.frame)]
    keeps = any(is_import(one) or any(part in one.path for part in _KEEPERS) for one in inner)
    return keeps or bool(_IN_PLACE.fullmatch(place.stack.code))


def _usual_place(facts: Facts) -> Place | None:
    """Return the innermost line that is in two thirds of a process's stacks, and is no chance one.

    It is in nearly all stacks of the line that called it: where memory grows at several lines of a
    function, the caller's line is meant.
    """
    last = facts.place
    if last is None:
        return None
    places = [
        one for one in facts.places if one.stack.pid == last.stack.pid and not is_waiting(one)
    ]
    counts = Counter(line for one in places for line in set(_lines(one)))
    found = []
    for one in places:
        lines = _lines(one)
        for at, line in enumerate(lines):
            caller = next(filter(None, lines[at + 1 :]), line)
            if line and counts[line] >= max(
                _MOST_STACKS * len(places), _NEARLY_ALL * counts[caller]
            ):
                found.append((len(one.frames) - at, place_at(one.stack, one.frames, at)))
    return max(found, key=lambda each: each[0], default=(0, last))[1]


def _lines(place: Place) -> list[tuple[str, int] | None]:
    """Return a stack's (file, line number) pairs, innermost first; None for a library's line."""
    return [None if frame.is_library else (frame.path, frame.line) for frame in place.frames]


def _page_cache(facts: Facts) -> Evidence | None:
    peak = facts.result.peaks.cgroup_bytes
    needed = facts.ran.needed_bytes
    if facts.result.outcome is not Outcome.OK or peak is None or needed is None or not facts.split:
        return None
    if peak < LEAST_BYTES or facts.split[2] < peak // 2:
        return None
    return {"cached": size(facts.split[2]), "peak": size(peak)}


def _rising(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples from a fifth of the maximum of anonymous memory up to this maximum."""
    if not samples:
        return []
    most = max(range(len(samples)), key=lambda index: samples[index].anon_bytes)
    least = samples[most].anon_bytes // 5
    start = next(index for index in range(most + 1) if samples[index].anon_bytes >= least)
    return list(samples[start : most + 1])


def _copies(place: Place) -> bool:
    called = any(_LOADS.fullmatch(frame.short_name) for frame in place.frames)
    return called or ".copy_(" in place.stack.code


def _reads(place: Place) -> bool:
    return any(_READS[0] in frame.path or _READS[1] in frame.path for frame in place.frames)


def _builds(place: Place) -> bool:
    return any(
        any(part in frame.path for part in _BUILDS) for frame in place.frames
    ) and not _copies(place)


def _about(files: Sequence[OpenFile]) -> dict[str, str]:
    read = size(sum(file.size_bytes for file in files))
    return {"read": read, "files": names(files)}


def _recommend(facts: Facts, files: Sequence[OpenFile]) -> str:
    limit = facts.result.cell.ram_limit_bytes
    ram = f" --ram {format_exact(limit)}" if limit else ""
    path = PurePath(files[0].path)
    what = path if len(files) == 1 else path.parent
    return f"weighin recommend {quote(str(what))}{ram}"


def _try(facts: Facts, files: Sequence[OpenFile]) -> str:
    maps = "torch.load(..., mmap=True): " if files[0].path.endswith(_PICKLES) else ""
    return f"Try {maps}{_recommend(facts, files)}"


RULES: Final = (
    Rule(
        "two copies",
        _two_copies,
        "{what}",
        "{try}",
    ),
    Rule(
        "dtype conversion",
        _dtype_conversion,
        "`{call}` made new tensors in addition to the {read} read from {files}: memory grew by {grown}.",
        "Convert one tensor after the other and free the original, or use a strategy that does so: {recommend}",
    ),
    Rule(
        "a whole file",
        _whole_file,
        "The program read a whole file into memory: {files} has {read}{more}.",
        "{hint}",
        _place_of_read,
    ),
    Rule("import", _import, "Most of the memory was allocated while {module} was imported{by}."),
    Rule(
        "copy-on-write",
        _copy_on_write,
        "Copy-on-write: {count} wrote to pages shared with the parent process: {copied} of the {together}"
        " that all have together are copies.",
        "In Python, reading an object writes the object's reference count: keep shared data in arrays, or"
        " start fewer processes.",
    ),
    Rule(
        "shared memory",
        _shared_memory,
        "{shared} of the memory is shared memory: files in /dev/shm or another tmpfs, or shared mappings.",
        "A file in a tmpfs takes memory until the file is removed.",
    ),
    Rule(
        "a limit around",
        _other_limit,
        "The command reached the limit{of} of the cgroup {group}, not its own limit.",
        "Raise the limit of that cgroup.",
    ),
    Rule(
        "a child",
        _child,
        "A child process of the command has most of the memory: {child} has {held}.",
    ),
    Rule(
        "growth",
        _growth,
        "Anonymous memory grew {how}from {low} to {high} in {seconds}.",
        "Look for objects that this line of code keeps.",
        _usual_place,
    ),
    Rule(
        "page cache only",
        _page_cache,
        "{cached} of the peak of {peak} is page cache, which the kernel reclaims under a lower limit.",
        "Find the smallest limit with weighin floor.",
    ),
)
"""All rules, the most specific first."""
