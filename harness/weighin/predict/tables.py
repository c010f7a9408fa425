"""Show the output of ``weighin predict`` as tables for people, and as JSON."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from weighin.predict.prediction import Prediction
from weighin.show.table import Column, Entry, Lines, Table
from weighin.units import GIB, MIB, format_bytes

# The tolerance of a predicted anonymous peak: this share of the peak plus these bytes.
_ERROR_SHARE: Final = 0.01
_ERROR_BYTES: Final = 16 * MIB
_OTHER_PEAKS: Final = {
    "host_anon_least_bytes": "the heap reuses the holes of freed large blocks",
    "host_anon_most_bytes": "a small block keeps freed large blocks in the heap",
}
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
