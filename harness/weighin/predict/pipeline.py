"""Combine the predictions for the parts (models) of a pipeline, which one process loads in turn.

*Together*: each loaded part stays in memory. The peak is the memory of all loaded parts plus the
largest temporary memory of one load, whatever part is loaded first. *One after the other*: each
part is freed before the next load, and the peak is the highest peak of a single part.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from weighin.formats.pretrained_library import LIBRARIES
from weighin.predict.prediction import Prediction
from weighin.predict.tables import figure_columns, gib
from weighin.units import format_bytes

TOGETHER: Final = "together"
ONE_AFTER_THE_OTHER: Final = "one after the other"

_BASES: Final = {
    "host_anon_peak_bytes": "baseline_anon_bytes",
    "host_file_peak_bytes": "baseline_file_bytes",
    "cuda_requested_bytes": None,
    "cuda_allocated_bytes": None,
    "cuda_reserved_bytes": None,
}
"""For each peak, the field with the memory in use before a load.

This memory counts only one time for all parts. None means that it is zero.
"""
_PAGE_TABLE_SHARE: Final = 512


@dataclass(frozen=True, slots=True)
class Combined:
    """The peaks of a pipeline whose parts are all loaded with one strategy, in bytes; None means not predicted.

    Attributes:
        strategy: the strategy's name; if the parts use several libraries' loaders, all their names.
        held: "together" or "one after the other".
        cannot: why a part could not be predicted; empty if all parts could.
    """

    strategy: str
    held: str
    model_bytes: int | None = None
    host_anon_peak_bytes: int | None = None
    host_file_peak_bytes: int | None = None
    floor_bytes: int | None = None
    cuda_requested_bytes: int | None = None
    cuda_allocated_bytes: int | None = None
    cuda_reserved_bytes: int | None = None
    cannot: str = ""


def strategies_for(names: Sequence[str], library: str) -> list[str]:
    """Return the strategies for one part of a pipeline, from the ``names`` that a user asked for.

    If ``library`` is not empty, it replaces each strategy that is a library's own loader.
    """
    loaders = {each.name for each in LIBRARIES}
    return list(dict.fromkeys(library if name in loaders and library else name for name in names))


def combined(parts: Mapping[str, Sequence[Prediction]]) -> list[Combined]:
    """Return the peaks of the whole pipeline for each strategy, from the predictions of its parts.

    All parts must have predictions for the same strategies, in the same order.
    """
    answers = []
    for of_parts in zip(*parts.values(), strict=True):
        name = " + ".join(dict.fromkeys(each.strategy for each in of_parts))
        failed = [
            f"{part}: {each.cannot}"
            for part, each in zip(parts, of_parts, strict=True)
            if each.cannot
        ]
        for held in (TOGETHER, ONE_AFTER_THE_OTHER):
            if failed:
                answers.append(Combined(name, held, cannot="; ".join(failed)))
            else:
                answers.append(_combined(name, held, of_parts))
    return answers


def _combined(name: str, held: str, parts: Sequence[Prediction]) -> Combined:
    peaks: dict[str, Any] = {figure: _peak(figure, held, parts) for figure in _BASES}
    most = max(
        (each.host_anon_most_bytes or 0) - (each.host_anon_peak_bytes or 0) for each in parts
    )
    above = max(each.above_peak_bytes for each in parts)
    anon = (peaks["host_anon_peak_bytes"] or 0) + most
    larger = anon - max(each.host_anon_peak_bytes or 0 for each in parts)
    sizes = [each.model_bytes or 0 for each in parts]
    return Combined(
        name,
        held,
        model_bytes=sum(sizes) if held == TOGETHER else max(sizes),
        floor_bytes=anon + above + max(larger, 0) // _PAGE_TABLE_SHARE,
        **peaks,
    )


def _peak(figure: str, held: str, parts: Sequence[Prediction]) -> int | None:
    if any(getattr(each, figure) is None for each in parts):
        return None
    base = _BASES[figure]
    before = [getattr(each, base) or 0 if base else 0 for each in parts]
    peaks = [getattr(each, figure) - start for each, start in zip(parts, before, strict=True)]
    stays = [stay(each, figure) for each in parts]
    if held == ONE_AFTER_THE_OTHER:
        return int(max(before) + max(peaks))
    transient = max(peak - left for peak, left in zip(peaks, stays, strict=True))
    return int(max(before) + sum(stays) + transient)


def stay(prediction: Prediction, figure: str = "host_anon_peak_bytes") -> int:
    """Return the bytes that a part keeps after its load.

    They are the part's peak in the last phase, less the memory in use before the load.
    """
    base = _BASES[figure]
    before = (getattr(prediction, base) or 0) if base else 0
    last = getattr(prediction.phases[-1], figure) if prediction.phases else None
    return max(0, (last or 0) - before)


def table(title: str, answers: Iterable[Combined]) -> Iterable[Table | str]:
    answers = list(answers)
    known = [each for each in answers if not each.cannot]
    if known:
        on_gpu = known[0].cuda_requested_bytes is not None
        shown = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        size = max(each.model_bytes or 0 for each in known)
        shown.title = f"{escape(title)} ({format_bytes(size)}) · all parts · predicted peaks, GiB"
        for heading in ("strategy", "parts in memory"):
            shown.add_column(heading, overflow="fold")
        columns = figure_columns(on_gpu=on_gpu)
        for heading in columns:
            shown.add_column(heading, justify="right", no_wrap=True)
        for each in known:
            sizes = (gib(getattr(each, figure)) for figure in columns.values())
            shown.add_row(escape(each.strategy), each.held, *sizes)
        yield shown
    for each in answers:
        if each.cannot and each.held == TOGETHER:
            yield f"{escape(each.strategy)}: the whole pipeline is not predicted: {escape(each.cannot)}"
    yield (
        "together: every part stays in memory, and the load of one part comes on top; one after the"
        " other: each part is freed before the next one is loaded."
    )


def as_json(path: str, parts: Iterable[str], answers: Iterable[Combined]) -> dict[str, Any]:
    """Return a pipeline's predicted peaks for ``--json``; a size is in bytes, or None if unknown."""
    return {"path": path, "parts": list(parts), "combined": [asdict(each) for each in answers]}
