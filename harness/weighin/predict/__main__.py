"""Predict loads (cells): ``python -m weighin.predict`` answers each line of JSON with an event.

The predicting process imports torch and the model's class, as a measured process does. All cells of
one predicting process must therefore have the same model. Each cell runs in a fork, because the heap
of a fork is like that of a new process. The fork reads a checkpoint's structure, but no values.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weighin.child_process import Parent, adopt_orphans, end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import psutil
import torch  # before any fork; a worker imports it too

from weighin.cell import FORWARD, Cell, Job, ModelSpec
from weighin.checkpoint.manifest import read_manifest
from weighin.errors import HarnessError
from weighin.predict.dispatch import CannotFollow
from weighin.probes.process import memory_of, read_status
from weighin.result import Memory
from weighin.stream.construct import Builder, resolve_builder
from weighin.stream.pretrained_library import library_of, module_of
from weighin.text import one_line
from weighin.worker import uses
from weighin.worker.loading import example_inputs, settle_math

if TYPE_CHECKING:
    from weighin.predict.simulate import UseToFollow

_PR_SET_THP_DISABLE: Final = 41  # linux/prctl.h
_STARTS: Final = (
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
)
_REFUSED: Final = "the strategy starts a process, whose memory a prediction cannot compute"
_refused: list[str] = []


def main() -> None:
    parent = Parent()
    settle_math()
    adopt_orphans()
    own_bytes = _import_simulation()
    from weighin.predict.process import PRELOADED, GpuContext

    gpu = GpuContext()
    hide_once = cache(
        PRELOADED.hide
    )  # after the import of the model's class, which may import these modules
    while (line := parent.receive()) is not None:
        request = json.loads(line)
        with suppress(Exception):  # the fork imports the class again, and answers with the error
            model = ModelSpec(**request["cell"]["model"])
            if library := library_of(model.builder):
                module_of(library.builder).import_class(model.kwargs)
        with suppress(Exception):  # the fork answers with this error, too
            hide_once()
        if needs_gpu := _cell(request).needs_gpu:
            gpu.create()
        now = memory_of(read_status())
        file_bytes = now.file_bytes - PRELOADED.file_bytes
        request["baseline"] = asdict(replace(now, file_bytes=file_bytes))
        hidden_bytes = PRELOADED.anon_bytes + gpu.hidden_bytes(needs_gpu=needs_gpu)
        request["own_bytes"] = own_bytes + hidden_bytes
        request["kernels_bytes"] = gpu.kernels_bytes
        parent.send("answer", **_answer_in_fork(request))


def _import_simulation() -> int:
    """Import the modules that only a prediction needs; return their anonymous memory in bytes."""
    before = memory_of(read_status()).anon_bytes
    from weighin.predict import process, simulate, sparse  # noqa: F401

    return memory_of(read_status()).anon_bytes - before


def _cell(request: dict[str, Any]) -> Cell:
    fields = request["cell"]
    return Cell(**{**fields, "model": ModelSpec(**fields["model"])})


def _answer_in_fork(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request in a forked process; if the forked process dies, return how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        end_with_parent()
        # Small tensors are really written: a huge page would make 2 MiB resident for each.
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
        os.close(reading)
        answer = _answer(request)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(f"{json.dumps(answer)}\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = (
            pipe.readline()
        )  # one line: a process that the strategy started may hold the pipe open
    _, status = os.waitpid(child, 0)
    if _end_children():
        return {"cannot": f"CannotFollow: {_REFUSED}"}
    if text:
        reply: dict[str, Any] = json.loads(text)
        return reply
    return {"cannot": f"the symbolic run ended with status {os.waitstatus_to_exitcode(status)}"}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        cell = _cell(request)
        if "checked" in request:
            return _check(cell, request["checked"])
        if "make" in request:
            return _make(cell, request["make"])
        return _predict(cell, request)
    except Exception as error:
        traceback.print_exc()
        cannot = {"cannot": f"{type(error).__name__}: {one_line(str(error))}"}
        if isinstance(error, HarnessError):
            return cannot | {"error": [error.message, error.repair]}
        return cannot


def _check(cell: Cell, checked: dict[str, Any]) -> dict[str, Any]:
    from weighin.predict.sparse import refuse_misfit
    from weighin.stream.pretrained_library import Selection

    refuse_misfit(cell.model, Path(checked["source"]), Selection(**checked["selection"]))
    return {}


def _make(cell: Cell, make: dict[str, Any]) -> dict[str, Any]:
    from weighin.predict.sparse import main_dtype, make_sparse, write_manifest
    from weighin.stream.pretrained_library import Selection

    source = Path(make["source"]) if make["source"] else None
    folder = Path(make["folder"])
    own = make["own"]  # whether the user's checkpoint has the cell's format
    selection = Selection(**make["selection"])
    path = (
        source
        if own and source
        else make_sparse(cell.model, cell.format, make["dtype"], folder, source, selection)
    )
    manifest = write_manifest(cell.model, cell.dtype, folder)
    return {
        "checkpoint": str(path),
        "manifest": str(manifest),
        "checkpoint_dtype": main_dtype(path),
    }


def _predict(cell: Cell, request: dict[str, Any]) -> dict[str, Any]:
    builder = resolve_builder(cell.model.builder)
    from weighin.predict.process import PRELOADED
    from weighin.predict.simulate import run

    hidden_bytes = PRELOADED.anon_bytes
    use = _use(cell, builder, request["forward"], request["use_path"])
    manifest = read_manifest(
        Path(request["manifest"])
    )  # a worker reads it, too, which shapes the heap
    own_bytes = request["own_bytes"] - (hidden_bytes - PRELOADED.anon_bytes)
    baseline = replace(
        Memory(**request["baseline"]), anon_bytes=memory_of(read_status()).anon_bytes - own_bytes
    )
    checkpoint, strategy = Path(request["checkpoint"]), Path(request["strategy_path"])
    sys.addaudithook(_refuse_process)
    predicted = run(
        cell,
        builder,
        checkpoint,
        strategy,
        baseline,
        own_bytes,
        request["read_ahead_bytes"],
        request["kernels_bytes"],
        use,
    )
    del manifest
    _check_processes()
    return asdict(predicted)


def _use(cell: Cell, builder: Builder, forward: bool, path: str) -> "UseToFollow | None":
    """Return the use that follows the load (or None), prepared as a measured process prepares it."""
    from weighin.predict.simulate import UseToFollow

    if not cell.use and not forward:
        return None
    inputs = example_inputs(builder, cell.model.kwargs, getattr(torch, cell.dtype))
    if not cell.use:
        return UseToFollow(FORWARD, None, inputs)
    uses.prepare(cell.use)
    return UseToFollow(cell.use, uses.function_of(Job(cell, "", "", "", use_path=path)), inputs)


def _refuse_process(event: str, _arguments: object) -> None:
    """Refuse to start a process, of which Python reports most ways as an audit event.

    ``multiprocessing`` and C code start processes without an event; ``_check_processes`` finds them.
    """
    if event in _STARTS:
        _refused.append(event)
        raise CannotFollow(_REFUSED)


def _check_processes() -> None:
    """Raise CannotFollow if the strategy started a process, or tried to and caught the exception."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if _refused or of_children or psutil.Process().children():
        raise CannotFollow(_REFUSED)


def _end_children() -> bool:
    """Kill all children of this process and their descendants; return whether there were any."""
    found = False
    while children := psutil.Process().children():  # of a killed process, they become this one's
        found = True
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
    return found


if __name__ == "__main__":
    main()
