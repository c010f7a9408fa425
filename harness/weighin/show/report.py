"""The report of a run as one document, which the terminal, report.md and report.html show.

A setting in which rows differ, such as the dtype, is a column; one that all share is in the caption.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from weighin.records import series
from weighin.records.explanation import answer as explained
from weighin.records.floor import Aim, Floor
from weighin.records.metrics import COLUMNS, Metric, grouped
from weighin.records.series import DIMENSIONS, IN_LABELS, Measured, Row, cells_of, labels_among
from weighin.records.verdict import Verdict
from weighin.result import Outcome
from weighin.show import words
from weighin.show.findings import about_commands, findings, floor_label
from weighin.show.table import Column, Entry, Lines, Table, listed
from weighin.show.words import ABOVE_IMPORT, HEADINGS, KINDS, OF_USES, plain
from weighin.text import one_line, printable
from weighin.units import GIB

FIGURES: Final = "How to read the figures"
_HELP: Final = "What the figures mean, and which are exact: weighin help figures"
# Each combination of these properties has a table of its own, because its figures are not comparable.
_APART: Final = ("operation", "model", "device")
SCENE: Final = tuple(name for name in DIMENSIONS if name not in IN_LABELS)
"""Rows that are equal in all of these settings are compared with each other."""
_UNITS: Final = {"bytes": "GiB", "ns": "s"}  # in tables
_MOST_SCENES: Final = 16
_IN_CSV: Final = (
    "strategy", *DIMENSIONS, "outcome", "last_phase", "message", "needed_is_sampled", "repeats", "ok",
    *(f"{name}{end}" for name in COLUMNS for end in ("", "_min", "_max")),
)  # fmt: skip


def document(run: Measured) -> list[Table | Lines]:
    """Return the report of a run: the answer first, then what was found, then every figure."""
    found, others = _parts(run)
    head = Lines("Answer", answer(run), "answer")
    heads = ("figure", "unit", "meaning", "accuracy")
    figures = Table.of(heads, explained_figures(run.rows), names=4, title=FIGURES)
    return [head, *found, *others, *([figures] if run.rows else [])]


def terminal(run: Measured) -> list[Table | Lines]:
    """Return the report in the order of a terminal: the answer comes last, where it is seen."""
    found, others = _parts(run)
    notes = [words.shared(run), _HELP] if run.rows else []
    return [*others, *found, Lines("", notes, "dim"), Lines("", answer(run)[:3], "answer")]


def _parts(run: Measured) -> tuple[list[Table], list[Table | Lines]]:
    """Return the tables of what was found, and the parts with every figure and reason."""
    shared, others = words.shared(run), list[Table | Lines]()
    found = [replace(one, notes=[n for n in one.notes if n != shared]) for one in findings(run)]
    if run.rows:
        others = [*tables(run), Lines("Not ok", _failures(run.rows)), *about_commands(run)]
    refused = [result for result in run.results if result.allocator_summary]
    for strategy, ours in grouped(refused, lambda one: plain(one.cell.strategy)).items():
        texts = "\n\n".join(printable(one.allocator_summary.strip(), "\n") for one in ours)
        title = f"{strategy} ran out of GPU memory: the allocator's summary"
        others.append(Lines(title, [texts], "verbatim"))
    others.append(Lines("Warnings", words.warnings(run), "warning"))
    return found, [part for part in others if isinstance(part, Table) or part.lines]


def tables(run: Measured) -> Iterator[Table]:
    """Yield a table of all results for each operation, model and device."""
    changing = series.varying(run.rows)
    by = [name for name in _APART if name in changing]
    names, groups = [name for name in changing if name not in by], [*words.apart(run.rows, by)]
    for heading, group in groups:
        title = f"All results: {heading}" if heading else "All results"
        notes = words.notes(run) if group is groups[-1][1] else []
        yield table(title, group, names, figures_of(group), notes)


def table(
    title: str,
    rows: Sequence[Row],
    names: Sequence[str],
    figures: Sequence[Metric],
    notes: Sequence[str] = (),
) -> Table:
    """Return a table of these rows: their labels, the settings ``names``, the outcome and figures."""
    label, kind = labels_among(cells_of(rows)), words.kind_of(rows)
    shown = [name for name in names if name not in IN_LABELS]
    headings = kind.headings if len(words.kinds_of(rows)) == 1 else {}
    columns = [
        Column(kind.words["what"], is_name=True),
        *(
            Column(HEADINGS.get(name, name), is_name="limit" not in name, rank=int(name == "use"))
            for name in shown
        ),
        Column("outcome", is_name=True),
        *(
            Column(headings.get(f.key, f.heading), _UNITS.get(f.unit, f.unit), rank=f.rank)
            for f in figures
        ),
    ]

    def setting(name: str, row: Row) -> Entry:
        # No RAM limit is sorted as a very large one.
        key = float(row[name] or 2**63) if name == "ram_limit_bytes" else None
        return Entry(words.setting(name, row), key=key)

    def figure(row: Row, one: Metric) -> Entry:
        """Return a figure without the unit, and its range; "≥" precedes a lower bound."""
        scale, digits = (GIB, 3) if one.unit == "bytes" else (1, 2 if one.unit else 0)
        found = (row[f"{one.key}{end}"] for end in ("", "_min", "_max"))
        text, low, high = (words.scaled(value, scale, digits) for value in found)
        bound = "≥ " if one.at_least and text != "-" and row[one.at_least] else ""
        return Entry(f"{bound}{text}", "" if low == high else f"{low}..{high}", key=row[one.key])

    kinds = {Outcome.OK: "ok", Outcome.SKIPPED: "skipped"}
    fields: list[list[Entry | str]] = [
        [
            plain(label(row["cell"])),
            *(setting(name, row) for name in shown),
            Entry(words.ending(row), kind=kinds.get(row["outcome"], "failed")),
            *(figure(row, one) for one in figures),
        ]
        for row in rows
    ]
    return Table(title, columns, fields, notes)


def figures_of(rows: Sequence[Row]) -> list[Metric]:
    """Return the figures that a table of these rows needs."""
    keys = dict.fromkeys(key for kind in words.kinds_of(rows) for key in kind.figures)
    return [
        COLUMNS[key]
        for key in keys
        if (COLUMNS[key].is_usual or has(rows, key))
        and (key not in OF_USES or words.has_uses(rows))
        and (key != ABOVE_IMPORT or not is_below_import(rows))
    ]


def has(rows: Iterable[Row], name: str) -> bool:
    return any(row[name] is not None for row in rows)


def is_below_import(rows: Iterable[Row]) -> bool:
    """Return whether every model is smaller than ``import torch``, so that copies cannot be counted."""
    loads = [row for row in rows if row["operation"] == "load"]
    sizes = [(row["model_bytes"] or 0, row["baseline_rss_bytes"]) for row in loads]
    below = [size < before for size, before in sizes if before is not None]
    return bool(below) and all(below)


def explained_figures(rows: Sequence[Row] = ()) -> list[tuple[str, str, str, str]]:
    """Return the name, unit, meaning and accuracy of each figure of these rows; without rows, of all."""
    explained: dict[tuple[str, str, str, str], None] = {}
    for kind in words.kinds_of(rows) if rows else KINDS.values():
        for figure in figures_of(rows) if rows else COLUMNS.values():
            if figure.key in kind.figures and figure.heading:
                heading = kind.headings.get(figure.key, figure.heading)
                meaning = kind.meanings.get(figure.key, figure.meaning)
                unit = _UNITS.get(figure.unit, figure.unit)
                explained[heading, unit, meaning, figure.accuracy] = None
        explained["outcome", "", kind.outcome, "exact"] = None
    return [*explained]


def _failures(rows: Sequence[Row]) -> list[str]:
    """Return, for each row that is not ok, its name, and its outcome, last phase and reason."""
    label = labels_among(cells_of(rows))
    names = [name for name in series.varying(rows) if name not in IN_LABELS]
    lines = []
    for row in (row for row in rows if row["outcome"] != Outcome.OK):
        title = " · ".join([plain(label(row["cell"])), *(words.setting(n, row) for n in names)])
        why = one_line(row["message"])
        # Most messages already name the phase in which the measurement ended.
        names_phase = bool(row["last_phase"]) and repr(row["last_phase"]) in why
        ending = plain(row["outcome"]) if names_phase else words.ending(row)
        lines.append(f"{title}: {ending}" + (f": {why}" if why else ""))
    return lines


def answer(run: Measured) -> list[str]:
    """Return a run in sentences, one for each setting: "With 8 GiB of RAM, 3 of 6 strategies load gpt2-xl." """
    if not run.rows:
        return ["No cells were measured."]
    slow = {
        result.cell.series
        for result in run.results
        if (judgement := run.judgements[result.cell.id]) and judgement.verdict is Verdict.THRASHES
    }
    changing = [name for name in SCENE if name in series.varying(run.rows)]
    scenes = list(series.split(run.rows, changing).values())
    if run.has_floors:
        unlimited = [group for group in scenes if group[0]["ram_limit_bytes"] is None]
        return [_floors(run.floors), *(_of_scene(group, [], slow) for group in unlimited)]
    texts = [_of_scene(group, changing, slow) for group in scenes[:_MOST_SCENES]]
    if len(scenes) > _MOST_SCENES:
        texts.append(f"{len(scenes) - _MOST_SCENES} more settings are in the table.")
    return texts


def _of_scene(group: Sequence[Row], changing: Sequence[str], slow: set[str]) -> str:
    """Return sentences on how many strategies work, which is fastest, and which needs least memory."""
    label, row, kind = labels_among(cells_of(group)), group[0], words.kind_of(group)
    named = {one["group"]: plain(label(one["cell"])) for one in group}
    limit = row["ram_limit_bytes"]
    start = f"With {words.size(limit)} of RAM" if limit else "Without a RAM limit"
    others = [name for name in changing if name not in {"model", "ram_limit_bytes"}]
    about = [words.dimension(name, row[name]) for name in others]
    start += f" ({', '.join(about)})" if about else ""
    run = [one for one in group if one["outcome"] != Outcome.SKIPPED]
    good = [one for one in run if one["ok"] == one["repeats"]]
    if not run:
        return f"{start}, nothing was run."
    if len(run) == 1:
        works = "works" if good else "does not work"
        only = f"the only {kind.words['what']} that was tried"
        texts = [f"{start}, {only}, {named[run[0]['group']]}, {works}."]
    else:
        # Rows are called variants if a strategy has several rows, one for each format or option.
        is_one_each = len(series.values(run, "strategy")) == len(run)
        noun = kind.words["several" if is_one_each else "variants"]
        share = "all" if len(good) == len(run) else f"{len(good)} of" if good else "none of"
        does = kind.words["does"] + ("s" if len(good) < 2 else "")
        model = f" {row['model']}" if row["model"] else ""
        which = f": {listed([named[one['group']] for one in good])}" if good else ""
        texts = [f"{start}, {share} {len(run)} {noun} {does}{model}{which}."]

    timed = sorted((one for one in good if one["ready_s"] is not None), key=itemgetter("ready_s"))
    if timed:
        first, *later = timed
        name = named[first["group"]]
        text = f"The fastest is {name}," if later else f"{name} is"
        text += f" {kind.words['ready']} in {first['ready_s']:.2f} s"
        near = [named[one["group"]] for one in later if one["ready_s_min"] <= first["ready_s_max"]]
        if near and first["repeats"] > 1:
            text += f" (the times of its repeats overlap with {listed(near)})"
        texts.append(f"{text}.")
    key, peak, _ = kind.peak
    sized = sorted((one for one in good if one[key] is not None), key=itemgetter(key))
    if len(sized) > 1:
        text = f"The smallest {peak} is that of {named[sized[0]['group']]}: {sized[0][key] / GIB:.3f} GiB"
        ratio = sized[0][ABOVE_IMPORT]
        if ratio is not None and not is_below_import(sized):
            text += f", {ratio:.2f} x the model above {kind.words['before']}"
        texts.append(f"{text}.")
    if thrashing := [named[one["group"]] for one in group if one["group"] in slow]:
        texts.append(f"Thrashing (the same pages are read again and again): {listed(thrashing)}.")
    return " ".join(texts)


def _floors(searched: Sequence[Floor]) -> str:
    label, sizes = floor_label(searched), list[str]()
    first, *more = sorted((one for one in searched if one.bytes), key=lambda one: one.bytes or 0)
    for one in (first, *more):
        ratio = f" ({one.per_model:.2f} x the model)" if one.per_model else ""
        thrashing = ", where it thrashes" if one.aim is Aim.ENDS else ""
        sizes.append(f"{words.size(one.bytes)}{ratio}{thrashing}")
    text = f"{label(first)} needs the least RAM: {sizes[0]}."
    if more:
        named = [f"{label(one)} {size}" for one, size in zip(more, sizes[1:], strict=True)]
        text += f" Next: {listed(named)}."
    if without := [label(one) for one in searched if not one.bytes]:
        text += f" No floor was found for {listed(without)}."
    return text


def csv_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of summary.csv, without those of which none of these rows can have a value."""
    absent = frozenset.intersection(*(kind.lacks for kind in words.kinds_of(rows)))
    names = {f"{name}{end}" for name in absent for end in ("", "_min", "_max")}
    return [name for name in _IN_CSV if name not in names]


def as_json(run: Measured, files: Sequence[Path]) -> dict[str, Any]:
    """Return the rows of summary.csv as ``series``, with the answer (which explains a single command)."""
    names = csv_columns(run.rows)
    is_one = len(run.results) == 1 and bool(run.results[0].cell.command)
    return {
        "run": str(run.folder),
        "series": [{name: whole(row[name]) for name in names} for row in run.rows],
        "missing_cells": run.missing,
        "warnings": list(run.warnings),
        "files": [str(path) for path in files],
        "answer": explained(run.folder, run.results[0]) if is_one else answer(run),
    }


def whole(value: Any) -> Any:
    """Return a float without a fraction as an integer, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
