"""Predict loads (cells) without importing torch, by ``python -m weighin.predict``, and show what it predicts."""

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from weighin import child_process
from weighin.cell import FORK, Cell, ModelSpec
from weighin.checkpoint import temporary_folders
from weighin.errors import HarnessError
from weighin.plan.task import Planned
from weighin.predict.prediction import Peaks, Prediction, Work, from_json
from weighin.probes.environment import read_ahead_bytes
from weighin.show.table import Column, Lines, Table
from weighin.stream import formats, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream.pretrained_library import LIBRARIES, WHOLE, Selection, library_of
from weighin.suite.registry import name_of
from weighin.units import GIB, format_bytes

_FOLLOWED: Final = frozenset(
    {"torch", "numpy", "safetensors", "accelerate", *(each.name for each in LIBRARIES)}
)
"""The packages that read files with torch operations, or whose reads ``patches.py`` simulates."""
FORK_ALONE: Final = (
    "the use fork can only be measured",
    "measure it: weighin bench MODEL --use fork",
)
"""The error of a question about no other use."""

_PRIVATE: Final = (
    "baseline_anon_bytes", "host_anon_peak_bytes", "host_anon_least_bytes", "host_anon_most_bytes",
    "tensor_peak_bytes",
)  # fmt: skip

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


def predict(
    planned: Sequence[Planned],
    *,
    checkpoint: Path | None = None,
    selection: Selection = WHOLE,
    python_path: Sequence[str] = (),
    report: Callable[[int, str], None] = lambda _done, _strategy: None,
    forward: bool = False,
    use_paths: Mapping[str, str] = MappingProxyType({}),
) -> list[Prediction]:
    """Return a prediction for each cell, in the order of ``planned``; it reads no tensor data.

    A prediction includes the cell's use (what it runs after the load). ``forward`` adds a forward
    pass if the cell asks for passes. ``use_paths`` has the file of each use that the user wrote.

    A cell loads ``checkpoint`` if this file has the cell's format and only tensors, and ``selection``
    selects no part of it. Any other cell loads a checkpoint without values that weighin generates, with
    the tensors that ``selection`` selects in ``checkpoint``, or with the model's.

    Raises:
        HarnessError: a library cannot build its model; the checkpoint lacks weights of the model or
            has them in another shape; or the predicting process was killed.
    """
    own = None
    if checkpoint and not selection and formats.read(checkpoint).only_tensors:
        own = formats.detect(checkpoint)
    is_checked = checkpoint is None
    predictions = []
    with _process(python_path) as (ask, folder):
        for number, one in enumerate(planned):
            report(number, one.cell.strategy)
            if cannot := one.skip or _not_followed(one):
                predictions.append(Prediction(one.cell, cannot=cannot))
                continue
            cell = replace(one.cell, ranks=1)
            answer = ask(
                cell,
                f"{folder}/{number}",
                strategy_path=str(one.strategy.path),
                checks=not is_checked and library_of(cell.model.builder) is not None,
                source=str(checkpoint) if checkpoint else None,
                selection=asdict(selection),
                is_own=own == cell.format,
                read_ahead_bytes=read_ahead_bytes(checkpoint or temporary_folders.folder()),
                forward=forward and cell.passes > 0,
                use_path=use_paths.get(cell.use, ""),
            )
            is_checked = True
            if misfit := answer.get("misfit"):
                raise HarnessError(*misfit)
            predictions.append(of_ranks(one.cell, from_json(cell, answer)))
    return predictions


def _not_followed(planned: Planned) -> str:  # noqa: PLR0911 (one reason each)
    if planned.cell.environment:
        return f"weighin cannot predict the effect of {', '.join(planned.cell.settings)}"
    if planned.cell.use == FORK:
        return FORK_ALONE[0]
    if planned.strategy.shares_load:
        return "weighin cannot predict the memory of tensors that ranks send to each other"
    if planned.selection:
        return "weighin cannot predict the load of a part of a training checkpoint"
    found = quantised.of_model(planned.cell.model)
    if found and (planned.strategy.pretrained or not found.dequantises):
        return f"weighin cannot predict how {planned.strategy.name} loads weights that are quantised with {found.method}"
    if planned.cell.format == gguf.NAME and planned.strategy.name != "streaming":
        return f"weighin cannot predict how {planned.strategy.name} dequantises a GGUF file"
    options = planned.cell.options
    if options.get("disable_mmap") and planned.cell.format != gguf.NAME:
        return "weighin cannot predict which of the files' bytes disable_mmap keeps in memory"
    if options.get("offload_state_dict"):
        return "weighin cannot predict the memory of weights that are written to a folder and read back"
    if unknown := {name_of(each) for each in planned.strategy.packages} - _FOLLOWED:
        return f"weighin cannot predict how {', '.join(sorted(unknown))} reads files"
    return ""


@contextmanager
def _process(python_path: Sequence[str]) -> Iterator[tuple[Callable[..., dict[str, Any]], Path]]:
    """Yield a function that asks a predicting process for one cell, and a folder for checkpoints."""
    process: child_process.Child | None = None
    imported: ModelSpec | None = None

    def ask(cell: Cell, folder: str, **question: Any) -> dict[str, Any]:
        nonlocal process, imported
        model = cell.model if library_of(cell.model.builder) else None
        if process is None or model != imported:  # each class is imported in a new process
            if process:
                process.close()
            command, imported = child_process.module("weighin.predict"), model
            process = child_process.Child(command, child_process.environment(python_path))
        process.send("question", cell=asdict(cell), folder=folder, **question)
        answer = process.receive()
        if answer is None:
            raise HarnessError(
                "weighin's process that computes the prediction was killed",
                "run the command again; if `dmesg` says that the kernel killed the process for"
                " lack of memory, free some memory first",
            )
        del answer["event"]
        return answer

    with temporary_folders.own_folder(Path(tempfile.gettempdir()), "weighin-predict-") as folder:
        try:
            yield ask, folder
        finally:
            if process:
                process.close()


def of_ranks(cell: Cell, of_one: Prediction) -> Prediction:
    """Return the prediction for all ranks of ``cell`` from ``of_one``, the prediction for one rank.

    Each rank loads the whole model under one limit, with memory and work of its own, but the ranks share
    mapped pages of files, which count once. The GPU memory is that of one rank, which has its own GPU.
    """
    ranks = cell.ranks
    if of_one.cannot or ranks == 1:
        return replace(of_one, cell=cell)

    def private(figures: Peaks) -> dict[str, Any]:
        sizes = {name: getattr(figures, name, None) for name in _PRIVATE}
        return {name: size * ranks for name, size in sizes.items() if size is not None}

    floor = of_one.floor_bytes
    if floor is not None:
        floor = (floor - of_one.in_flight_bytes) * ranks + of_one.in_flight_bytes
    work = {name: size * ranks for name, size in asdict(of_one.work).items()}
    work["mapped_bytes"] = of_one.work.mapped_bytes
    return replace(
        of_one,
        cell=cell,
        floor_bytes=floor,
        work=Work(**work),
        phases=tuple(replace(phase, **private(phase)) for phase in of_one.phases),
        reasons=(*of_one.reasons, f"in each of {ranks} ranks"),
        use=of_one.use and replace(of_one.use, **private(of_one.use)),
        **private(of_one),
    )


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
