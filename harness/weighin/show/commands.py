"""Tabulate the kinds of a measured command's memory, its processes, and which ones were killed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from weighin.records.floor import searched
from weighin.records.metrics import grouped
from weighin.records.run import Measured
from weighin.result import Kill, OpenFile, Process, Ran, Result, Stack
from weighin.show import words
from weighin.show.table import Column, Lines, Table
from weighin.show.words import plain, scaled
from weighin.text import few
from weighin.units import MIB, format_bytes, format_seconds

_MOST_FILES: Final = 3  # in a table, of one process
_MOST_PROCESSES: Final = 20
_LEAST_SHARE: Final = 0.01  # of the memory of all processes; a smaller process has no row
_MOST_NAMES: Final = 8
_COMMAND_LENGTH: Final = 80
PROCESSES_NOTE: Final = (
    "Each process's share of the memory (PSS) when the command used most memory, sampled: a page that"
    " several processes share is divided among them."
)
KINDS: Final = (
    "anonymous", "shared", "locked", "kernel", "sockets", "page tables", "slab",
    "page cache", "given back", "kernel's caches",
)  # fmt: skip
CHARGE_NOTE: Final = (
    "In the sample with the most needed memory. The command needs the first five kinds; page tables and"
    " slab are parts of the kernel's. The kernel reclaims the last three."
)
KILLS_NOTE: Final = (
    "The memory is that of the killed process at the instant of the kill, from the kernel's log."
)
_LIMITS: Final = {"": "its own", "machine": "the machine's memory", "unknown": "not known"}


def about_commands(run: Measured) -> Iterator[Table | Lines]:
    """Yield the tables of kills, kinds of memory, processes and marked lines, and the stacks."""
    first: dict[str, tuple[str, Result, Ran]] = {}
    for result in run.results:
        if result.ran:
            first.setdefault(result.cell.series, (_title(result), result, result.ran))
    # Of each command's measurements under all RAM limits, the one with the most memory.
    by_command = grouped(first.values(), lambda one: searched(one[1].cell).series).values()
    largest = [max(same, key=lambda one: one[2].needed_bytes or 0) for same in by_command]

    killed = [
        [title, *_kill(kill), *_sizes(kill)]
        for title, _, ran in first.values()
        for kill in ran.kills
    ]
    heads = ["of", "killed", "which", "limit", "pid"]
    yield from _table("Killed for lack of memory", heads, 4, killed, [KILLS_NOTE], len(first))

    kinds = [[title, *row] for title, _, ran in largest if (row := _kinds(ran))]
    at_peak = "Kinds of memory at the peak"
    yield from _table(at_peak, ["of"], 1, kinds, [CHARGE_NOTE], len(largest), KINDS)

    processes, notes = [], [PROCESSES_NOTE]
    for title, _, ran in largest:
        seen = [each for each in ran.processes if each.anon_bytes is not None]
        ordered = sorted(seen, key=_held, reverse=True)
        least = _LEAST_SHARE * sum(map(_held, seen))
        shown = [each for each in ordered[:_MOST_PROCESSES] if _held(each) >= least or each.files]
        processes += [[title, *_process(each), *_sizes(each)] for each in shown]
        if smaller := [each for each in seen if each not in shown]:
            notes.append(f"{title}: smaller processes are not shown: {_named(smaller)}.")
        if others := [each for each in ran.processes if each.anon_bytes is None]:
            notes.append(f"{title} also ran, at other times: {_named(others)}.")
        if ran.ended:
            left_running = few([plain(each) for each in ran.ended], _MOST_NAMES)
            notes.append(f"{title} left these running, which weighin ended: {left_running}.")
    heads = ["of", "command", "reads", "pid", "parent"]
    yield from _table("Processes at the peak", heads, 3, processes, notes, len(largest))

    lines = [[title, *row] for title, _, ran in largest for row in _marks(ran)]
    heads = ["of", "line", "after"]
    yield from _table("Marked lines of output", heads, 2, lines, [], len(largest), ())

    stacks = [_stack(title, stack) for title, result, _ in first.values() for stack in stacks_at_peak(result)]  # fmt: skip
    if stacks:
        yield Lines("Stacks at the peak", ["\n\n".join(stacks)], "verbatim")


def stacks_at_peak(result: Result) -> list[Stack]:
    """Return, of the Python stacks that were read, those at the highest memory of the command."""
    found = [stack for stack in (result.ran.stacks if result.ran else ()) if stack.frames]
    most = max((stack.usage_bytes for stack in found), default=0)
    return [stack for stack in found if stack.usage_bytes == most]


def _table(
    title: str,
    heads: Sequence[str],
    names: int,
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    commands: int,
    sizes: Sequence[str] = ("anonymous", "file", "shared"),
) -> Iterator[Table]:
    """Yield a table, unless it has no rows. For a single command, leave out the column of its name."""
    start = 0 if commands > 1 else 1
    columns = [Column(head, is_name=at < names) for at, head in enumerate(heads)]
    columns += [Column(size, "MiB") for size in sizes]
    if rows:
        yield Table(title, columns[start:], [row[start:] for row in rows], notes)


def _title(result: Result) -> str:
    cell, limit = result.cell, result.cell.ram_limit_bytes
    return " ".join([plain(cell.strategy), *([words.size(limit)] if limit else []), *cell.settings])


def _kinds(ran: Ran) -> list[str]:
    """Return the kinds of memory at the peak, in MiB; nothing without a cgroup."""
    at = ran.at_peak
    if at is None or at.kernel_bytes is None:
        return []
    caches = at.kernel_reclaimable_bytes or 0
    slab = None if at.slab_bytes is None else at.slab_bytes - caches
    needed = (at.anon_bytes, at.shmem_bytes, at.locked_bytes, at.kernel_bytes - caches)
    parts = (at.socket_bytes, at.page_tables_bytes, slab)
    rest = (at.page_cache_bytes, at.freed_bytes, caches)
    return [scaled(size, MIB, 1) for size in (*needed, *parts, *rest)]


def _process(process: Process) -> list[str]:
    reads = "; ".join(_read(each) for each in process.files[:_MOST_FILES]) or "-"
    return [_short(process.command), reads, str(process.pid), str(process.parent_pid)]


def _kill(kill: Kill) -> list[str]:
    who = "the first process" if kill.is_main else "another process"
    limit = plain(_LIMITS.get(kill.limit_of, kill.limit_of))
    return [_short(kill.command), who, limit, str(kill.pid)]


def _sizes(owner: Process | Kill) -> list[str]:
    """Return the anonymous, file-backed and shared memory of a process in MiB."""
    return [scaled(one, MIB, 1) for one in (owner.anon_bytes, owner.file_bytes, owner.shmem_bytes)]


def _read(file: OpenFile) -> str:
    """Return the name of a file, with the bytes that were read or mapped: "w.pt, 1.2 GiB of 3.1 GiB"."""
    name, size = plain(PurePath(file.path).name), format_bytes(file.size_bytes, digits=1)
    if file.position_bytes is None:
        text = f"{name}, {format_bytes(file.mapped_bytes, digits=1)} of {size} mapped"
    else:
        text = f"{name}, {format_bytes(file.position_bytes, digits=1)} of {size}"
    return text if file.is_open else f"{text}, closed before"


def _marks(ran: Ran) -> Iterator[list[str]]:
    """Yield the output lines that --mark selected, each with its time after the start."""
    starts = [each.start_ns for each in ran.processes] or [mark.t_ns for mark in ran.marks[:1]]
    for mark in ran.marks:
        yield [plain(mark.text), format_seconds(max(mark.t_ns - min(starts), 0))]


def _stack(title: str, stack: Stack) -> str:
    usage = format_bytes(stack.usage_bytes, digits=1)
    head = f"{title}, process {stack.pid}, thread {plain(stack.thread)}, at {usage}:"
    code = [f"  > {plain(stack.code)}"] if stack.code else []
    return "\n".join([head, *(f"  {plain(frame)}" for frame in stack.frames), *code])


def _named(others: Sequence[Process]) -> str:
    """Return the names of the programs that ran, with the number of processes: "sh (12 times), cat"."""
    counts = Counter(_short(each.command).partition(" ")[0] or "unknown" for each in others)
    texts = [f"{name} ({n} times)" if n > 1 else name for name, n in counts.items()]
    return few(texts, _MOST_NAMES)


def _short(command: str) -> str:
    """Return a command line without the folder of its program, cut off after 80 characters."""
    program, _, arguments = plain(command).partition(" ")
    text = f"{PurePath(program).name} {arguments}".strip()
    return text if len(text) <= _COMMAND_LENGTH else text[: _COMMAND_LENGTH - 1] + "…"


def _held(process: Process) -> int:
    return (process.anon_bytes or 0) + (process.shmem_bytes or 0) + (process.file_bytes or 0)
