"""Run one cell: import torch, load the model in phases, read every byte, verify and use the model; or save
it in phases, sync the files, and read them back.

An isolation starts this module as ``python -m weighin.worker FOLDER``: the folder has the job, and a
socket, to which it reports what ``run/listener.py`` defines. What it imports before torch adds to the
figures, so that even pathlib, which takes 1 MiB, is imported after torch.
"""

import os
import sys
import time
from dataclasses import asdict
from typing import Any, NoReturn

from weighin.cell import FORWARD
from weighin.child_process import Tail, module
from weighin.probes.process import read_rollup
from weighin.result import Outcome
from weighin.stream.pretrained_library import library_of, module_of
from weighin.text import one_line
from weighin.worker.phases import BEFORE_LOAD, Marks, StrategyFailed, UseFailed, describe

_KEPT_BYTES = 4096  # of a rank's standard error


def main() -> None:
    folder, *ranks = sys.argv[1:]
    marks = Marks(folder, *map(int, ranks))
    job = marks.job
    if job.cell.ranks > 1 and job.rank is None:
        start_ranks(marks)
    if job.body:
        from weighin.worker.pytest_body import run_body

        run_body(marks, job.body)
    try:
        worker = Worker(marks)
    except Exception as error:
        marks.fail(Outcome.MEASUREMENT_FAILED, f"{BEFORE_LOAD}: {describe(error)}")
    try:
        if job.cell.operation == "save":
            worker.save()
        else:
            worker.load()
    except BaseException as error:
        marks.fail(*classify(error, job.strategy_path))
    os._exit(0)  # skip the interpreter's shutdown, which takes time


class Worker:
    """Loads or saves a model, after what it prepares in the same way for every strategy."""

    def __init__(self, marks: Marks) -> None:
        """Import torch and the model's code, create a CUDA context, report the memory before the load."""
        self.marks, self.job = marks, (job := marks.job)
        cell = job.cell
        import_start_ns = time.monotonic_ns()
        with marks.phase("import"):
            import torch
        import_ns = time.monotonic_ns() - import_start_ns
        # Packages such as transformers import a module only when a class in it is first used.
        if library := library_of(cell.model.builder):
            with marks.phase(f"import {library.name}"):
                module_of(library.builder).import_class(cell.model.kwargs)
        with marks.phase("prepare"):
            from pathlib import Path

            from weighin.checkpoint.manifest import read_manifest
            from weighin.stream.construct import resolve_builder
            from weighin.worker import loading

            sys.path[:0] = job.python_path
            builder = resolve_builder(cell.model.builder)
            device, dtype = torch.device(cell.device), getattr(torch, cell.dtype)
            if cell.needs_gpu:
                from weighin.worker.cuda import CudaMemory

                gpu = device if device.type == "cuda" else torch.device("cuda")
                if job.rank is not None and gpu.index is None:
                    gpu = torch.device("cuda", job.rank % torch.cuda.device_count())
                marks.cuda = CudaMemory(gpu, cell.vram_limit_bytes)
                device = marks.cuda.device if device.type == "cuda" else device
            self.inputs = loading.example_inputs(builder, cell.model.kwargs, dtype)
            checkpoint = Path(job.checkpoint)
            self.argument = loading.WorkerLoad(
                checkpoint, device, dtype, cell.options, cell.model, builder, marks
            )
            loading.settle_math()
            if cell.use:
                from weighin.worker import uses

                uses.prepare(cell.use)
            if "LD_PRELOAD" in cell.environment:
                loading.check_preloaded()
            if cell.operation == "save":
                from weighin.worker import saving

                self.model = saving.load_model(self.argument)
            if job.rank is not None:
                loading.join_group(device)
            self.manifest = read_manifest(Path(job.manifest))
            if cell.cache == "warm":
                loading.read_through(checkpoint)
        marks.report_baseline(import_ns)

    def _run_strategy(self, argument: Any) -> Any:
        """Import the strategy and call it with ``argument``; the load time includes the import.

        Raises:
            StrategyFailed: the strategy raised an error.
        """
        from weighin.worker.loading import import_strategy

        job, marks = self.job, self.marks
        if marks.cuda:
            marks.send("told", notes=marks.cuda.notes())
        marks.restart()
        start_ns = marks.clock_ns()
        try:
            returned = import_strategy(job.strategy_path, job.cell.operation)(argument)
            marks.refuse_open()
            if marks.cuda:
                marks.cuda.synchronize()
        except BaseException as error:
            raise StrategyFailed from error
        load_ns = marks.clock_ns() - start_ns
        marks.flush()
        marks.send("told", load_ns=load_ns)
        if marks.cuda:
            marks.send("told", notes=marks.cuda.notes_at_end())
        return returned

    def save(self) -> None:
        """Let the strategy save the model, sync the written files, and read them back to verify them."""
        from pathlib import Path

        from weighin.worker import saving

        marks, cell = self.marks, self.job.cell
        target = Path(self.job.target)
        self._run_strategy(saving.WorkerSave(self.model, target, cell.format, cell.options, marks))
        if not saving.files_in(target):
            raise StrategyFailed("save() left no file in job.target")
        marks.restart()
        start_ns = time.monotonic_ns()
        with marks.phase("sync"):
            saving.sync(target)
            end_ns = time.monotonic_ns()
        written = asdict(saving.sizes(target))
        marks.send("ready", ready_at_ns=end_ns, touch_ns=end_ns - start_ns, written=written)
        with marks.phase("verify"):
            saving.check(target, self.manifest, self.argument.dtype)
        marks.send("done", first_use_ns=None, marks_ns=marks.spent_ns)

    def load(self) -> None:
        """Let the strategy load the model, read every byte of it, compare its checksums, and use it.

        Ranks read their own shards, and compare whole tensors only when all have done so.
        """
        import torch

        from weighin.worker import verify

        job, marks, load = self.job, self.marks, self.argument
        model = self._run_strategy(load)
        if not isinstance(model, torch.nn.Module):
            kind = "None" if model is None else f"a {type(model).__name__}"
            raise StrategyFailed(f"load() returned {kind}, not a torch.nn.Module")
        tensors = verify.named_tensors(model, [entry.name for entry in self.manifest.tensors])
        verify.check_structure(tensors, self.manifest, load.device, load.dtype)
        marks.restart()
        start_ns = time.monotonic_ns()
        with marks.phase("touch"):
            checksums = verify.touch(tensors)
            end_ns = time.monotonic_ns()
        marks.send("ready", ready_at_ns=end_ns, touch_ns=end_ns - start_ns)
        if job.rank is not None:
            marks.send("shared", pss_bytes=read_rollup()["Pss"])
            checksums |= verify.checksums_of_sharded(tensors)
        notes = verify.check_values(checksums, self.manifest, load.dtype)
        if not job.rank:  # only rank 0 sends notes
            marks.send("told", notes=notes)
        del tensors  # would keep the old buffers alive while a use converts the model
        inputs = self.inputs and self.inputs.to(load.device)
        start_ns, used_ns = marks.clock_ns(), None
        if job.cell.use:
            from weighin.worker import uses

            marks.send("told", **uses.perform(model, job, inputs, marks))
        elif inputs:
            for _ in range(job.cell.passes):
                with marks.phase(FORWARD):
                    verify.check_forward(model, inputs)
        if job.cell.use or (inputs and job.cell.passes):
            used_ns = marks.clock_ns() - start_ns
        marks.send("done", first_use_ns=used_ns, marks_ns=marks.spent_ns)


def classify(error: BaseException, strategy: str) -> tuple[Outcome, str]:
    """Return the outcome and the message of an error in a load, a save, its verification or a use."""
    from weighin.worker.cuda import is_out_of_memory
    from weighin.worker.verify import WrongWeights

    if isinstance(error, WrongWeights):
        return Outcome.WRONG_WEIGHTS, str(error)
    if isinstance(error, StrategyFailed) and error.__cause__ is None:
        return Outcome.STRATEGY_FAILED, str(error)
    cause = error.__cause__ if isinstance(error, StrategyFailed | UseFailed) else error
    assert cause is not None
    of_gpu: BaseException | None = cause
    while of_gpu and not is_out_of_memory(of_gpu):
        of_gpu = of_gpu.__cause__  # a library's error may have been put into words
    if of_gpu:
        return Outcome.CUDA_OOM, one_line(str(of_gpu))
    if isinstance(error, UseFailed):
        return Outcome.USE_FAILED, f"{error}: {describe(cause)}"
    return Outcome.STRATEGY_FAILED, describe(cause, strategy)


def start_ranks(marks: Marks) -> NoReturn:
    """Run all ranks of a cell (processes that load one model), report each one's end, and then end.

    This process replaces torchrun, which would import torch into the cell's cgroup, and end all ranks
    before weighin can see which rank the kernel killed. Each rank gets torchrun's variables, and connects
    to weighin itself. If a rank fails, weighin ends the others: they end with this process.
    """
    import socket
    import subprocess
    import threading

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(marks.job.cell.ranks),
        "LOCAL_WORLD_SIZE": str(marks.job.cell.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    telling = threading.Lock()

    def run(rank: int) -> None:
        command = module("weighin.worker", marks.folder, str(rank))
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
        except OSError as error:  # as where a limit of processes is reached: the others would wait
            print(f"cannot start rank {rank}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        assert process.stdout
        printed = Tail(os.dup(process.stdout.fileno()))
        code = process.wait()
        with telling:  # in the order in which they end
            marks.send(
                "ended",
                rank=rank,
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                stderr_tail=printed.text[-_KEPT_BYTES:].decode(errors="replace"),
            )

    ranks = [threading.Thread(target=run, args=[rank]) for rank in range(marks.job.cell.ranks)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    os._exit(0)


if __name__ == "__main__":
    main()
