"""Show the output of ``weighin predict`` as tables for people, and as JSON."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from weighin.predict.prediction import Peaks, Prediction
from weighin.stream.pretrained_library import LIBRARIES
from weighin.units import GIB, MIB, format_bytes

# The tolerance of a predicted anonymous peak: this share of the peak plus these bytes.
_ERROR_SHARE: Final = 0.01
_ERROR_BYTES: Final = 16 * MIB
_OTHER_PEAKS: Final = {
    "host_anon_least_bytes": "the heap reuses the holes of freed large blocks",
    "host_anon_most_bytes": "a small block keeps freed large blocks in the heap",
}
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
_INSIDE: Final = ("cell", "is_mixed", "computes_buffers")
_OF_USE: Final = "all_peak_bytes"
_ON_GPU: Final = {
    "CUDA re-\nquested": "cuda_requested_bytes",
    "allo-\ncated": "cuda_allocated_bytes",
    "re-\nserved": "cuda_reserved_bytes",
}


def as_json(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return all predictions for ``--json``; bytes are integers, None means not predicted."""
    return {
        "predictions": [
            {
                "strategy": prediction.strategy,
                "model": prediction.cell.model.title,
                "format": prediction.cell.format,
                "device": prediction.cell.device,
                "dtype": prediction.cell.dtype,
                "options": prediction.cell.options,
                **{
                    name: value for name, value in asdict(prediction).items() if name not in _INSIDE
                },
            }
            for prediction in predictions
        ]
    }


def tables(predictions: Sequence[Prediction], *, phases: bool) -> Iterable[Table | str]:
    """Yield a table for each model, its notes, and a line for each strategy without a prediction."""
    for model in dict.fromkeys(prediction.cell.model.title for prediction in predictions):
        of_model = [
            prediction for prediction in predictions if prediction.cell.model.title == model
        ]
        followed = [prediction for prediction in of_model if not prediction.cannot]
        if followed:
            yield _table(model, followed, phases)
        for why, ones in itertools.groupby(
            followed, key=lambda prediction: "; ".join(prediction.reasons)
        ):
            if why:
                yield f"{escape(', '.join(map(_name, ones)))}: {escape(why)}"
        for peak, why in _OTHER_PEAKS.items():
            for size, ones in itertools.groupby(
                followed, key=lambda prediction: gib(_other_peak(prediction, peak))
            ):
                if size:
                    yield (
                        f"{escape(', '.join(map(_name, ones)))}: {size} GiB anonymous in processes "
                        f"where {why}"
                    )
        for prediction in of_model:
            if prediction.cannot:
                yield f"{escape(prediction.strategy)} ({prediction.cell.format}) is not predicted: {escape(prediction.cannot)}"
    if all(prediction.cannot for prediction in predictions):
        return
    yield ("Predicted by running each strategy without tensor values. weighin bench measures.")


def _other_peak(prediction: Prediction, peak: str) -> int | None:
    usual, other = prediction.host_anon_peak_bytes, getattr(prediction, peak)
    if not usual or not other or abs(other - usual) <= usual * _ERROR_SHARE + _ERROR_BYTES:
        return None
    return int(other)


def _table(model: str, predictions: Sequence[Prediction], phases: bool) -> Table:
    first = predictions[0]
    on_gpu = first.cuda_with_use("cuda_allocated_bytes") is not None
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("strategy", overflow="fold")
    table.add_column("format", overflow="fold")
    uses = any(prediction.use for prediction in predictions)
    if uses:
        table.add_column("use", overflow="fold")
    table.title = (
        f"{escape(model)} ({format_bytes(first.model_bytes or 0)}) · device {first.cell.device}"
        f" · {first.cell.dtype} · predicted peaks, GiB"
    )
    if first.checkpoint_dtype:
        table.caption = f"loaded from a checkpoint in {first.checkpoint_dtype}"
    columns = figure_columns(uses=uses, on_gpu=on_gpu) | {"disk\nread": "disk_read_bytes"}
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for prediction in predictions:
        sizes = [_figure(prediction, name) for name in columns.values()]
        names = [_name(prediction), prediction.cell.format]
        names += [prediction.use.name if prediction.use else ""] if uses else []
        table.add_row(*map(escape, names), *map(gib, sizes))
        if phases:
            for phase in prediction.phases:
                inside = [getattr(phase, name, None) for name in columns.values()]
                blank = [""] * (1 + uses)
                table.add_row(f"[dim]  {escape(phase.name)}[/]", *blank, *map(gib, inside))
    return table


def figure_columns(*, uses: bool = False, on_gpu: bool) -> dict[str, str]:
    """Return a dict from each column's heading to the name of the field with the predicted peak."""
    return {
        "anony-\nmous": "host_anon_peak_bytes",
        "file\npages": "host_file_peak_bytes",
        **({"in\nuse": _OF_USE} if uses else {}),
        "RAM\nfloor": "floor_bytes",
        **(_ON_GPU if on_gpu else {}),
    }


def _figure(prediction: Prediction, name: str) -> int | None:
    if name == _OF_USE:
        return prediction.use.all_peak_bytes if prediction.use else None
    if name in _ON_GPU.values():
        return prediction.cuda_with_use(name)
    size: int | None = getattr(prediction, name)
    return size


def _name(prediction: Prediction) -> str:
    cell = prediction.cell
    words = [f"{key}={value}" for key, value in cell.options.items()]
    words += [f"ranks={cell.ranks}"] if cell.ranks > 1 else []
    return " ".join([prediction.strategy, *words])


def gib(size: int | None) -> str:
    """Format a size in GiB with three decimals, or with one from 100 GiB on; empty for None."""
    if size is None:
        return ""
    return f"{size / GIB:.1f}" if size >= 100 * GIB else f"{size / GIB:.3f}"


@dataclass(frozen=True, slots=True)
class Combined(Peaks):
    """The peaks of a pipeline whose parts are all loaded with one strategy, in bytes; None means not predicted.

    *Together*: each loaded part stays in memory. The peak is the memory of all loaded parts plus the
    largest temporary memory of one load, whatever part is loaded first. *One after the other*: each
    part is freed before the next load, and the peak is the highest peak of a single part.

    Attributes:
        strategy: the strategy's name; if the parts use several libraries' loaders, all their names.
        held: "together" or "one after the other".
        cannot: why a part could not be predicted; empty if all parts could.
    """

    strategy: str
    held: str
    model_bytes: int | None = None
    floor_bytes: int | None = None
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


def pipeline_table(title: str, answers: Iterable[Combined]) -> Iterable[Table | str]:
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


def pipeline_as_json(
    path: str, parts: Iterable[str], answers: Iterable[Combined]
) -> dict[str, Any]:
    """Return a pipeline's predicted peaks for ``--json``; a size is in bytes, or None if unknown."""
    return {"path": path, "parts": list(parts), "combined": [asdict(each) for each in answers]}
