"""Show the output of ``weighin predict`` as tables for people, and as JSON."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from weighin.predict.prediction import Prediction
from weighin.show.table import Column, Lines, Table
from weighin.units import GIB, format_bytes

_INSIDE: Final = ("cell", "is_mixed", "computes_buffers")

_SIZES: Final[dict[Column, Callable[[Prediction], int | None]]] = {
    Column("anonymous"): lambda one: one.host_anon_peak_bytes,
    Column("file pages"): lambda one: one.host_file_peak_bytes,
    Column("in use"): lambda one: one.use.host_anon_peak_bytes if one.use else None,
    Column("RAM floor"): lambda one: one.floor_bytes,
    Column("CUDA requested"): lambda one: one.with_use("cuda_requested_bytes"),
    Column("allocated", rank=2): lambda one: one.with_use("cuda_allocated_bytes"),
    Column("reserved"): lambda one: one.with_use("cuda_reserved_bytes"),
    Column("disk read", rank=1): lambda one: one.disk_read_bytes,
}
"""The columns of sizes; a table leaves out those without any size."""


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


def tables(predictions: Sequence[Prediction]) -> Iterable[Table | Lines]:
    """Yield a table for each model, its notes, and a line for each strategy without a prediction."""
    for model in dict.fromkeys(one.cell.model.title for one in predictions):
        of_model = [one for one in predictions if one.cell.model.title == model]
        followed = [one for one in of_model if not one.cannot]
        if followed:
            yield _table(model, followed)
        alike = itertools.groupby(followed, key=lambda one: "; ".join(one.reasons))
        lines = [f"{', '.join(map(_name, ones))}: {reasons}" for reasons, ones in alike if reasons]
        lines += [
            f"{one.strategy} ({one.cell.format}) is not predicted: {one.cannot}"
            for one in of_model
            if one.cannot
        ]
        if followed:
            lines.append(
                "Predicted without loading: each strategy ran on tensors that take no memory. weighin bench measures."
            )
        yield Lines("", lines)


def _table(model: str, predictions: Sequence[Prediction]) -> Table:
    first = predictions[0]
    names = {
        "strategy": [_name(one) for one in predictions],
        "format": [one.cell.format for one in predictions],
        "use": [one.use.name if one.use else "" for one in predictions],
    }
    columns = {Column(name, is_name=True): texts for name, texts in names.items() if any(texts)}
    for column, size in _SIZES.items():
        sizes = [size(one) for one in predictions]
        if any(one is not None for one in sizes):
            columns[column] = [
                "" if one is None else f"{one / GIB:.{1 if one >= 100 * GIB else 3}f}"
                for one in sizes
            ]
    title = (
        f"{model} ({format_bytes(first.model_bytes or 0)}) · device {first.cell.device}"
        f" · {first.cell.dtype} · predicted peaks, GiB"
    )
    stored = first.checkpoint_dtype
    notes = [f"loaded from a checkpoint in {stored}"] if stored else []
    return Table(title, [*columns], [*zip(*columns.values(), strict=True)], notes)


def _name(prediction: Prediction) -> str:
    cell = prediction.cell
    words = [f"{key}={value}" for key, value in cell.options.items()]
    words += [f"ranks={cell.ranks}"] if cell.ranks > 1 else []
    return " ".join([prediction.strategy, *words])
