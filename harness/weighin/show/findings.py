"""The tables of what a run found: RAM floors, survival, slow disks, passes, uses and ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from weighin.cell import FORK, NONE
from weighin.records.floor import Aim, Floor
from weighin.records.metrics import (
    COLUMNS,
    METRICS,
    Metric,
    middle,
    outcome_of,
    per_model,
    sum_of_peaks,
    through_first_pass_ns,
    unreclaimable,
)
from weighin.records.run import IN_LABELS, Measured, Row, cells_of, varying
from weighin.records.series import Matrix, RankSeries, labels_among
from weighin.records.verdict import Typical, Verdict
from weighin.result import Outcome, Phase, Result
from weighin.show import words
from weighin.show.table import Column, Entry, Table, pivot
from weighin.show.words import KINDS, scaled
from weighin.units import GIB, MIB, format_latency, format_rate, format_seconds

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
    rows = [
        [
            label(each.cell),
            str(number),
            scaled(middle(one.peaks.cgroup_bytes for one in repeats), GIB, 3),
            scaled(each.charges.get(number), each.model_bytes, 2),
            scaled(middle(map(unreclaimable, repeats)), each.model_bytes, 2),
            scaled(middle(one.peaks.pss_bytes for one in repeats), GIB, 3),
            scaled(middle(sum_of_peaks(one) or one.peaks.rss_bytes for one in repeats), GIB, 3),
            _growth(each) if number == max(each.by_ranks) else "",
        ]
        for each in run.ranks
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


def _growth(each: RankSeries) -> str:
    return f"{each.growth} ({each.copies_per_rank:.2f}x a rank)" if each.growth else "-"


def uses(run: Measured) -> Iterator[Table]:
    """Yield a table of memory after the load, unless models ran nothing but forward passes."""
    if not any(result.cell.use for result in run.results):
        return
    loads = [one for one in run.results if one.cell.operation == "load"]
    name = _names(run.rows_of(loads), without=("use",))
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
    called = {
        series: [one for one in repeats if _passes(one)]
        for series, repeats in run.by_series.items()
    }
    if not any(len(_passes(one)) > 1 for repeats in called.values() for one in repeats):
        return
    name = _names(run.rows)
    typical = []
    for repeats in filter(None, called.values()):
        typical_ns = middle(map(_spent_ns, repeats))
        typical.append(next(one for one in repeats if _spent_ns(one) == typical_ns))
    yield pivot(
        "Forward passes",
        [(one, number, each) for one in typical for number, each in enumerate(_passes(one), 1)],
        lambda one: name[one[0].cell.series],
        lambda one: f"pass {one[1]}",
        lambda ours: _pass(ours[0][2], ours[0][0]),
        notes=[_NOTE_PASSES, words.shared(run)],
    )


def _passes(result: Result) -> list[Phase]:
    return [phase for phase in result.phases if phase.name == "forward"]


def _spent_ns(result: Result) -> int:
    return sum(phase.end_ns - phase.start_ns for phase in _passes(result))


def _pass(phase: Phase, result: Result) -> str:
    texts = [format_seconds(phase.end_ns - phase.start_ns), f"{phase.major_faults} faults"]
    if phase.workingset_refault_file is not None and result.model_bytes:
        again = phase.workingset_refault_file * result.page_bytes / result.model_bytes
        texts.append(f"{again:.2f}x reread")
    return ", ".join(texts)


def slow_disks(run: Measured) -> Iterator[Table]:
    """Yield a table of the time of each strategy on each disk, unless no disk was slowed."""
    if any(result.cell.disk for result in run.results):
        name = _names(run.rows, without=("disk", "disk_latency"))
        yield pivot(
            "Slow disks",
            run.results,
            lambda one: name[one.cell.series],
            disk_of,
            _over_disk,
            column_title=disk_words,
            notes=[NOTE_DISKS, words.shared(run)],
        )


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


def _over_disk(repeats: Sequence[Result]) -> str:
    time_ns = first_pass_ns(repeats)
    if time_ns is None:
        return outcome_of(each.outcome for each in repeats)
    return format_seconds(time_ns)


def survival(run: Measured) -> Iterator[Table]:
    """Yield a table of strategies by RAM limits for each model measured under two or more limits."""
    for matrix in run.matrices:
        labels = matrix.labels
        fields = [(row, matrix.limits[at], one) for (row, at), one in matrix.fields.items()]
        fields.sort(key=lambda one: (one[0], matrix.limits.index(one[1])))
        reasons = [
            f"{labels[row]} under {words.size(limit)} thrashes: {one.judgement.reason}"
            for row, limit, one in fields
            if one.judgement and one.judgement.verdict is Verdict.THRASHES
        ]
        about: dict[str, Any] = {
            "title": "Survival under each limit",
            "items": fields,
            "entry": lambda ours, labels=labels: _lived(ours[0][2], labels[ours[0][0]], ours[0][1]),
            "notes": [*survival_notes(run), survival_caption(run, matrix)],
            "reasons": reasons,
        }
        if len(matrix.limits) > max(_MOST_LIMITS, len(labels)):  # limits are rows
            fields.sort(key=lambda one: matrix.limits.index(one[1]))
            yield pivot(
                row=lambda one: one[1],
                column=lambda one: one[0],
                columns=range(len(labels)),
                row_title=words.limit,
                column_title=labels.__getitem__,
                name="RAM limit",
                **about,
            )
        else:
            yield pivot(
                row=lambda one: one[0],
                column=lambda one: one[1],
                columns=matrix.limits,
                row_title=labels.__getitem__,
                column_title=words.limit,
                name=KINDS[matrix.scene.operation].words["what"],
                **about,
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


def _lived(field: Typical, label: str, limit: int | None) -> Entry:
    name = f"{label}, {words.limit(limit)}"
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
        (Column("RAM floor", "GiB"), lambda one: scaled(one.bytes, GIB, 3) + _ends(one)),
        *([] if is_command else [(Column("floor", "x model"), _per_model)]),
        *(
            []
            if is_command or is_below
            else [(Column("above import", "x model", rank=1), _above_import)]
        ),
        (Column("one step below"), _below),
        (Column("at the floor ready"), lambda one: _at(one, one.at_floor)),
        (Column("at 1.1x ready", rank=3), lambda one: _at(one, one.with_room)),
        (Column("no limit ready", rank=2), lambda one: _at(one, one.unlimited)),
    ]
    above = "above import: (floor - anonymous memory after `import torch`) / the model's size."
    ends = any(floor.aim is Aim.ENDS and floor.bytes is not None for floor in run.floors)
    notes = [
        kind.floor,
        *([_NOTE_ENDS] if ends else []),
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


def _per_model(floor: Floor) -> str:
    return scaled(floor.per_model, 1, 2)


def _above_import(floor: Floor) -> str:
    return scaled(floor.above_import_per_model, 1, 2)


def _ends(floor: Floor) -> str:
    return "\n(ends)" if floor.bytes and floor.aim is Aim.ENDS else ""


def _below(floor: Floor) -> str:
    """Return the search's last step in MiB, and how the load failed at one step below the floor."""
    return f"{scaled(floor.step_bytes, MIB, 0)} MiB:\n{floor.below}" if floor.bytes else "-"


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


def _names(rows: Sequence[Row], without: Sequence[str] = ()) -> Mapping[str, str]:
    """Return a name for each series: its label, and the settings in which the rows differ."""
    label = labels_among(cells_of(rows))
    changing = [name for name in varying(rows) if name not in (*IN_LABELS, *without)]
    return {
        row["group"]: " · ".join(
            [label(row["cell"]), *(words.dimension(name, row[name]) for name in changing)]
        )
        for row in rows
    }
