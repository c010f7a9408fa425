"""Predict loads (cells) without importing torch, by ``python -m weighin.predict``."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from weighin.stream import formats, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream.pretrained_library import LIBRARIES, WHOLE, Selection, library_of
from weighin.suite.registry import name_of

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
