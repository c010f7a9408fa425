"""The tables of what a run found: RAM floors, survival, slow disks, uses, ranks, and processes of commands."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from operator import itemgetter
from pathlib import PurePath
from typing import Any, Final

from weighin.cell import FORK, NONE, Cell
from weighin.records import metrics
from weighin.records.floor import Aim, Floor, searched
from weighin.records.metrics import COLUMNS, METRICS, Metric, grouped, middle, outcome_of
from weighin.records.series import IN_LABELS, Matrix, Measured, Row, cells_of, labels_among, varying
from weighin.records.verdict import Typical, Verdict
from weighin.result import Kill, OpenFile, Outcome, Process, Ran, Result, Sample
from weighin.show import words
from weighin.show.table import Column, Entry, Lines, Table, pivot
from weighin.show.words import KINDS, plain, scaled
from weighin.text import few
from weighin.units import GIB, MIB, format_bytes, format_seconds

NOTE_RANKS: Final = (
    "The cgroup's peak counts each page once, with the page cache of the checkpoint; above the"
    " imports: minus the cgroup's memory when all ranks had imported torch. Unreclaimable:"
    " anonymous and shared memory above the imports. The sum of the ranks' peak RSS counts shared"
    " pages once for each rank; it is not the memory that the ranks need, although other tools"
    " print it.",
    "Growth: flat if each further rank adds less than 0.25 times the model, linear from 0.75 times.",
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
_NOTE_ENDS: Final = (
    "(ends): the smallest RAM limit under which three of three loads ended, although they thrashed. Run"
    " weighin floor without --thrashing to find the larger limit under which no load thrashes."
)
_NOTE_PROCESSES: Final = (
    "Each process's share of the memory (PSS) when the command used most memory, sampled: a page that"
    " several processes share is divided among them."
)
_KINDS_OF_MEMORY: Final = (
    "anonymous", "shared", "locked", "kernel", "sockets", "page tables", "slab",
    "page cache", "given back", "kernel's caches",
)  # fmt: skip
_NOTE_KINDS: Final = (
    "In the sample with the most needed memory. The command needs the first five kinds; page tables and"
    " slab are parts of the kernel's. The kernel reclaims the last three."
)
_NOTE_KILLS: Final = (
    "The memory is that of the killed process at the instant of the kill, from the kernel's log."
)
_LIMITS: Final = {"": "its own", "machine": "the machine's memory", "unknown": "not known"}
_MOST_FILES: Final = 3  # in a table, of one process
_MOST_NAMES: Final = 8
_COMMAND_LENGTH: Final = 80


def findings(run: Measured) -> Iterator[Table]:
    """Yield a table each for ranks, uses, slow disks, and floors or survival, if measured."""
    yield from ranks(run)
    yield from uses(run)
    yield from slow_disks(run)
    # The limits of a search for floors form no matrix.
    yield from floors(run) if run.has_floors else survival(run)


def names(
    rows: Sequence[Row], without: Sequence[str], series: Callable[[Cell], str]
) -> Mapping[str, str]:
    """Return a name for each ``series``: its label, and the settings in which the rows differ, except
    ``without``."""
    label = labels_among(cells_of(rows))
    changing = [name for name in varying(rows) if name not in (*IN_LABELS, *without)]
    return {
        series(row["cell"]): " · ".join(
            [label(row["cell"]), *(words.dimension(name, row[name]) for name in changing)]
        )
        for row in rows
    }


def ranks(run: Measured) -> Iterator[Table]:
    """Yield a table of the memory of all ranks, unless no load by several ranks ended ok."""
    label = labels_among([each.cell for each in run.ranks])
    rows = [
        [
            label(each.cell),
            str(number),
            scaled(middle(one.peaks.cgroup_bytes for one in repeats), GIB, 3),
            scaled(each.charges.get(number), each.model_bytes, 2),
            scaled(middle(map(unreclaimable, repeats)), each.model_bytes, 2),
            scaled(middle(one.peaks.pss_bytes for one in repeats), GIB, 3),
            scaled(
                middle(metrics.sum_of_peaks(one) or one.peaks.rss_bytes for one in repeats), GIB, 3
            ),
            each.growth if number == max(each.by_ranks) else "",
        ]
        for each in run.ranks
        for number, repeats in each.by_ranks.items()
    ]
    columns = [
        *(Column(name, is_name=True) for name in ("strategy", "ranks")),
        Column("cgroup peak", "GiB"),
        *(Column(name, "x model") for name in ("above the imports", "unreclaimable (sampled)")),
        *(Column(name, "GiB") for name in ("PSS at ready", "sum of peak RSS")),
        Column("growth"),
    ]
    if rows:
        yield Table("Memory of all ranks", columns, rows, [*NOTE_RANKS, words.shared(run)])


def unreclaimable(result: Result) -> int | None:
    """Return the sampled maximum of the ranks' anonymous and shared memory, above the imports'."""
    most = result.peaks.unreclaimable_sampled_bytes or result.peaks.anon_sampled_bytes
    before = result.import_bytes
    return None if most is None or before is None else max(0, most - before)


def uses(run: Measured) -> Iterator[Table]:
    """Yield a table of memory after the load, unless models ran nothing but forward passes."""
    loads = [one for one in run.results if one.cell.operation == "load"]
    if not any(one.cell.use for one in loads):
        return

    def without_use(cell: Cell) -> str:
        return replace(cell, use="", passes=0).series

    titles = names(run.rows_of(loads), ("use",), without_use)
    notes = [_NOTE_USES, words.shared(run, without=("use",))]
    if any(one.cell.use == FORK for one in loads):
        notes.insert(1, "fork: the private memory that each of two forked processes adds (exact).")

    def memory(found: Sequence[tuple[str, Result]]) -> str:
        repeats = [result for _, result in found]
        if found[0][0] == "loaded":
            return multiple(repeats, METRICS["ready_anon"])
        good = [result for result in repeats if result.outcome is Outcome.OK]
        if not good:
            ended = [one.outcome.value for one in repeats if one.outcome is not Outcome.SKIPPED]
            return ", ".join(dict.fromkeys(ended)) or "-"
        children = [size for one in good if one.use for size in one.use.children_private_bytes]
        if any(children):
            added = scaled(max(children), good[0].model_bytes, 2)
            return added if added == "-" else f"+{added}"
        both = (COLUMNS["use_anon_sampled_bytes"], COLUMNS["use_anon_bytes"])
        return " ".join(multiple(good, figure) for figure in both)

    used = [(one.cell.after_load, one) for one in loads if one.cell.after_load != NONE]
    yield pivot(
        "After the load",
        [("loaded", one) for one in loads] + used,
        lambda one: without_use(one[1].cell),
        itemgetter(0),
        memory,
        row_title=titles.__getitem__,
        notes=notes,
    )


def multiple(results: Sequence[Result], figure: Metric) -> str:
    """Return the median of (the figure - anonymous memory after imports) / model size, as text."""
    found = middle(metrics.per_model(result, figure.read(result)) for result in results)
    return "-" if found is None else f"{max(found, 0.0):.2f}"


def slow_disks(run: Measured) -> Iterator[Table]:
    """Yield a table of the time of each strategy on each disk, unless no disk was slowed."""
    if not any(row["disk"] or row["disk_latency"] for row in run.rows):
        return

    def without_disk(cell: Cell) -> str:
        return replace(cell, disk_bytes_per_s=None, disk_latency_ns=None).series

    def disk(row: Row) -> str:
        return ", ".join(filter(None, (row["disk"], row["disk_latency"]))) or "as fast as it is"

    def time(rows: Sequence[Row]) -> str:
        repeats = run.by_series[rows[0]["group"]]
        good = [one for one in repeats if one.outcome is Outcome.OK]
        time_ns = middle(map(metrics.through_first_pass_ns, good))
        if time_ns is None:
            return outcome_of(each.outcome for each in repeats)
        return format_seconds(time_ns)

    titles = names(run.rows, ("disk", "disk_latency"), without_disk)
    yield pivot(
        "Slow disks",
        run.rows,
        lambda row: without_disk(row["cell"]),
        disk,
        time,
        row_title=titles.__getitem__,
        notes=[NOTE_DISKS, words.shared(run)],
    )


def survival(run: Measured) -> Iterator[Table]:
    """Yield a table of strategies by RAM limits for each model measured under two or more limits."""
    for matrix in run.matrices:
        yield _survival(run, matrix)


def _survival(run: Measured, matrix: Matrix) -> Table:
    labels = matrix.labels
    limits = ["no limit" if one is None else words.size(one) for one in matrix.limits]
    fields = sorted(matrix.fields.items(), key=itemgetter(0))
    thrashing = [
        f"{labels[row]} under {limits[column]} thrashes: {one.judgement.reason}"
        for (row, column), one in fields
        if one.judgement and one.judgement.verdict is Verdict.THRASHES
    ]

    def lived(found: Sequence[tuple[tuple[int, int], Typical]]) -> Entry:
        ((row, column), one) = found[0]
        result, name = one.result, f"{labels[row]}, {limits[column]}"
        if one.judgement:
            tip = f"{name}: {one.judgement.verdict}\n{one.judgement.reason}"
            return Entry(one.words, kind=one.judgement.verdict.value, tip=tip)
        kind = {Outcome.OK: "ok", Outcome.SKIPPED: "skipped"}.get(result.outcome, "failed")
        tip = f"{name}: {result.outcome}\n{result.message}".rstrip()
        return Entry(one.words, kind=kind, tip=tip)

    kind = KINDS[matrix.scene.operation]
    # Of the rows and of the columns: the place in a field's key, the titles, and what they are.
    axes = [(0, labels, kind.words["what"]), (1, limits, "RAM limit")]
    if len(limits) > max(7, len(labels)):  # 7 columns fit a terminal of 80 characters
        axes.reverse()
    (down, row_titles, name), (across, column_titles, _) = axes
    cells = [one.cell for one in run.results]
    most = max(cell.passes for cell in cells)
    used = {0: "", 1: " and for one forward pass"}.get(most, f" and for {most} forward passes")
    if any(cell.use for cell in cells):
        used = " and for the use of the model"
    measured = run.rows_of(one.result for one in matrix.fields.values())
    return pivot(
        "Survival under each limit",
        sorted(fields, key=lambda one: one[0][down]),
        lambda one: one[0][down],
        lambda one: one[0][across],
        lived,
        columns=range(len(column_titles)),
        row_title=row_titles.__getitem__,
        column_title=column_titles.__getitem__,
        name=name,
        notes=[
            f"{kind.life}{used}. killed: by the kernel, for lack of memory.",
            f"thrashes: the cell's memory reached the limit, and it either {kind.lost}.",
            words.shared(run, ("ram_limit_bytes", *IN_LABELS), measured),
        ],
        reasons=thrashing,
    )


def floors(run: Measured) -> Iterator[Table]:
    """Yield the table of RAM floors, with lines that explain the verdicts and the columns."""
    if not run.floors:
        return
    kind = KINDS[run.floors[0].cell.operation]
    is_command = kind is KINDS["command"]
    known = [(one.model_bytes, one.import_bytes) for one in run.floors]
    below = [model < imported for model, imported in known if model and imported]
    is_below = bool(below) and all(below)
    ends = [one for one in run.floors if one.bytes and one.aim is Aim.ENDS]

    def lived(floor: Floor, typical: Typical | None) -> Entry | str:
        if typical is None:
            return "-"
        ready_ns, judgement = typical.result.ready_ns, typical.judgement
        text = "-" if ready_ns is None else format_seconds(ready_ns)
        if judgement is None:
            return text
        times = floor.times(typical)
        lines = [text, *([f"{times:.1f}x"] if times else []), judgement.verdict]
        tip = f"{judgement.verdict}: {judgement.reason}"
        return Entry("\n".join(lines), kind=judgement.verdict.value, tip=tip)

    columns: list[tuple[Column, Callable[[Floor], Entry | str]]] = [
        (Column(kind.words["what"], is_name=True), floor_label(run.floors)),
        (Column("RAM floor", "GiB"), lambda one: scaled(one.bytes, GIB, 3) + "\n(ends)" * (one in ends)),
    ]  # fmt: skip
    notes = [kind.floor, *([_NOTE_ENDS] if ends else [])]
    if not is_command:
        columns.append((Column("floor", "x model"), lambda one: scaled(one.per_model, 1, 2)))
        notes.append(words.BELOW_IMPORT if is_below else "above import: (floor - anonymous memory after `import torch`) / the model's size.")  # fmt: skip
    if not is_command and not is_below:
        column = Column("above import", "x model", rank=1)
        columns.append((column, lambda one: scaled(one.above_import_per_model, 1, 2)))
    columns += [
        (Column("one step below"), lambda one: f"{scaled(one.step_bytes, MIB, 0)} MiB:\n{one.below}" if one.bytes else "-"),
        (Column("at the floor ready"), lambda one: lived(one, one.at_floor)),
        (Column("at 1.1x ready", rank=3), lambda one: lived(one, one.with_room)),
        (Column("no limit ready", rank=2), lambda one: lived(one, one.unlimited)),
    ]  # fmt: skip
    cells = sum(one.cells for one in run.floors)
    notes.append(f"{kind.ready} The search ran {cells} cells in all.")
    notes.append(words.shared(run, without=("ram_limit_bytes",)))
    reasons = []
    for floor in run.floors:
        strategy = floor.cell.strategy
        if floor.message:
            reasons.append(f"{strategy}: no floor: {floor.message}")
        for where, typical in (("at the floor", floor.at_floor), ("at 1.1x", floor.with_room)):
            judgement = typical and typical.judgement
            if judgement and judgement.verdict is not Verdict.SURVIVES:
                reasons.append(f"{strategy} {where} {judgement.verdict}: {judgement.reason}")
    rows = [[read(floor) for _, read in columns] for floor in run.floors]
    yield Table("RAM floors", [each for each, _ in columns], rows, notes, reasons)


def floor_label(floors: Sequence[Floor]) -> Callable[[Floor], str]:
    """Return the function that names a floor: its strategy, with the settings in which floors differ."""
    cells = [floor.cell for floor in floors]
    label = labels_among(cells)

    def settings(cell: Cell) -> tuple[str, str, str]:
        return cell.model.title, cell.isolation, cell.after_load

    def name(floor: Floor) -> str:
        same = [settings(cell) for cell in cells if cell.strategy == floor.cell.strategy]
        differs = (len({*each}) > 1 for each in zip(*same, strict=True))
        return " ".join([label(floor.cell), *compress(settings(floor.cell), differs)])

    return name


def floor_as_dict(floor: Floor) -> dict[str, Any]:
    """Return a RAM floor for ``--json``; ``floor_bytes`` is None if the search found no floor."""

    def lived(typical: Typical | None) -> dict[str, Any] | None:
        if typical is None:
            return None
        return {
            "limit_bytes": typical.result.cell.ram_limit_bytes,
            "ready_ns": typical.result.ready_ns,
            "times": None if typical is floor.unlimited else floor.times(typical),
            "verdict": typical.judgement.verdict.value if typical.judgement else None,
            "reason": typical.judgement.reason if typical.judgement else "",
        }

    cell = floor.cell
    of_cell = ("strategy", "isolation", "device", "dtype", "format", "options", "environment")
    of_floor = (
        "message", "step_bytes", "below", "passed", "failed", "model_bytes", "import_bytes", "cells",
        "above_import_per_model",
    )  # fmt: skip
    return {
        **{name: getattr(cell, name) for name in of_cell},
        "model": cell.model.title,
        "use": cell.after_load,
        "aim": floor.aim.value,
        "floor_bytes": floor.bytes,
        "floor_per_model": floor.per_model,
        **{name: getattr(floor, name) for name in of_floor},
        **{one: lived(getattr(floor, one)) for one in ("unlimited", "at_floor", "with_room")},
    }


def about_commands(run: Measured) -> Iterator[Table | Lines]:
    """Yield the tables of kills, kinds of memory, processes and marked lines, and the stacks at the peak."""
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

    kinds, processes, marked, notes = [], [], [], [_NOTE_PROCESSES]
    kills = [
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
    for title, _, ran in largest:
        seen = [each for each in ran.processes if each.anon_bytes is not None]
        ordered = sorted(seen, key=_held, reverse=True)
        least = 0.01 * sum(map(_held, seen))
        shown = [each for each in ordered[:20] if _held(each) >= least or each.files]
        for each in shown:
            reads = "; ".join(map(_read, each.files[:_MOST_FILES])) or "-"
            pids = (str(each.pid), str(each.parent_pid))
            processes.append([title, _short(each.command), reads, *pids, *_sizes(each)])
        if smaller := [each for each in seen if each not in shown]:
            notes.append(f"{title}: smaller processes are not shown: {_named(smaller)}.")
        if others := [each for each in ran.processes if each.anon_bytes is None]:
            notes.append(f"{title} also ran, at other times: {_named(others)}.")
        if ran.ended:
            left_running = few(list(map(plain, ran.ended)), _MOST_NAMES)
            notes.append(f"{title} left these running, which weighin ended: {left_running}.")
        if ran.at_peak and ran.at_peak.kernel_bytes is not None:  # a cgroup's
            kinds.append([title, *_kinds(ran.at_peak)])
        starts = [each.start_ns for each in ran.processes] or [mark.t_ns for mark in ran.marks[:1]]
        marked += [
            [title, plain(mark.text), format_seconds(max(mark.t_ns - min(starts), 0))]
            for mark in ran.marks
        ]

    of_process = ("anonymous", "file", "shared")
    for title, heads, name_columns, sizes, rows, about, commands in (
        ("Killed for lack of memory", ("of", "killed", "which", "limit", "pid"), 4, of_process, kills, [_NOTE_KILLS], first),
        ("Kinds of memory at the peak", ("of",), 1, _KINDS_OF_MEMORY, kinds, [_NOTE_KINDS], largest),
        ("Processes at the peak", ("of", "command", "reads", "pid", "parent"), 3, of_process, processes, notes, largest),
        ("Marked lines of output", ("of", "line", "after"), 2, (), marked, [], largest),
    ):  # fmt: skip
        columns = [Column(head, is_name=at < name_columns) for at, head in enumerate(heads)]
        columns += [Column(size, "MiB") for size in sizes]
        start = 0 if len(commands) > 1 else 1  # a single command needs no column of its name
        if rows:
            yield Table(title, columns[start:], [row[start:] for row in rows], about)

    if stacks := [text for title, _, ran in first.values() for text in _stacks(title, ran)]:
        yield Lines("Stacks at the peak", ["\n\n".join(stacks)], "verbatim")


def _stacks(title: str, ran: Ran) -> Iterator[str]:
    """Yield, of the Python stacks that were read, those at the highest memory of the command."""
    found = [stack for stack in ran.stacks if stack.frames]
    most = max((stack.usage_bytes for stack in found), default=0)
    for stack in (one for one in found if one.usage_bytes == most):
        where = f"{title}, process {stack.pid}, thread {plain(stack.thread)}"
        code = [f"  > {plain(stack.code)}"] if stack.code else []
        frames = (f"  {plain(frame)}" for frame in stack.frames)
        yield "\n".join([f"{where}, at {format_bytes(most, digits=1)}:", *frames, *code])


def _kinds(at: Sample) -> list[str]:
    caches = at.kernel_reclaimable_bytes or 0
    needed = (at.anon_bytes, at.shmem_bytes, at.locked_bytes, (at.kernel_bytes or 0) - caches)
    slab = None if at.slab_bytes is None else at.slab_bytes - caches
    parts = (at.socket_bytes, at.page_tables_bytes, slab)
    rest = (at.page_cache_bytes, at.freed_bytes, caches)
    return [scaled(size, MIB, 1) for size in (*needed, *parts, *rest)]


def _sizes(owner: Process | Kill) -> list[str]:
    return [scaled(one, MIB, 1) for one in (owner.anon_bytes, owner.file_bytes, owner.shmem_bytes)]


def _held(process: Process) -> int:
    return (process.anon_bytes or 0) + (process.shmem_bytes or 0) + (process.file_bytes or 0)


def _read(file: OpenFile) -> str:
    """Return the name of a file, with the bytes that were read or mapped: "w.pt, 1.2 GiB of 3.1 GiB"."""
    is_mapped = file.position_bytes is None
    seen_bytes = file.mapped_bytes if file.position_bytes is None else file.position_bytes
    seen, size = (format_bytes(one, digits=1) for one in (seen_bytes, file.size_bytes))
    text = f"{plain(PurePath(file.path).name)}, {seen} of {size}{' mapped' * is_mapped}"
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
