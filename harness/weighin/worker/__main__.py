"""Run one cell: import torch, load the model in phases, read every byte, verify and use the model.

A cell that measures a save saves the model in phases, syncs the files, and reads them back to
verify them.

An isolation starts this module as ``python -m weighin.worker``; ``phase_reporter.py`` defines
what it reports. Modules of weighin that are imported before torch would add weighin's own memory to the
figures. The worker therefore imports even pathlib, which takes 1 MiB, after torch.
"""

import contextlib
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from weighin.cell import Job
from weighin.probes.process import read_pss
from weighin.result import Outcome
from weighin.uses import FORWARD
from weighin.worker.failures import BEFORE_LOAD, StrategyFailed, classify, describe, fail
from weighin.worker.phases import Lifeline, Marks
from weighin.worker.warmup import (
    check_preloaded,
    import_model_package,
    join_group,
    read_through,
    report_baseline,
    settle_math,
)

if TYPE_CHECKING:
    import torch

    from weighin.worker.loading import Inputs, WorkerLoad


@dataclass(frozen=True, slots=True)
class PreparedWorker:
    """The objects that a worker creates before the load, in the same way for every strategy."""

    job: Job
    lifeline: Lifeline
    marks: Marks
    load: "WorkerLoad"
    inputs: "Inputs | None"
    manifest: Any
    model: "torch.nn.Module | None" = None
    """The model to save; None for a load."""


def main() -> None:
    lifeline = Lifeline()
    job = lifeline.job
    if job.cell.ranks > 1 and job.rank is None:
        from weighin.worker.launcher import launch

        launch(job, lifeline)
    marks = Marks(lifeline)
    if job.body:
        from weighin.worker.pytest_body import run_body

        run_body(job, job.body, lifeline, marks)
    try:
        prepared = prepare(job, lifeline, marks)
    except Exception as error:
        fail(lifeline, Outcome.MEASUREMENT_FAILED, f"{BEFORE_LOAD}: {describe(error)}")
    try:
        if prepared.model is not None:
            save(prepared, prepared.model)
        else:
            check(prepared, load(prepared))
    except BaseException as error:
        outcome, message = classify(error, job.strategy_path)
        if marks.cuda:
            with contextlib.suppress(Exception):  # a failed GPU may raise a second error
                tell_trace(marks)
        summary = marks.cuda.summary() if marks.cuda and outcome is Outcome.CUDA_OOM else ""
        fail(lifeline, outcome, message, summary)
    os._exit(0)  # skip the interpreter's shutdown, which takes time


def prepare(job: Job, lifeline: Lifeline, marks: Marks) -> PreparedWorker:
    """Import torch and the model's code, create a CUDA context, report the memory before the load."""
    import_start_ns = time.monotonic_ns()
    with marks.phase("import"):
        import torch
    import_ns = time.monotonic_ns() - import_start_ns
    import_model_package(job.cell.model, marks.phase)
    with marks.phase("prepare"):
        from pathlib import Path

        from weighin.checkpoint.manifest import read_manifest
        from weighin.construction.skeleton import resolve_builder
        from weighin.worker.loading import WorkerLoad, example_inputs

        sys.path[:0] = job.python_path
        cell = job.cell
        builder = resolve_builder(cell.model.builder)
        device = torch.device(cell.device)
        if cell.needs_gpu:
            from weighin.worker.cuda import CudaMemory

            gpu = device if device.type == "cuda" else torch.device("cuda")
            if job.rank is not None and gpu.index is None:
                gpu = torch.device("cuda", job.rank % torch.cuda.device_count())
            marks.cuda = CudaMemory(gpu, cell.vram_limit_bytes)
            device = marks.cuda.device if device.type == "cuda" else device
        inputs = example_inputs(builder, cell.model.kwargs, getattr(torch, cell.dtype))
        load = WorkerLoad(
            checkpoint=Path(job.checkpoint),
            device=device,
            dtype=getattr(torch, cell.dtype),
            options=cell.options,
            model=cell.model,
            builder=builder,
            marks=marks,
        )
        settle_math()
        if cell.use:
            from weighin.worker import uses

            uses.prepare(cell.use)
        if "LD_PRELOAD" in cell.environment:
            check_preloaded()
        model = None
        if cell.operation == "save":
            from weighin.worker import saving

            model = saving.load_model(load)
        if job.rank is not None:
            join_group(device, job.timeout_s)
        manifest = read_manifest(Path(job.manifest))
        prepared = PreparedWorker(job, lifeline, marks, load, inputs, manifest, model)
        if cell.cache == "warm":
            read_through(load.checkpoint)
    marks.flush()
    report_baseline(lifeline, marks, import_ns)
    return prepared


def load(worker: PreparedWorker) -> "torch.nn.Module":
    """Run the strategy, and return the model that the strategy returns.

    Raises:
        StrategyFailed: the strategy raises, or does not return a module.
    """
    import torch

    model = run_strategy(worker, worker.load)
    if not isinstance(model, torch.nn.Module):
        kind = "None" if model is None else f"a {type(model).__name__}"
        raise StrategyFailed(f"load() returned {kind}, not a torch.nn.Module")
    return model


def run_strategy(worker: PreparedWorker, argument: Any) -> Any:
    """Import the strategy and call it with ``argument``; the load time includes the import."""
    from pathlib import Path

    from weighin.worker.loading import import_strategy

    job, lifeline, marks = worker.job, worker.lifeline, worker.marks
    if marks.cuda:
        for note in marks.cuda.notes():
            lifeline.send("note", text=note)
        if job.trace:
            marks.cuda.start_trace()
    marks.restart()
    marked_ns, start_ns = marks.spent_ns, time.monotonic_ns()
    try:
        returned = import_strategy(Path(job.strategy_path), job.cell.operation)(argument)
        marks.refuse_open()
        if marks.cuda:
            marks.cuda.synchronize()
    except BaseException as error:
        raise StrategyFailed from error
    load_ns = time.monotonic_ns() - start_ns - (marks.spent_ns - marked_ns)
    marks.flush()
    lifeline.send("loaded", load_ns=load_ns)
    if marks.cuda:
        tell_trace(marks)
        for note in marks.cuda.notes_at_end():
            lifeline.send("note", text=note)
    return returned


def save(worker: PreparedWorker, model: "torch.nn.Module") -> None:
    """Let the strategy save the model, sync the written files, and read them back to verify them."""
    from pathlib import Path

    from weighin.worker import saving

    lifeline, marks, cell = worker.lifeline, worker.marks, worker.job.cell
    target = Path(worker.job.target)
    run_strategy(worker, saving.WorkerSave(model, target, cell.format, cell.options, marks))
    if not saving.files_in(target):
        raise StrategyFailed("save() left no file in job.target")
    marks.restart()
    start_ns = time.monotonic_ns()
    with marks.phase("sync"):
        saving.sync(target)
        end_ns = time.monotonic_ns()
    written = asdict(saving.sizes(target))
    lifeline.send("ready", t_ns=end_ns, touch_ns=end_ns - start_ns, written=written)
    with marks.phase("verify"):
        saving.check(target, worker.manifest, worker.load.dtype)
    lifeline.send("done", first_use_ns=None, marks_ns=marks.spent_ns)


def check(worker: PreparedWorker, model: "torch.nn.Module") -> None:
    """Read every byte of the model, compare the checksums with the checkpoint's, and run the model.

    If tensors are sharded over ranks, each rank reads its own shards. The ranks compare whole
    tensors only after all ranks have reported that they have read their shards.
    """
    from weighin.worker import verify

    job, lifeline, marks, load = worker.job, worker.lifeline, worker.marks, worker.load
    expected = [entry.name for entry in worker.manifest.tensors]
    tensors = verify.named_tensors(model, expected)
    verify.check_structure(tensors, worker.manifest, load.device, load.dtype)
    marks.restart()
    start_ns = time.monotonic_ns()
    with marks.phase("touch"):
        checksums = verify.touch(tensors)
        end_ns = time.monotonic_ns()
    lifeline.send("ready", t_ns=end_ns, touch_ns=end_ns - start_ns)
    if job.rank is not None:
        lifeline.send("shared", pss_bytes=read_pss())
        checksums |= verify.checksums_of_sharded(tensors)
    for note in verify.check_values(checksums, worker.manifest, load.dtype):
        if not job.rank:  # only rank 0 sends notes
            lifeline.send("note", text=note)
    del tensors  # would keep the old buffers alive while a use converts the model
    first_use_ns = use(worker, model)
    lifeline.send("done", first_use_ns=first_use_ns, marks_ns=marks.spent_ns)


def use(worker: PreparedWorker, model: "torch.nn.Module") -> int | None:
    """Perform the cell's use, or run forward passes; return the time in ns, None without either."""
    from weighin.worker import verify

    job, marks, cell, inputs = worker.job, worker.marks, worker.job.cell, worker.inputs
    if not cell.use and (inputs is None or not cell.passes):
        return None
    inputs = inputs and inputs.to(worker.load.device)
    start_ns, marked_ns = time.monotonic_ns(), marks.spent_ns
    if inputs and not cell.use:
        for _ in range(cell.passes):
            with marks.phase(FORWARD):
                verify.check_forward(model, inputs)
    else:
        from weighin.worker import uses

        worker.lifeline.send("used", **uses.perform(model, job, inputs, marks))
    return time.monotonic_ns() - start_ns - (marks.spent_ns - marked_ns)


def tell_trace(marks: Marks) -> None:
    """Send the events that the CUDA allocator recorded, if any."""
    if marks.cuda and (trace := marks.cuda.take_trace()) is not None:
        marks.send_in_pieces("trace", "events", trace.pop("events"), **trace)


if __name__ == "__main__":
    main()
