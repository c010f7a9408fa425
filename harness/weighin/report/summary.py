"""Summarise a run in sentences: the strategies that work under each limit, and the fastest one."""

from collections.abc import Iterator, Sequence
from typing import Final

import pandas as pd

from weighin.record import Outcome, Result
from weighin.records.floor import Aim, Floor
from weighin.records.floor import floors as all_floors
from weighin.records.verdict import Verdict, judge_all
from weighin.report import captions, floors, operations, style
from weighin.report.dataframe import is_below_import, known, varying
from weighin.units import GIB

_MOST: Final = 16  # paragraphs; a longer text would not be a summary
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


def paragraphs(frame: pd.DataFrame, results: Sequence[Result] = ()) -> list[str]:
    """Return one paragraph for each limit, device and other setting of a run.

    For a search for RAM floors, return the floors and the cells without a limit. Verdicts and
    floors are computed from ``results``.
    """
    if frame.empty:
        return ["No cells were measured."]
    judged = judge_all(results)
    thrashing = {
        result.cell.series
        for result in results
        if (judgement := judged[result.cell.id]) and judgement.verdict is Verdict.THRASHES
    }
    frame = frame.assign(thrashes=[group in thrashing for group in frame["group"]])
    scenes = [group for _, group in style.scenes(frame)]
    if floors_text := _floors(results):
        unlimited = [group for group in scenes if known(group["ram_limit_bytes"].iloc[0]) is None]
        return [floors_text, *(_paragraph(group, []) for group in unlimited)]
    changing = [name for name in style.SCENE if name in varying(frame)]
    texts = [_paragraph(group, changing) for group in scenes[:_MOST]]
    if len(scenes) > _MOST:
        texts.append(f"{len(scenes) - _MOST} more settings are in the table.")
    return texts


def _paragraph(group: pd.DataFrame, changing: Sequence[str]) -> str:
    return " ".join([_works(group, changing), *_best(group), *_others(group)])


def _works(group: pd.DataFrame, changing: Sequence[str]) -> str:
    """Return the number of series that work: "With 8 GiB of RAM, 3 of 6 strategies load ..."."""
    row = group.iloc[0]
    limit = known(row["ram_limit_bytes"])
    start = f"With {captions.size(limit)} of RAM" if limit else "Without a RAM limit"
    words = operations.KINDS[row["operation"]].words
    others = [name for name in changing if name not in {"model", "ram_limit_bytes"}]
    setting = [captions.dimension(name, row[name]) for name in others]
    start += f" ({', '.join(setting)})" if setting else ""
    run = group[group["outcome"] != Outcome.SKIPPED.value]
    good = run[run["ok"] == run["repeats"]]
    # A strategy with several formats or options has several rows.
    noun = words["several"] if run["strategy"].is_unique else words["variants"]
    model = f" {row['model']}" if row["model"] else ""
    if run.empty:
        return f"{start}, nothing was run."
    if len(run) == 1:
        does = "works" if len(good) else "does not work"
        return (
            f"{start}, the only {words['what']} that was tried, {style.row_labels(run)[0]}, {does}."
        )
    if good.empty:
        return f"{start}, none of {len(run)} {noun} {words['does']}s{model}."
    share = "all" if len(good) == len(run) else f"{len(good)} of"
    count = f"{share} {len(run)} {noun} {words['does']}"
    count += "s" if len(good) == 1 else ""
    return f"{start}, {count}{model}: {_list(style.row_labels(good))}."


def _best(group: pd.DataFrame) -> Iterator[str]:
    """Yield the fastest working series, and the working series with the smallest peak RSS."""
    good = group[(group["ok"] > 0) & (group["ok"] == group["repeats"])]
    good = good.assign(label=style.row_labels(good))
    words = operations.first_of(group).words
    timed = good[good["ready_s"].notna()].sort_values("ready_s")
    if len(timed):
        first = timed.iloc[0]
        start = "The fastest is {}, {} in" if len(timed) > 1 else "{} is {} in"
        text = f"{start.format(first['label'], words['ready'])} {first['ready_s']:.2f} s"
        near = timed.iloc[1:][timed["ready_s_min"].iloc[1:] <= first["ready_s_max"]]
        if len(near) and first["repeats"] > 1:
            text += f" (the times of its repeats overlap with {_list(near['label'].tolist())})"
        yield text + "."
    key, name = operations.first_of(group).peak
    sized = good[good[key].notna()].sort_values(key)
    if len(sized) > 1:
        least = sized.iloc[0]
        ratio = known(least["above_import_per_model"])
        is_left_out = ratio is None or is_below_import(sized)
        above = "" if is_left_out else f", {ratio:.2f} x the model above {words['before']}"
        peak = f"{least[key] / GIB:.3f} GiB"
        yield f"The smallest {name} is that of {least['label']}: {peak}{above}."


def _others(group: pd.DataFrame) -> Iterator[str]:
    """Yield the outcomes of the series that work in no repeat or only in some repeats."""
    pairs = list(zip(style.row_labels(group), group["outcome"].tolist(), strict=True))
    for outcome, words in _ENDINGS.items():
        if names := [label for label, ended in pairs if ended == outcome.value]:
            yield f"{words}: {_list(names)}."
    slow = [label for (label, _), is_slow in zip(pairs, group["thrashes"], strict=True) if is_slow]
    if slow:
        yield f"Thrashing (the same pages are read again and again): {_list(slow)}."
    for label, ended in pairs:
        if " " in ended:
            yield f"The repeats ended differently: {label} ({ended})."


def _floors(results: Sequence[Result]) -> str:
    """Return the RAM floors in sentences, the smallest first; empty if the run found none."""
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
