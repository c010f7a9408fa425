"""Summarise a run in sentences, such as "With 8 GiB of RAM, 3 of 6 strategies load gpt2-xl"."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final

from weighin.records.floor import Aim, Floor
from weighin.records.floor import floors as all_floors
from weighin.records.verdict import Verdict, judge_all
from weighin.report import captions, floors, operations, style
from weighin.report.rows import Row, is_below_import, values, varying
from weighin.result import Outcome, Result
from weighin.units import GIB

_MOST: Final = 16  # paragraphs
_ENDINGS: Final = {
    Outcome.OOM_KILLED: "Killed by the kernel for lack of memory",
    Outcome.CHILD_KILLED: "Lost a process for lack of memory",
    Outcome.CUDA_OOM: "Ran out of GPU memory",
    Outcome.TIMEOUT: "Timed out",
    Outcome.THRASHING: "Ended because it thrashed",
    Outcome.STRATEGY_FAILED: "Failed with an error",
    Outcome.COMMAND_FAILED: "Failed",
    Outcome.USE_FAILED: "Loaded, but the use failed",
    Outcome.WRONG_WEIGHTS: "Produced wrong weights",
    Outcome.MEASUREMENT_FAILED: "Could not be measured",
    Outcome.SKIPPED: "Not run",
}


def paragraphs(rows: Sequence[Row], results: Sequence[Result] = ()) -> list[str]:
    """Return one paragraph for each combination of RAM limit, device and other settings of a run.

    If the run searched the smallest RAM limit of each strategy, the first paragraph names these limits,
    and the others describe measurements without a limit. ``rows`` were made from ``results``.
    """
    if not rows:
        return ["No cells were measured."]
    judged = judge_all(results)
    thrashing = {
        result.cell.series
        for result in results
        if (judgement := judged[result.cell.id]) and judgement.verdict is Verdict.THRASHES
    }
    rows = [row | {"thrashes": row["group"] in thrashing} for row in rows]
    scenes = [group for _, group in style.scenes(rows)]
    if floors_text := _floors(results):
        unlimited = [group for group in scenes if group[0]["ram_limit_bytes"] is None]
        return [floors_text, *(_paragraph(group, []) for group in unlimited)]
    changing = [name for name in style.SCENE if name in varying(rows)]
    texts = [_paragraph(group, changing) for group in scenes[:_MOST]]
    if len(scenes) > _MOST:
        texts.append(f"{len(scenes) - _MOST} more settings are in the table.")
    return texts


def _paragraph(group: Sequence[Row], changing: Sequence[str]) -> str:
    return " ".join([_works(group, changing), *_best(group), *_others(group)])


def _works(group: Sequence[Row], changing: Sequence[str]) -> str:
    """Return a sentence on how many strategies work: "With 8 GiB of RAM, 3 of 6 strategies load ..."."""
    row = group[0]
    limit = row["ram_limit_bytes"]
    start = f"With {captions.size(limit)} of RAM" if limit else "Without a RAM limit"
    words = operations.KINDS[row["operation"]].words
    others = [name for name in changing if name not in {"model", "ram_limit_bytes"}]
    setting = [captions.dimension(name, row[name]) for name in others]
    start += f" ({', '.join(setting)})" if setting else ""
    run = [one for one in group if one["outcome"] != Outcome.SKIPPED]
    good = [one for one in run if one["ok"] == one["repeats"]]
    # Rows are called variants if a strategy has several rows, one for each format or option.
    noun = words["several"] if len(values(run, "strategy")) == len(run) else words["variants"]
    model = f" {row['model']}" if row["model"] else ""
    if not run:
        return f"{start}, nothing was run."
    if len(run) == 1:
        does = "works" if good else "does not work"
        return (
            f"{start}, the only {words['what']} that was tried, {style.row_labels(run)[0]}, {does}."
        )
    if not good:
        return f"{start}, none of {len(run)} {noun} {words['does']}s{model}."
    share = "all" if len(good) == len(run) else f"{len(good)} of"
    count = f"{share} {len(run)} {noun} {words['does']}"
    count += "s" if len(good) == 1 else ""
    return f"{start}, {count}{model}: {_list(style.row_labels(good))}."


def _best(group: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence on the fastest strategy, and a sentence on the one with the smallest peak memory."""
    good = [row for row in group if row["ok"] > 0 and row["ok"] == row["repeats"]]
    labels = style.row_labels(good)
    good = [row | {"label": label} for row, label in zip(good, labels, strict=True)]
    words = operations.first_of(group).words
    if timed := sorted(
        (row for row in good if row["ready_s"] is not None), key=itemgetter("ready_s")
    ):
        first, *others = timed
        start = "The fastest is {}, {} in" if others else "{} is {} in"
        text = f"{start.format(first['label'], words['ready'])} {first['ready_s']:.2f} s"
        near = [row["label"] for row in others if row["ready_s_min"] <= first["ready_s_max"]]
        if near and first["repeats"] > 1:
            text += f" (the times of its repeats overlap with {_list(near)})"
        yield text + "."
    key, name = operations.first_of(group).peak
    sized = sorted((row for row in good if row[key] is not None), key=itemgetter(key))
    if len(sized) > 1:
        least = sized[0]
        ratio = least["above_import_per_model"]
        is_left_out = ratio is None or is_below_import(sized)
        above = "" if is_left_out else f", {ratio:.2f} x the model above {words['before']}"
        peak = f"{least[key] / GIB:.3f} GiB"
        yield f"The smallest {name} is that of {least['label']}: {peak}{above}."


def _others(group: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence for each outcome other than ok and for thrashing, with the strategies' names."""
    labels = style.row_labels(group)
    pairs = [(label, row["outcome"]) for label, row in zip(labels, group, strict=True)]
    for outcome, words in _ENDINGS.items():
        if names := [label for label, ended in pairs if ended == outcome]:
            yield f"{words}: {_list(names)}."
    if slow := [label for label, row in zip(labels, group, strict=True) if row["thrashes"]]:
        yield f"Thrashing (the same pages are read again and again): {_list(slow)}."
    for label, ended in pairs:
        if " " in ended:
            yield f"The repeats ended differently: {label} ({ended})."


def _floors(results: Sequence[Result]) -> str:
    """Return sentences on the smallest RAM limit of each strategy; empty if the run found no limit."""
    searched = all_floors(results) if floors.has_data(results) else []
    sized = sorted((floor for floor in searched if floor.bytes), key=lambda one: one.bytes or 0)
    if not sized:
        return ""
    first, *more = sized
    text = f"{floors.label(first, searched)} needs the least RAM: {_size(first)}."
    if more:
        others = [f"{floors.label(floor, searched)} {_size(floor)}" for floor in more]
        text += f" Next: {_list(others)}."
    if without := [floors.label(floor, searched) for floor in searched if not floor.bytes]:
        text += f" No floor was found for {_list(without)}."
    return text


def _size(floor: Floor) -> str:
    ratio = f" ({floor.per_model:.2f} x the model)" if floor.per_model else ""
    thrashing = ", where it thrashes" if floor.aim is Aim.ENDS else ""
    return f"{captions.size(floor.bytes)}{ratio}{thrashing}"


def _list(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
