"""The tables of what a run found: RAM floors, survival, slow disks, passes, uses and ranks; of commands,
the kinds of their memory, their processes, and which ones were killed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import PurePath
from typing import Any, Final

from weighin.cell import FORK, NONE
from weighin.records.floor import Aim, Floor, searched
from weighin.records.metrics import (
    COLUMNS,
    METRICS,
    Metric,
    grouped,
    middle,
    outcome_of,
    per_model,
    sum_of_peaks,
    through_first_pass_ns,
    unreclaimable,
)
from weighin.records.run import IN_LABELS, Measured, Row, cells_of, varying
from weighin.records.series import Matrix, labels_among
from weighin.records.verdict import Typical, Verdict
from weighin.result import Kill, OpenFile, Outcome, Phase, Process, Ran, Result, Stack
from weighin.show import words
from weighin.show.table import Column, Entry, Lines, Table, pivot
from weighin.show.words import KINDS, plain, scaled
from weighin.text import few
from weighin.units import GIB, MIB, format_bytes, format_latency, format_rate, format_seconds

NOTE_RANKS: Final = (
    "The cgroup's peak counts each page once, with the page cache of the checkpoint; above the"
    " imports: minus the cgroup's memory when all ranks had imported torch. Unreclaimable:"
    " anonymous and shared memory above the imports. The sum of the ranks' peak RSS counts shared"
    " pages once for each rank; it is not the memory that the ranks need, although other tools"
    " print it."
)
RULE_RANKS: Final = (
    "Growth: flat if each further rank adds less than 0.25 times the model, linear from 0.75 times."
)
NOTE_DISKS: Final = (
    "Ready + first pass: the time until every byte of the model was read once, plus the first forward"
    " pass. The time of the load alone flatters a mapped model, which waits for the disk afterwards."
)
_NOTE_USES: Final = (
    "Each figure is a multiple of the model's size: anonymous memory, which the kernel cannot reclaim,"
    " minus the anonymous memory after the imports. A use has two figures: the largest during the use"
    " (sampled), and the one at the end of the use (exact)."
)
_NOTE_FORK: Final = "fork: the private memory that each of two forked processes adds (exact)."
_NOTE_PASSES: Final = (
    "A forward pass has three figures: its time, its major page faults (waits for the disk), and the bytes"
    " of evicted pages that it read again (refaults), as a multiple of the model's size."
)
_NOTE_ENDS: Final = (
    "(ends): the smallest RAM limit under which three of three loads ended, although they thrashed. Run"
    " weighin floor without --thrashing to find the larger limit under which no load thrashes."
)
BELOW_IMPORT: Final = (
    "Left out: above import x model, because the model is smaller than import torch."
)
_MOST_FILES: Final = 3  # in a table, of one process
_MOST_PROCESSES: Final = 20
_LEAST_SHARE: Final = 0.01  # of the memory of all processes; a smaller process has no row
_MOST_NAMES: Final = 8
_COMMAND_LENGTH: Final = 80
PROCESSES_NOTE: Final = (
    "Each process's share of the memory (PSS) when the command used most memory, sampled: a page that"
    " several processes share is divided among them."
)
_KINDS_OF_MEMORY: Final = (
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
_MOST_LIMITS: Final = 7
"""The largest number of RAM limits that fit, as table columns, a terminal of 80 characters."""


def findings(run: Measured) -> Iterator[Table]:
    """Yield a table each for ranks, uses, passes, slow disks, and floors or survival, if measured."""
    yield from ranks(run)
    yield from uses(run)
    yield from passes(run)
    yield from slow_disks(run)
    if run.has_floors:  # the limits of a search for floors form no matrix
        yield from floors(run)
    else:
        yield from survival(run)


def ranks(run: Measured) -> Iterator[Table]:
    """Yield a table of the memory of all ranks, unless no load by several ranks ended ok."""
    label = labels_among([each.cell for each in run.ranks])
    rows = []
    for each in run.ranks:
        growth = f"{each.growth} ({each.copies_per_rank:.2f}x a rank)" if each.growth else "-"
        rows += [
            [
                label(each.cell),
                str(number),
                scaled(middle(one.peaks.cgroup_bytes for one in repeats), GIB, 3),
                scaled(each.charges.get(number), each.model_bytes, 2),
                scaled(middle(map(unreclaimable, repeats)), each.model_bytes, 2),
                scaled(middle(one.peaks.pss_bytes for one in repeats), GIB, 3),
                scaled(middle(sum_of_peaks(one) or one.peaks.rss_bytes for one in repeats), GIB, 3),
                growth if number == max(each.by_ranks) else "",
            ]
            for number, repeats in each.by_ranks.items()
        ]
    columns = [
        Column("strategy", is_name=True),
        Column("ranks", is_name=True),
        Column("cgroup peak", "GiB"),
        Column("above the imports", "x model"),
        Column("unreclaimable (sampled)", "x model"),
        Column("PSS at ready", "GiB"),
        Column("sum of peak RSS", "GiB"),
        Column("growth"),
    ]
    if rows:
        notes = [NOTE_RANKS, RULE_RANKS, words.shared(run)]
        yield Table("Memory of all ranks", columns, rows, notes)


def uses(run: Measured) -> Iterator[Table]:
    """Yield a table of memory after the load, unless models ran nothing but forward passes."""
    if not any(result.cell.use for result in run.results):
        return
    loads = [one for one in run.results if one.cell.operation == "load"]
    name = names(run.rows_of(loads), without=("use",))
    yield pivot(
        "After the load",
        [("loaded", one) for one in loads]
        + [(one.cell.after_load, one) for one in loads if one.cell.after_load != NONE],
        lambda one: name[one[1].cell.series],
        lambda one: one[0],
        lambda ours: _use([result for _, result in ours], is_over=ours[0][0] != "loaded"),
        notes=[
            _NOTE_USES,
            *([_NOTE_FORK] if any(one.cell.use == FORK for one in run.results) else []),
            words.shared(run, without=("use",)),
        ],
    )


def _use(repeats: Sequence[Result], *, is_over: bool) -> str:
    if not is_over:
        return multiple(repeats, METRICS["ready_anon"])
    good = [result for result in repeats if result.outcome is Outcome.OK]
    if not good:
        ended = [one.outcome.value for one in repeats if one.outcome is not Outcome.SKIPPED]
        return ", ".join(dict.fromkeys(ended)) or "-"
    if children := [
        size for one in good if (size := one.use and max(one.use.children_private_bytes, default=0))
    ]:
        added = scaled(max(children), good[0].model_bytes, 2)
        return added if added == "-" else f"+{added}"
    most, after = COLUMNS["use_anon_sampled_bytes"], COLUMNS["use_anon_bytes"]
    return f"{multiple(good, most)} {multiple(good, after)}"


def multiple(results: Sequence[Result], figure: Metric) -> str:
    """Return the median of (the figure - anonymous memory after imports) / model size, as text."""
    found = middle(per_model(result, figure.read(result)) for result in results)
    return "-" if found is None else f"{max(found, 0.0):.2f}"


def passes(run: Measured) -> Iterator[Table]:
    """Yield a table of the forward passes, unless every model was called at most once.

    Of several repeats, the table shows the repeat whose passes took the median time.
    """
    name, shown = names(run.rows), []
    for repeats in run.by_series.values():
        called = [
            (one, [phase for phase in one.phases if phase.name == "forward"]) for one in repeats
        ]
        times = [sum(each.end_ns - each.start_ns for each in ours) for _, ours in called if ours]
        typical_ns = middle(times)
        for at, (one, ours) in enumerate(each for each in called if each[1]):
            if times[at] == typical_ns:
                shown += [(one, number, each) for number, each in enumerate(ours, 1)]
                break
    if max((number for _, number, _ in shown), default=0) > 1:
        yield pivot(
            "Forward passes",
            shown,
            lambda one: name[one[0].cell.series],
            lambda one: f"pass {one[1]}",
            lambda ours: _pass(ours[0][2], ours[0][0]),
            notes=[_NOTE_PASSES, words.shared(run)],
        )


def _pass(phase: Phase, result: Result) -> str:
    texts = [format_seconds(phase.end_ns - phase.start_ns), f"{phase.major_faults} faults"]
    if phase.workingset_refault_file is not None and result.model_bytes:
        again = phase.workingset_refault_file * result.page_bytes / result.model_bytes
        texts.append(f"{again:.2f}x reread")
    return ", ".join(texts)


def slow_disks(run: Measured) -> Iterator[Table]:
    """Yield a table of the time of each strategy on each disk, unless no disk was slowed."""

    def time(repeats: Sequence[Result]) -> str:
        time_ns = first_pass_ns(repeats)
        if time_ns is None:
            return outcome_of(each.outcome for each in repeats)
        return format_seconds(time_ns)

    if any(result.cell.disk for result in run.results):
        name = names(run.rows, without=("disk", "disk_latency"))
        notes = [NOTE_DISKS, words.shared(run)]
        yield pivot("Slow disks", run.results, lambda one: name[one.cell.series], disk_of, time, column_title=disk_words, notes=notes)  # fmt: skip


Disk = tuple[int | None, int | None]
"""A rate in bytes per second and a latency in nanoseconds; None means that the disk was not slowed."""


def disk_of(result: Result) -> Disk:
    return result.cell.disk_bytes_per_s, result.cell.disk_latency_ns


def disk_words(disk: Disk) -> str:
    rate, latency_ns = disk
    texts = (format_rate(rate) if rate else "", format_latency(latency_ns) if latency_ns else "")
    return ", ".join(filter(None, texts)) or "as fast as it is"


def first_pass_ns(repeats: Iterable[Result]) -> int | None:
    """Return the median time until the first forward pass ended; None if no ok repeat ran a pass."""
    return middle(through_first_pass_ns(one) for one in repeats if one.outcome is Outcome.OK)


def survival(run: Measured) -> Iterator[Table]:
    """Yield a table of strategies by RAM limits for each model measured under two or more limits."""
    return map(partial(_survival, run), run.matrices)


def _survival(run: Measured, matrix: Matrix) -> Table:
    labels, limits = matrix.labels, list(map(words.limit, matrix.limits))
    fields = [(*place, one) for place, one in sorted(matrix.fields.items(), key=itemgetter(0))]
    reasons = [
        f"{labels[row]} under {words.size(matrix.limits[column])} thrashes: {one.judgement.reason}"
        for row, column, one in fields
        if one.judgement and one.judgement.verdict is Verdict.THRASHES
    ]
    # The place of a field in its key, the names of the places, and what they are.
    axes = [(0, labels, KINDS[matrix.scene.operation].words["what"]), (1, limits, "RAM limit")]
    if len(limits) > max(_MOST_LIMITS, len(labels)):
        axes.reverse()
    (row, rows, name), (column, columns, _) = axes
    return pivot(
        "Survival under each limit",
        sorted(fields, key=itemgetter(row)),
        itemgetter(row),
        itemgetter(column),
        lambda ours: _lived(ours[0][2], f"{labels[ours[0][0]]}, {limits[ours[0][1]]}"),
        columns=range(len(columns)),
        row_title=rows.__getitem__,
        column_title=columns.__getitem__,
        name=name,
        notes=[*survival_notes(run), survival_caption(run, matrix)],
        reasons=reasons,
    )


def survival_notes(run: Measured) -> list[str]:
    """Return sentences that explain the fields of the table of survival."""
    most = max((result.cell.passes for result in run.results), default=0)
    used = {0: "", 1: " and for one forward pass"}.get(most, f" and for {most} forward passes")
    if any(result.cell.use for result in run.results):
        used = " and for the use of the model"
    kind = words.kind_of(run.rows)
    return [
        f"{kind.life}{used}. killed: by the kernel, for lack of memory.",
        f"thrashes: the cell's memory reached the limit, and it either {kind.lost}.",
    ]


def survival_caption(run: Measured, matrix: Matrix) -> str:
    rows = run.rows_of(field.result for field in matrix.fields.values())
    return words.shared(run, ("ram_limit_bytes", *IN_LABELS), rows)


def _lived(field: Typical, name: str) -> Entry:
    judgement, outcome = field.judgement, field.result.outcome
    if judgement:
        tip = f"{name}: {judgement.verdict}\n{judgement.reason}"
        return Entry(field.words, kind=judgement.verdict.value, tip=tip)
    kind = {Outcome.OK: "ok", Outcome.SKIPPED: "skipped"}.get(outcome, "failed")
    return Entry(field.words, kind=kind, tip=f"{name}: {outcome}\n{field.result.message}".rstrip())


def floors(run: Measured) -> Iterator[Table]:
    """Yield the table of RAM floors, with lines that explain the verdicts and the columns."""
    if not run.floors:
        return
    kind = KINDS[run.floors[0].cell.operation]
    is_command = kind is KINDS["command"]
    known = [(one.model_bytes, one.import_bytes) for one in run.floors]
    below = [model < imported for model, imported in known if model and imported]
    is_below = bool(below) and all(below)
    label = floor_label(run.floors)
    columns: list[tuple[Column, Callable[[Floor], Entry | str]]] = [
        (Column(kind.words["what"], is_name=True), label),
        (
            Column("RAM floor", "GiB"),
            lambda one: scaled(one.bytes, GIB, 3) + "\n(ends)" * _ends(one),
        ),
    ]
    if not is_command:
        columns.append((Column("floor", "x model"), lambda one: scaled(one.per_model, 1, 2)))
    if not is_command and not is_below:
        column = Column("above import", "x model", rank=1)
        columns.append((column, lambda one: scaled(one.above_import_per_model, 1, 2)))
    columns += [
        (Column("one step below"), lambda one: f"{scaled(one.step_bytes, MIB, 0)} MiB:\n{one.below}" if one.bytes else "-"),
        (Column("at the floor ready"), lambda one: _at(one, one.at_floor)),
        (Column("at 1.1x ready", rank=3), lambda one: _at(one, one.with_room)),
        (Column("no limit ready", rank=2), lambda one: _at(one, one.unlimited)),
    ]  # fmt: skip
    above = "above import: (floor - anonymous memory after `import torch`) / the model's size."
    notes = [
        kind.floor,
        *([_NOTE_ENDS] if any(map(_ends, run.floors)) else []),
        *([] if is_command else [BELOW_IMPORT if is_below else above]),
        f"{kind.ready} The search ran {sum(one.cells for one in run.floors)} cells in all.",
        words.shared(run, without=("ram_limit_bytes",)),
    ]
    rows = [[read(floor) for _, read in columns] for floor in run.floors]
    yield Table("RAM floors", [each for each, _ in columns], rows, notes, _reasons(run.floors))


def floor_label(floors: Sequence[Floor]) -> Callable[[Floor], str]:
    """Return the function that names a floor: its strategy, with the settings in which floors differ."""
    cells = [floor.cell for floor in floors]
    label = labels_among(cells)
    reads: list[Callable[[Any], str]] = [
        lambda cell: str(cell.model.title),
        lambda cell: str(cell.isolation),
        lambda cell: str(cell.after_load),
    ]

    def name(floor: Floor) -> str:
        same = [cell for cell in cells if cell.strategy == floor.cell.strategy]
        more = [read(floor.cell) for read in reads if len(set(map(read, same))) > 1]
        return " ".join([label(floor.cell), *more])

    return name


def _ends(floor: Floor) -> bool:
    return bool(floor.bytes) and floor.aim is Aim.ENDS


def _at(floor: Floor, typical: Typical | None) -> Entry | str:
    if typical is None:
        return "-"
    ready_ns, times = typical.result.ready_ns, floor.times(typical)
    texts = ["-" if ready_ns is None else format_seconds(ready_ns)]
    if typical.judgement is None:
        return texts[0]
    verdict = typical.judgement.verdict
    texts += [f"{times:.1f}x"] if times else []
    tip = f"{verdict}: {typical.judgement.reason}"
    return Entry("\n".join([*texts, verdict]), kind=verdict.value, tip=tip)


def _reasons(searched: Iterable[Floor]) -> list[str]:
    """Return a line for each floor that was not found, and for each verdict other than "survives"."""
    lines = []
    for floor in searched:
        if floor.message:
            lines.append(f"{floor.cell.strategy}: no floor: {floor.message}")
        for where, typical in (("at the floor", floor.at_floor), ("at 1.1x", floor.with_room)):
            if typical and typical.judgement and typical.judgement.verdict is not Verdict.SURVIVES:
                verdict, reason = typical.judgement.verdict, typical.judgement.reason
                lines.append(f"{floor.cell.strategy} {where} {verdict}: {reason}")
    return lines


def floor_as_dict(floor: Floor) -> dict[str, Any]:
    """Return a RAM floor for ``--json``; ``floor_bytes`` is None if the search found no floor."""
    cell = floor.cell

    def lived(typical: Typical | None) -> dict[str, Any] | None:
        if typical is None:
            return None
        judgement = typical.judgement
        return {
            "limit_bytes": typical.result.cell.ram_limit_bytes,
            "ready_ns": typical.result.ready_ns,
            "times": None if typical is floor.unlimited else floor.times(typical),
            "verdict": judgement.verdict.value if judgement else None,
            "reason": judgement.reason if judgement else "",
        }

    return {
        "strategy": cell.strategy,
        "model": cell.model.title,
        "isolation": cell.isolation,
        "device": cell.device,
        "dtype": cell.dtype,
        "format": cell.format,
        "use": cell.after_load,
        "options": cell.options,
        "environment": cell.environment,
        "floor_bytes": floor.bytes,
        "message": floor.message,
        "step_bytes": floor.step_bytes,
        "below": floor.below,
        "aim": floor.aim.value,
        "passed": floor.passed,
        "failed": floor.failed,
        "model_bytes": floor.model_bytes,
        "import_bytes": floor.import_bytes,
        "floor_per_model": floor.per_model,
        "above_import_per_model": floor.above_import_per_model,
        "cells": floor.cells,
        "unlimited": lived(floor.unlimited),
        "at_floor": lived(floor.at_floor),
        "with_room": lived(floor.with_room),
    }


def names(rows: Sequence[Row], without: Sequence[str] = ()) -> Mapping[str, str]:
    """Return a name for each series: its label, and the settings in which the rows differ."""
    label = labels_among(cells_of(rows))
    changing = [name for name in varying(rows) if name not in (*IN_LABELS, *without)]
    return {
        row["group"]: " · ".join(
            [label(row["cell"]), *(words.dimension(name, row[name]) for name in changing)]
        )
        for row in rows
    }


def about_commands(run: Measured) -> Iterator[Table | Lines]:
    """Yield the tables of kills, kinds of memory, processes and marked lines, and the stacks."""
    first: dict[str, tuple[str, Result, Ran]] = {}
    for one in run.results:
        if one.ran:
            limit = one.cell.ram_limit_bytes
            named = [plain(one.cell.strategy), *([words.size(limit)] if limit else [])]
            title = " ".join([*named, *one.cell.settings])
            first.setdefault(one.cell.series, (title, one, one.ran))
    # Of each command's measurements under all RAM limits, the one with the most memory.
    by_command = grouped(first.values(), lambda one: searched(one[1].cell).series).values()
    largest = [max(same, key=lambda one: one[2].needed_bytes or 0) for same in by_command]

    killed = [
        [
            title,
            _short(kill.command),
            "the first process" if kill.is_main else "another process",
            plain(_LIMITS.get(kill.limit_of, kill.limit_of)),
            str(kill.pid),
            *_sizes(kill),
        ]
        for title, _, ran in first.values()
        for kill in ran.kills
    ]
    heads = ["of", "killed", "which", "limit", "pid"]
    yield from _table("Killed for lack of memory", heads, 4, killed, [KILLS_NOTE], len(first))

    kinds = [[title, *row] for title, _, ran in largest if (row := _kinds(ran))]
    at_peak = "Kinds of memory at the peak"
    yield from _table(at_peak, ["of"], 1, kinds, [CHARGE_NOTE], len(largest), _KINDS_OF_MEMORY)

    processes: list[list[str]] = []
    notes = [PROCESSES_NOTE]
    for title, _, ran in largest:
        seen = [each for each in ran.processes if each.anon_bytes is not None]
        ordered = sorted(seen, key=_held, reverse=True)
        least = _LEAST_SHARE * sum(map(_held, seen))
        shown = [each for each in ordered[:_MOST_PROCESSES] if _held(each) >= least or each.files]
        for each in shown:
            reads = "; ".join(map(_read, each.files[:_MOST_FILES])) or "-"
            pids = (str(each.pid), str(each.parent_pid))
            processes.append([title, _short(each.command), reads, *pids, *_sizes(each)])
        if smaller := [each for each in seen if each not in shown]:
            notes.append(f"{title}: smaller processes are not shown: {_named(smaller)}.")
        if others := [each for each in ran.processes if each.anon_bytes is None]:
            notes.append(f"{title} also ran, at other times: {_named(others)}.")
        if ran.ended:
            left_running = few([plain(each) for each in ran.ended], _MOST_NAMES)
            notes.append(f"{title} left these running, which weighin ended: {left_running}.")
    heads = ["of", "command", "reads", "pid", "parent"]
    yield from _table("Processes at the peak", heads, 3, processes, notes, len(largest))

    lines: list[list[str]] = []
    for title, _, ran in largest:
        starts = [each.start_ns for each in ran.processes] or [mark.t_ns for mark in ran.marks[:1]]
        times = [format_seconds(max(mark.t_ns - min(starts), 0)) for mark in ran.marks]
        lines += [[title, plain(m.text), time] for m, time in zip(ran.marks, times, strict=True)]
    heads = ["of", "line", "after"]
    yield from _table("Marked lines of output", heads, 2, lines, [], len(largest), ())

    stacks = [
        "\n".join([
            f"{title}, process {stack.pid}, thread {plain(stack.thread)}, at {format_bytes(stack.usage_bytes, digits=1)}:",
            *(f"  {plain(frame)}" for frame in stack.frames),
            *([f"  > {plain(stack.code)}"] if stack.code else []),
        ])
        for title, result, _ in first.values()
        for stack in stacks_at_peak(result)
    ]  # fmt: skip
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
