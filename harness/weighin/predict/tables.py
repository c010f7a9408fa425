"""Show the output of ``weighin predict`` as tables for people, and as JSON."""

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from weighin.predict.prediction import Peaks, Prediction
from weighin.settings.definition import SuiteStrategy
from weighin.show.table import Column, Entry, Lines, Table
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
    "cuda_requested_bytes": "",
    "cuda_allocated_bytes": "",
    "cuda_reserved_bytes": "",
}
"""For each peak, the field with the memory in use before a load, which counts only once for all parts
of a pipeline; empty if it is zero.
"""
_PAGE_TABLE_SHARE: Final = 512
_INSIDE: Final = ("cell", "is_mixed", "computes_buffers")
_OF_USE: Final = "all_peak_bytes"
_ON_HOST: Final = {
    "host_anon_peak_bytes": Column("anonymous"),
    "host_file_peak_bytes": Column("file pages"),
    _OF_USE: Column("in use"),
    "floor_bytes": Column("RAM floor"),
}
_ON_GPU: Final = {
    "cuda_requested_bytes": Column("CUDA requested"),
    "cuda_allocated_bytes": Column("allocated", rank=2),
    "cuda_reserved_bytes": Column("reserved"),
}
_DISK_READ: Final = {"disk_read_bytes": Column("disk read", rank=1)}


def as_json(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return all predictions for ``--json``; bytes are integers, None means not predicted."""
    return {
        "predictions": [
            {
                "strategy": one.strategy,
                "model": one.cell.model.title,
                "format": one.cell.format,
                "device": one.cell.device,
                "dtype": one.cell.dtype,
                "options": one.cell.options,
                **{name: value for name, value in asdict(one).items() if name not in _INSIDE},
            }
            for one in predictions
        ]
    }


def tables(predictions: Sequence[Prediction], *, phases: bool) -> Iterable[Table | Lines]:
    """Yield a table for each model, its notes, and a line for each strategy without a prediction."""
    for model in dict.fromkeys(one.cell.model.title for one in predictions):
        of_model = [one for one in predictions if one.cell.model.title == model]
        followed = [one for one in of_model if not one.cannot]
        if followed:
            yield _table(model, followed, phases)
        reasons = _alike(followed, lambda one: "; ".join(one.reasons))
        lines = [f"{names}: {why}" for names, why in reasons]
        for peak, why in _OTHER_PEAKS.items():
            sizes = _alike(followed, partial(_other_peak, peak))
            lines += [f"{names}: {n} GiB anonymous in processes where {why}" for names, n in sizes]
        lines += [
            f"{one.strategy} ({one.cell.format}) is not predicted: {one.cannot}"
            for one in of_model
            if one.cannot
        ]
        if followed:
            lines.append(
                "Predicted by running each strategy without tensor values. weighin bench measures."
            )
        yield Lines("", lines)


def _alike(
    predictions: Iterable[Prediction], text: Callable[[Prediction], str]
) -> Iterable[tuple[str, str]]:
    """Yield the names of successive predictions with the same text, and this text if it has one."""
    for found, ones in itertools.groupby(predictions, key=text):
        if found:
            yield ", ".join(map(_name, ones)), found


def _other_peak(peak: str, prediction: Prediction) -> str:
    usual, other = prediction.host_anon_peak_bytes, getattr(prediction, peak)
    if not usual or not other or abs(other - usual) <= usual * _ERROR_SHARE + _ERROR_BYTES:
        return ""
    return gib(other)


def _table(model: str, predictions: Sequence[Prediction], phases: bool) -> Table:
    first = predictions[0]
    on_gpu = first.cuda_with_use("cuda_allocated_bytes") is not None
    columns = _ON_HOST | (_ON_GPU if on_gpu else {}) | _DISK_READ
    names = ["strategy", "format", "use"]
    if not any(one.use for one in predictions):
        names.remove("use")
        del columns[_OF_USE]
    rows: list[list[Entry | str]] = []
    for one in predictions:
        labels = [_name(one), one.cell.format, one.use.name if one.use else ""][: len(names)]
        rows.append([*labels, *(gib(_figure(one, name)) for name in columns)])
        for phase in one.phases if phases else ():
            label = Entry(f"  {phase.name}", kind="dim")
            inside = (gib(getattr(phase, name, None)) for name in columns)
            rows.append([label, *[""] * (len(names) - 1), *inside])
    title = (
        f"{model} ({format_bytes(first.model_bytes or 0)}) · device {first.cell.device}"
        f" · {first.cell.dtype} · predicted peaks, GiB"
    )
    stored = first.checkpoint_dtype
    notes = [f"loaded from a checkpoint in {stored}"] if stored else []
    heads = [*(Column(name, is_name=True) for name in names), *columns.values()]
    return Table(title, heads, rows, notes)


def _figure(prediction: Prediction, name: str) -> int | None:
    if name in _ON_GPU:
        return prediction.cuda_with_use(name)
    size: int | None = getattr(prediction.use if name == _OF_USE else prediction, name, None)
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
    """The peaks of a pipeline whose parts are all loaded with one strategy, in bytes.

    *Together*: each loaded part stays in memory. The peak is the memory of all loaded parts plus the
    largest temporary memory of one load, whatever part is loaded first. *One after the other*: each
    part is freed before the next load, and the peak is the highest peak of a single part. ``strategy``
    joins the names if the parts use several libraries' loaders.
    """

    strategy: str
    held: str
    model_bytes: int | None = None
    floor_bytes: int | None = None
    cannot: str = ""


def strategies_for(asked: Sequence[SuiteStrategy], library: str) -> list[SuiteStrategy]:
    """Return the strategies for one part of a pipeline, from those that a user ``asked`` for.

    If ``library`` is not empty, it replaces each strategy that is a library's own loader.
    """
    loaders = {each.name for each in LIBRARIES if library}
    own = next((each for each in asked if each.name == library), SuiteStrategy(name=library))
    found = [own if each.name in loaders - {library} else each for each in asked]
    return [each for index, each in enumerate(found) if each not in found[:index]]


def combined(parts: Mapping[str, Sequence[Prediction]]) -> list[Combined]:
    """Return the peaks of the whole pipeline for each strategy, from the predictions of its parts.

    All parts must have predictions for the same strategies, in the same order.
    """
    answers = []
    for of_parts in zip(*parts.values(), strict=True):
        name = " + ".join(dict.fromkeys(each.strategy for each in of_parts))
        named = zip(parts, of_parts, strict=True)
        failed = "; ".join(f"{part}: {each.cannot}" for part, each in named if each.cannot)
        for held in (TOGETHER, ONE_AFTER_THE_OTHER):
            if failed:
                answers.append(Combined(name, held, cannot=failed))
                continue
            peaks: dict[str, Any] = {one: _peak(one, held, of_parts) for one in _BASES}
            usual = [each.host_anon_peak_bytes or 0 for each in of_parts]
            most = [each.host_anon_most_bytes or 0 for each in of_parts]
            anon = (peaks["host_anon_peak_bytes"] or 0) + max(map(operator.sub, most, usual))
            above = max(each.above_peak_bytes for each in of_parts)
            floor = anon + above + max(anon - max(usual), 0) // _PAGE_TABLE_SHARE
            sizes = [each.model_bytes or 0 for each in of_parts]
            size = sum(sizes) if held == TOGETHER else max(sizes)
            answers.append(Combined(name, held, model_bytes=size, floor_bytes=floor, **peaks))
    return answers


def _peak(figure: str, held: str, parts: Sequence[Prediction]) -> int | None:
    if any(getattr(each, figure) is None for each in parts):
        return None
    before = [_before(each, figure) for each in parts]
    peaks = [getattr(each, figure) - start for each, start in zip(parts, before, strict=True)]
    if held == ONE_AFTER_THE_OTHER:
        return int(max(before) + max(peaks))
    stays = [stay(each, figure) for each in parts]
    return int(max(before) + sum(stays) + max(map(operator.sub, peaks, stays)))


def _before(prediction: Prediction, figure: str) -> int:
    base = _BASES[figure]
    if not base:  # nothing is in use before a load
        return 0
    return getattr(prediction, base) or 0


def stay(prediction: Prediction, figure: str = "host_anon_peak_bytes") -> int:
    """Return the bytes that a part keeps after its load: those in the last phase above those before."""
    last = getattr(prediction.phases[-1], figure) if prediction.phases else None
    return max(0, (last or 0) - _before(prediction, figure))


def pipeline_table(title: str, answers: Sequence[Combined]) -> Iterable[Table | Lines]:
    if known := [each for each in answers if not each.cannot]:
        on_gpu = known[0].cuda_requested_bytes is not None
        columns = _ON_HOST | (_ON_GPU if on_gpu else {})
        del columns[_OF_USE]
        size = format_bytes(max(each.model_bytes or 0 for each in known))
        heads = [Column(name, is_name=True) for name in ("strategy", "parts in memory")]
        yield Table(
            f"{title} ({size}) · all parts · predicted peaks, GiB",
            [*heads, *columns.values()],
            [
                [each.strategy, each.held, *(gib(getattr(each, name)) for name in columns)]
                for each in known
            ],
        )
    failed = [
        f"{each.strategy}: the whole pipeline is not predicted: {each.cannot}"
        for each in answers
        if each.cannot and each.held == TOGETHER
    ]
    meaning = (
        "together: every part stays in memory, and the load of one part comes on top; one after the"
        " other: each part is freed before the next one is loaded."
    )
    yield Lines("", [*failed, meaning])


def pipeline_as_json(
    path: str, parts: Iterable[str], answers: Iterable[Combined]
) -> dict[str, Any]:
    return {"path": path, "parts": list(parts), "combined": [asdict(each) for each in answers]}
