"""Tabulate the kinds of a measured command's memory, its processes, and which ones were killed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from weighin.records.floor import searched
from weighin.records.metrics import grouped, latest
from weighin.report import captions
from weighin.report.findings import Found, of_texts
from weighin.report.markdown import plain, scaled
from weighin.result import Kill, OpenFile, Process, Result, Stack
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
_SIZES: Final = ("anonymous\nMiB", "file\nMiB", "shared\nMiB")
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
STACKS: Final = "Stacks at the peak"
_LIMITS: Final = {"": "its own", "machine": "the machine's memory", "unknown": "not known"}


def listings(results: Sequence[Result]) -> Iterator[Found]:
    """Yield the tables of kills, kinds of memory, processes and marked lines that are not empty."""
    for build in (kills, charge, processes, marks):
        if found := build(results):
            yield found


def processes(results: Sequence[Result]) -> Found | None:
    """Return a table of the processes at each command's memory peak; None if no process was seen."""
    chosen = _largest(results)
    rows, notes = [], [PROCESSES_NOTE]
    for title, result in chosen:
        assert result.ran
        at_peak = [each for each in result.ran.processes if each.anon_bytes is not None]
        shown = _shown(at_peak)
        rows += [[title, *_process_row(each)] for each in shown]
        if smaller := [each for each in at_peak if each not in shown]:
            notes.append(f"{title}: smaller processes are not shown: {_named(smaller)}.")
        if others := [each for each in result.ran.processes if each.anon_bytes is None]:
            notes.append(f"{title} also ran, at other times: {_named(others)}.")
        if result.ran.ended:
            left_running = few([plain(each) for each in result.ran.ended], _MOST_NAMES)
            notes.append(f"{title} left these running, which weighin ended: {left_running}.")
    heads = ["of", "command", "reads", "pid", "parent", *_SIZES]
    return _found("Processes at the peak", heads, 3, rows, notes, chosen)


def charge(results: Sequence[Result]) -> Found | None:
    """Return a table of the kinds of memory at each command's peak; None without a cgroup."""
    chosen = _largest(results)
    rows = []
    for title, result in chosen:
        at = result.ran.at_peak if result.ran else None
        if at and at.kernel_bytes is not None:
            caches = at.kernel_reclaimable_bytes or 0
            slab = None if at.slab_bytes is None else at.slab_bytes - caches
            needed = (at.anon_bytes, at.shmem_bytes, at.locked_bytes, at.kernel_bytes - caches)
            parts = (at.socket_bytes, at.page_tables_bytes, slab)
            rest = (at.page_cache_bytes, at.freed_bytes, caches)
            rows.append([title, *(scaled(size, MIB, 1) for size in (*needed, *parts, *rest))])
    heads = ["of", *(f"{name}\nMiB" for name in KINDS)]
    return _found("Kinds of memory at the peak", heads, 1, rows, [CHARGE_NOTE], chosen)


def kills(results: Sequence[Result]) -> Found | None:
    """Return a table of processes that the kernel killed for lack of memory; None without kills."""
    chosen = _chosen(results)
    rows = [
        [title, *_kill_row(kill)]
        for title, result in chosen
        for kill in (result.ran.kills if result.ran else ())
    ]
    heads = ["of", "killed", "which", "limit", "pid", *_SIZES]
    return _found("Killed for lack of memory", heads, 4, rows, [KILLS_NOTE], chosen)


def stacks(results: Sequence[Result]) -> str:
    """Return as text each command's Python stacks at its memory peak; empty if no stack was read."""
    parts = []
    for title, result in _chosen(results):
        for stack in stacks_at_peak(result):
            process, usage = f"process {stack.pid}", format_bytes(stack.usage_bytes, digits=1)
            head = f"{title}, {process}, thread {plain(stack.thread)}, at {usage}:"
            code = [f"  > {plain(stack.code)}"] if stack.code else []
            parts.append("\n".join([head, *(f"  {plain(frame)}" for frame in stack.frames), *code]))
    return "\n\n".join(parts)


def stacks_at_peak(result: Result) -> list[Stack]:
    """Return, of the Python stacks that were read, those at the highest memory of the command."""
    found = [stack for stack in (result.ran.stacks if result.ran else ()) if stack.frames]
    most = max((stack.usage_bytes for stack in found), default=0)
    return [stack for stack in found if stack.usage_bytes == most]


def marks(results: Sequence[Result]) -> Found | None:
    """Return a table of the output lines that --mark selected, with their times; None without any."""
    chosen = _largest(results)
    rows = []
    for title, result in chosen:
        if result.ran is None or not result.ran.marks:
            continue
        first_ns = min((each.start_ns for each in result.ran.processes), default=None)
        zero_ns = result.ran.marks[0].t_ns if first_ns is None else first_ns
        rows += [
            [title, plain(mark.text), format_seconds(max(mark.t_ns - zero_ns, 0))]
            for mark in result.ran.marks
        ]
    return _found("Marked lines of output", ["of", "line", "after"], 2, rows, [], chosen)


def _chosen(results: Sequence[Result]) -> list[tuple[str, Result]]:
    """Return the first repeat for each command, RAM limit and other setting, each with a title."""
    first: dict[str, Result] = {}
    for result in latest(results):
        if result.ran:
            first.setdefault(result.cell.series, result)
    return [(_title(each), each) for each in first.values()]


def _largest(results: Sequence[Result]) -> list[tuple[str, Result]]:
    """Return for each command, of its measurements under all RAM limits, the one with most memory."""
    by_command = grouped(_chosen(results), lambda one: searched(one[1].cell).series)
    return [max(cells, key=lambda one: _need(one[1])) for cells in by_command.values()]


def _need(result: Result) -> int:
    return (result.ran.needed_bytes if result.ran else None) or 0


def _shown(at_peak: Sequence[Process]) -> list[Process]:
    """Return, of the 20 largest processes, those with at least 1 % of the memory or open files."""
    ordered = sorted(at_peak, key=_held, reverse=True)
    least = _LEAST_SHARE * sum(map(_held, at_peak))
    return [each for each in ordered[:_MOST_PROCESSES] if _held(each) >= least or each.files]


def _title(result: Result) -> str:
    cell, limit = result.cell, result.cell.ram_limit_bytes
    words = [plain(cell.strategy), *([captions.size(limit)] if limit else []), *cell.settings]
    return " ".join(words)


def _found(
    label: str,
    heads: Sequence[str],
    names: int,
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    chosen: Sequence[tuple[str, Result]],
) -> Found | None:
    """Return a table; None without rows. For a single command, leave out the column of its name."""
    start = 0 if len(chosen) > 1 else 1
    fields = of_texts([row[start:] for row in rows])
    return Found(label, heads[start:], fields, names - start, notes=notes) if rows else None


def _process_row(process: Process) -> list[str]:
    return [
        _short(process.command),
        "; ".join(_read(each) for each in process.files[:_MOST_FILES]) or "-",
        str(process.pid),
        str(process.parent_pid),
        *_sizes(process),
    ]


def _kill_row(kill: Kill) -> list[str]:
    limit = _LIMITS.get(kill.limit_of, kill.limit_of)
    who = "the first process" if kill.is_main else "another process"
    return [_short(kill.command), who, plain(limit), str(kill.pid), *_sizes(kill)]


def _sizes(owner: Process | Kill) -> list[str]:
    """Return the anonymous, file-backed and shared memory of a process in MiB."""
    sizes = (owner.anon_bytes, owner.file_bytes, owner.shmem_bytes)
    return [scaled(size, MIB, 1) for size in sizes]


def _read(file: OpenFile) -> str:
    """Return the name of a file, with the bytes that were read or mapped: "w.pt, 1.2 GiB of 3.1 GiB"."""
    name, size = plain(PurePath(file.path).name), format_bytes(file.size_bytes, digits=1)
    if file.position_bytes is None:
        text = f"{name}, {format_bytes(file.mapped_bytes, digits=1)} of {size} mapped"
    else:
        text = f"{name}, {format_bytes(file.position_bytes, digits=1)} of {size}"
    return text if file.is_open else f"{text}, closed before"


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
