"""Predict loads (cells): ``python -m weighin.predict`` answers each line of JSON with an event.

The predicting process imports torch and the model's class, as a measured process does. All cells of
one predicting process must therefore have the same model. Each step (checking the checkpoint, making
one without values, the load itself) runs in a fork, because the heap of a fork is like that of a new
process. The fork reads a checkpoint's structure, but no values.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from weighin.child_process import Parent, adopt_orphans, end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import psutil
import torch  # before any fork; a worker imports it too

from weighin.cell import FORWARD, Cell, Job, ModelSpec
from weighin.checkpoint.manifest import read_manifest
from weighin.errors import HarnessError
from weighin.predict.dispatch import CannotFollow
from weighin.predict.ledger import anon_bytes
from weighin.probes.process import memory_of, read_status
from weighin.result import Memory
from weighin.stream.construct import resolve_builder
from weighin.stream.pretrained_library import Selection, library_of, module_of
from weighin.text import one_line
from weighin.worker import uses
from weighin.worker.loading import example_inputs, settle_math

_STARTS: Final = (
    "subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system",
)  # fmt: skip
_REFUSED: Final = "the strategy starts a process, whose memory a prediction cannot compute"
_refused: list[str] = []


def main() -> None:
    parent = Parent()
    settle_math()
    adopt_orphans()
    before = anon_bytes()
    from weighin.predict import simulate  # noqa: F401 (only a prediction needs it)
    from weighin.predict.process import PRELOADED, gpu_bytes

    own_bytes = anon_bytes() - before
    # After the import of the model's class, which may import these modules.
    hide_once = cache(PRELOADED.hide)
    gpu_once = cache(gpu_bytes)
    context_bytes = kernels_bytes = 0
    made: dict[str, dict[str, Any]] = {}
    while (request := parent.receive()) is not None:
        with suppress(Exception):  # the fork imports the class again, and answers with the error
            model = ModelSpec(**request["cell"]["model"])
            if library := library_of(model.builder):
                module_of(library.builder).import_class(model.kwargs)
        with suppress(Exception):  # the fork answers with this error, too
            hide_once()
        if needs_gpu := _cell(request).needs_gpu:
            context_bytes, kernels_bytes = gpu_once()
        now = memory_of(read_status())
        file_bytes = now.file_bytes - PRELOADED.file_bytes
        request["baseline"] = asdict(replace(now, file_bytes=file_bytes))
        # A measured process loads the kernels after its load, and a context only for a GPU.
        hidden_bytes = PRELOADED.anon_bytes + kernels_bytes + (0 if needs_gpu else context_bytes)
        request["own_bytes"] = own_bytes + hidden_bytes
        request["kernels_bytes"] = kernels_bytes
        parent.send("answer", **_answer(request, made))


def _answer(request: dict[str, Any], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the prediction, or with the key "cannot" why there is none; ``made`` are checkpoints."""
    if request["checks"] and "error" in (checked := _in_fork(_check, request)):
        return {"misfit": checked["error"]}
    key = f"{request['cell']['model']}{request['cell']['format']}"
    if key not in made:
        made[key] = _in_fork(_make, request)
    if "cannot" in made[key]:
        return made[key]
    answer = _in_fork(_predict, request | made[key])
    return answer | {"checkpoint_dtype": made[key]["checkpoint_dtype"]}


def _cell(request: dict[str, Any]) -> Cell:
    fields = request["cell"]
    return Cell(**{**fields, "model": ModelSpec(**fields["model"])})


def _in_fork(
    step: Callable[[Cell, dict[str, Any]], dict[str, Any]], request: dict[str, Any]
) -> dict[str, Any]:
    """Return what a step of a request returns in a forked process, or why it failed or died."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        end_with_parent()
        # Small tensors are really written: a huge page would make 2 MiB resident for each.
        ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE in linux/prctl.h
        os.close(reading)
        try:
            answer = step(_cell(request), request)
        except Exception as error:
            traceback.print_exc()
            text, answer = str(error), dict[str, Any]()
            if isinstance(error, HarnessError):
                text = text.replace("\n", ": ")
                answer["error"] = [error.message, error.repair]
            answer["cannot"] = f"{type(error).__name__}: {one_line(text)}"
        with os.fdopen(writing, "w") as pipe:
            pipe.write(f"{json.dumps(answer)}\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        # One line: a process that the strategy started may hold the pipe open.
        text = pipe.readline()
    _, status = os.waitpid(child, 0)
    started = False
    while children := psutil.Process().children():  # of a killed process, they become this one's
        started = True
        for one in children:
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
    if started:
        return {"cannot": f"CannotFollow: {_REFUSED}"}
    if text:
        reply: dict[str, Any] = json.loads(text)
        return reply
    return {"cannot": f"the symbolic run ended with status {os.waitstatus_to_exitcode(status)}"}


def _check(cell: Cell, request: dict[str, Any]) -> dict[str, Any]:
    from weighin.predict.simulate import refuse_misfit

    refuse_misfit(cell.model, Path(request["source"]), Selection(**request["selection"]))
    return {}


def _make(cell: Cell, request: dict[str, Any]) -> dict[str, Any]:
    """Make the checkpoint that the cell loads, unless it is the user's, and a manifest."""
    from weighin.predict.simulate import main_dtype, make_sparse, write_manifest

    source = Path(request["source"]) if request["source"] else None
    folder, path = Path(request["folder"]), source
    if not (path and request["is_own"]):
        selection = Selection(**request["selection"])
        path = make_sparse(cell.model, cell.format, folder, source, selection)
    manifest = str(write_manifest(cell.model, cell.dtype, folder))
    return {"checkpoint": str(path), "manifest": manifest, "checkpoint_dtype": main_dtype(path)}


def _predict(cell: Cell, request: dict[str, Any]) -> dict[str, Any]:
    builder = resolve_builder(cell.model.builder)
    from weighin.predict.process import PRELOADED
    from weighin.predict.simulate import run

    hidden_bytes = PRELOADED.anon_bytes
    use = cell.use or (FORWARD if request["forward"] else "")
    inputs = function = None
    if use:
        inputs = example_inputs(builder, cell.model.kwargs, getattr(torch, cell.dtype))
    if cell.use:
        uses.prepare(cell.use)
        function = uses.function_of(Job(cell, "", "", "", use_path=request["use_path"]))
    # A worker reads the manifest, too, which shapes the heap.
    manifest = read_manifest(Path(request["manifest"]))
    own_bytes = request["own_bytes"] - (hidden_bytes - PRELOADED.anon_bytes)
    baseline = replace(Memory(**request["baseline"]), anon_bytes=anon_bytes() - own_bytes)
    checkpoint, strategy = Path(request["checkpoint"]), Path(request["strategy_path"])
    pid = os.getpid()
    sys.addaudithook(_refuse_process)
    try:
        predicted = run(
            cell, builder, checkpoint, strategy, baseline, own_bytes,
            request["read_ahead_bytes"], request["kernels_bytes"], use, function, inputs,
            is_own=bool(request["source"] and request["is_own"]),
        )  # fmt: skip
    finally:
        # C code, spawn and forkserver start processes without an event; ``_in_fork`` finds those that still run.
        awaited = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        if _refused or awaited or os.getpid() != pid:
            raise CannotFollow(_REFUSED)
    del manifest
    return asdict(predicted)


def _refuse_process(event: str, _arguments: object) -> None:
    """Refuse to start a process, also if the strategy catches the exception."""
    if event in _STARTS:
        _refused.append(event)
        raise CannotFollow(_REFUSED)


if __name__ == "__main__":
    main()
