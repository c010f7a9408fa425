"""A run in words: which ways of loading work under which limit, and which of them is the fastest."""

from collections.abc import Iterator, Sequence
from typing import Final

import pandas as pd

from weighin.record import Outcome, Result
from weighin.records.floor import Floor
from weighin.records.floor import floors as all_floors
from weighin.records.verdict import Verdict, judge_all
from weighin.report import captions, floors, style
from weighin.report.dataframe import known, varying
from weighin.units import GIB

_MOST: Final = 16  # paragraphs; more would be no summary
# How a load is told, and how a save is.
_WORDS: Final = {
    "load": {"load": "load", "loading": "loading", "ready": "ready", "import": "the import"},
    "save": {
        "load": "save",
        "loading": "saving",
        "ready": "on the disk",
        "import": "the model in memory",
    },
}
_ENDINGS: Final = {
    Outcome.OOM_KILLED: "Killed by the kernel for lack of memory",
    Outcome.CUDA_OOM: "Refused by the CUDA allocator",
    Outcome.TIMEOUT: "Not ready in the time allowed",
    Outcome.STRATEGY_FAILED: "Failed by themselves",
    Outcome.WRONG_WEIGHTS: "Left wrong weights",
    Outcome.MEASUREMENT_FAILED: "Could not be measured",
    Outcome.SKIPPED: "Not run",
}


def paragraphs(frame: pd.DataFrame, results: Sequence[Result] = ()) -> list[str]:
    """Return one paragraph for each limit and whatever else sets the series of a run apart.

    Of a search for RAM floors: what the floors are, and how it is without a limit. ``results`` are
    what verdicts and floors are of.
    """
    if frame.empty:
        return ["No cells were measured."]
    judged = judge_all(results)
    thrashing = {
        one.cell.series
        for one in results
        if (verdict := judged[one.cell.id]) and verdict.verdict is Verdict.THRASHES
    }
    frame = frame.assign(thrashes=[group in thrashing for group in frame["group"]])
    scenes = [group for _, group in style.scenes(frame)]
    if least := _floors(results):
        peaceful = [group for group in scenes if known(group["ram_limit_bytes"].iloc[0]) is None]
        return [least, *(_paragraph(group, []) for group in peaceful)]
    changing = [name for name in style.SCENE if name in varying(frame)]
    said = [_paragraph(group, changing) for group in scenes[:_MOST]]
    if len(scenes) > _MOST:
        said.append(f"{len(scenes) - _MOST} more settings are in the table.")
    return said


def _paragraph(group: pd.DataFrame, changing: Sequence[str]) -> str:
    return " ".join([_works(group, changing), *_best(group), *_others(group)])


def _works(group: pd.DataFrame, changing: Sequence[str]) -> str:
    """Say how many of the series that were run work: "With 8 GiB of RAM, 3 of 6 strategies work"."""
    row = group.iloc[0]
    limit = known(row["ram_limit_bytes"])
    start = f"With {captions.size(limit)} of RAM" if limit else "Without a RAM limit"
    words = _WORDS[row["operation"]]
    others = [name for name in changing if name not in {"model", "ram_limit_bytes"}]
    setting = [captions.dimension(name, row[name]) for name in others]
    start += f" ({', '.join(setting)})" if setting else ""
    run = group[group["outcome"] != Outcome.SKIPPED.value]
    good = run[run["ok"] == run["repeats"]]
    noun = "strategies" if run["strategy"].is_unique else f"ways of {words['loading']}"
    what = row["model"]
    if run.empty:
        return f"{start}, nothing was run."
    if len(run) == 1:
        does = "works" if len(good) else "does not work"
        return f"{start}, the one way of {words['loading']} that was tried, {style.row_labels(run)[0]}, {does}."
    if good.empty:
        return f"{start}, none of {len(run)} {noun} {words['load']}s {what}."
    share = "all" if len(good) == len(run) else f"{len(good)} of"
    count = f"{share} {len(run)} {noun} {words['load']}"
    count += "s" if len(good) == 1 else ""
    return f"{start}, {count} {what}: {_list(style.row_labels(good))}."


def _best(group: pd.DataFrame) -> Iterator[str]:
    """Say which is the fastest and which holds the least, of those that work and were measured."""
    good = group[(group["ok"] > 0) & (group["ok"] == group["repeats"])]
    good = good.assign(label=style.row_labels(good))
    words = _WORDS[group.iloc[0]["operation"]]
    timed = good[good["ready_s"].notna()].sort_values("ready_s")
    if len(timed):
        first = timed.iloc[0]
        start = "The fastest is {}, {} in" if len(timed) > 1 else "{} is {} in"
        text = f"{start.format(first['label'], words['ready'])} {first['ready_s']:.2f} s"
        near = timed.iloc[1:][timed["ready_s_min"].iloc[1:] <= first["ready_s_max"]]
        if len(near) and first["repeats"] > 1:
            text += f" (the repeats do not tell it from {_list(near['label'].tolist())})"
        yield text + "."
    sized = good[good["peak_rss_bytes"].notna()].sort_values("peak_rss_bytes")
    if len(sized) > 1:
        least = sized.iloc[0]
        ratio = known(least["above_import_per_model"])
        above = "" if ratio is None else f", {ratio:.2f} x the model above {words['import']}"
        peak = f"{least['peak_rss_bytes'] / GIB:.3f} GiB"
        yield f"The smallest peak RSS is that of {least['label']}: {peak}{above}."


def _others(group: pd.DataFrame) -> Iterator[str]:
    """Say what became of the series that do not work, or not always."""
    pairs = list(zip(style.row_labels(group), group["outcome"].tolist(), strict=True))
    for outcome, words in _ENDINGS.items():
        if names := [label for label, ended in pairs if ended == outcome.value]:
            yield f"{words}: {_list(names)}."
    slow = [label for (label, _), is_slow in zip(pairs, group["thrashes"], strict=True) if is_slow]
    if slow:
        yield f"Thrashing, so that the same pages are read again and again: {_list(slow)}."
    for label, ended in pairs:
        if " " in ended:
            yield f"Not the same in all repeats: {label} ({ended})."


def _floors(results: Sequence[Result]) -> str:
    """Return the RAM floors in words, the least first; empty where none was looked for."""
    found = all_floors(results) if floors.has_data(results) else []
    sized = sorted((one for one in found if one.bytes), key=lambda one: one.bytes or 0)
    if not sized:
        return ""
    first, *more = sized
    text = f"{floors.label(first, found)} needs the least RAM: {_size(first)}."
    if more:
        others = [f"{floors.label(one, found)} {_size(one)}" for one in more]
        text += f" Then {_list(others)}."
    if without := [floors.label(one, found) for one in found if not one.bytes]:
        text += f" No floor was found for {_list(without)}."
    return text


def _size(floor: Floor) -> str:
    ratio = f" ({floor.per_model:.2f} x the model)" if floor.per_model else ""
    return f"{captions.size(floor.bytes)}{ratio}"


def _list(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
