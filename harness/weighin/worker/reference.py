"""Run a model's forward pass after the reference load: ``python -m weighin.worker.reference``.

A run starts this module, without a memory limit, if a strategy loaded all weights correctly, but
the model's forward pass failed. If the forward pass also fails here, the cause is the model, and
not the strategy. The reference load of a Hugging Face folder is ``from_pretrained``. For any other
model, the reference load builds the model and copies each tensor of the checkpoint into it.

The first line of standard input is the cell's job. The second line is a JSON object with
``checkpoint`` and ``selection``. This module sends one event, ``answer``. The event's field
``failure`` is empty if the forward pass works, and else has the error in one line.
"""

import json
import sys
from pathlib import Path
from typing import Any

from weighin.parent_process import Parent, end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import torch

from weighin import formats
from weighin.cell import Cell
from weighin.checkpoint.reader import read_into
from weighin.construction.skeleton import construct, resolve_builder
from weighin.formats.pretrained_folder import is_pretrained_checkpoint
from weighin.formats.pretrained_library import library_of
from weighin.formats.selection import Selection
from weighin.models.pretrained_modules import module_of
from weighin.protocol import decode_job
from weighin.worker.failures import describe
from weighin.worker.inputs import example_inputs
from weighin.worker.verify import WrongWeights, check_forward
from weighin.worker.warmup import settle_math


def main() -> None:
    parent = Parent()
    job = decode_job(parent.receive() or b"")
    question = json.loads(parent.receive() or b"")
    sys.path[:0] = job.python_path
    settle_math()
    selection = Selection(**question["selection"])
    model = _loaded(job.cell, Path(question["checkpoint"]), selection)
    parent.send("answer", failure=_failure(model, job.cell))


def _loaded(cell: Cell, checkpoint: Path, selection: Selection) -> torch.nn.Module:
    dtype, kwargs = getattr(torch, cell.dtype), cell.model.kwargs
    builder = resolve_builder(cell.model.builder)
    if library_of(cell.model.builder) and is_pretrained_checkpoint(checkpoint):
        model: torch.nn.Module
        model, _ = module_of(cell.model.builder).reference(kwargs, checkpoint, dtype)
        return model.to(cell.device)
    model = construct(lambda: builder(**kwargs), dtype)
    targets = model.state_dict()
    for where in formats.read(checkpoint, selection)[1]:
        values = torch.empty(where.shape, dtype=where.dtype)
        targets[where.name].copy_(read_into(where, values))
    return model.to(cell.device)


def _failure(model: Any, cell: Cell) -> str:
    builder = resolve_builder(cell.model.builder)
    inputs = example_inputs(builder, cell.model.kwargs, getattr(torch, cell.dtype))
    assert inputs is not None
    try:
        for _ in range(cell.passes):
            check_forward(model, inputs.to(torch.device(cell.device)))
    except WrongWeights as error:
        return str(error)
    except Exception as error:
        return describe(error)
    return ""


if __name__ == "__main__":
    main()
