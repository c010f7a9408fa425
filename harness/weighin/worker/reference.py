"""Run a model's forward pass after the reference load: ``python -m weighin.worker.reference CHECKPOINT``.

A run starts this module, outside every limit, when the forward pass fails of a model whose weights
a strategy loaded right. If it fails here too, the fault is the model's. The reference load is
``from_pretrained`` for a Hugging Face folder; for any other model, it builds the model and copies
each tensor of the checkpoint into it.

The first line of standard input is the cell's job. The answer is one line of JSON: {"failure": ""}
if the forward pass works, else with the error in one line.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

import torch

from weighin import formats
from weighin.cell import Cell
from weighin.checkpoint.reader import read_whole
from weighin.formats.pretrained_folder import is_pretrained_checkpoint
from weighin.formats.pretrained_library import library_of
from weighin.formats.selection import Selection
from weighin.models.pretrained_modules import module_of
from weighin.models.skeleton import construct, resolve_builder
from weighin.protocol import decode_job
from weighin.worker.failures import describe
from weighin.worker.inputs import example_inputs
from weighin.worker.verify import WrongWeights, check_forward
from weighin.worker.warmup import settle_math

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that prints of a model do not mix with the answer
    parser = argparse.ArgumentParser(prog="python -m weighin.worker.reference", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--key", default="", help="the state dict's place in nested dicts")
    parser.add_argument("--strip-prefix", default="", help="the beginning of names to remove")
    options = parser.parse_args()
    job = decode_job(sys.stdin.buffer.readline())
    sys.path[:0] = job.python_path
    settle_math()
    model = _loaded(job.cell, options.checkpoint, Selection(options.key, options.strip_prefix))
    print(json.dumps({"failure": _failure(model, job.cell)}), file=answers, flush=True)


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
        targets[where.name].copy_(read_whole(where, where.dtype))
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
