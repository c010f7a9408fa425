"""Load or save a model: prepare, run the strategy, read every byte, verify and use the model."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from weighin.cell import FORWARD, phase_of
from weighin.checkpoint.checksum import checksum
from weighin.checkpoint.manifest import read_manifest
from weighin.phase_reporter import read_text
from weighin.probes.process import read_rollup
from weighin.result import Outcome
from weighin.stream.construct import resolve_builder
from weighin.worker import loading, verify
from weighin.worker.phases import Marks


def read_through(checkpoint: Path) -> None:
    """Read every file of the checkpoint, so that the kernel charges its pages to the cell's cgroup."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.iterdir())
    if checkpoint.suffix == ".json":  # an index of shards
        from weighin.stream import formats  # no other load needs it

        files = formats.files(checkpoint)
    piece = bytearray(1024**2)
    for file in files:
        with file.open("rb", buffering=0) as source:
            while source.readinto(piece):
                pass


class Worker:
    """Loads or saves a model, after what it prepares in the same way for every strategy."""

    use = ""  # which has begun

    def __init__(self, marks: Marks) -> None:
        self.marks, self.job = marks, (job := marks.job)
        cell, checkpoint = job.cell, Path(job.checkpoint)
        sys.path[:0] = job.python_path
        builder = resolve_builder(cell.model.builder)
        device, dtype = torch.device(cell.device), getattr(torch, cell.dtype)
        if cell.needs_gpu:
            from weighin.worker.cuda import CudaMemory

            gpu = device
            if job.rank is not None and device.index is None:
                gpu = torch.device("cuda", job.rank % torch.cuda.device_count())
            marks.cuda = CudaMemory(gpu, cell.vram_limit_bytes)
            device = marks.cuda.device if device.type == "cuda" else device
        self.inputs = loading.example_inputs(builder, cell.model.kwargs, dtype)
        self.argument = loading.Load(
            checkpoint, device, dtype, cell.options, cell.model, builder, marks
        )
        loading.settle_math()
        if cell.use:
            from weighin.worker import uses

            uses.prepare(cell.use)
        if "LD_PRELOAD" in cell.environment:  # the dynamic linker only prints what it cannot load
            mapped = read_text("/proc/self/maps")
            for library in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
                if os.path.realpath(library) not in mapped:
                    raise OSError(f"LD_PRELOAD: the dynamic linker did not load {library}")
        if cell.operation == "save":
            from weighin.worker import saving

            self.model = saving.load_model(self.argument)
        if job.rank is not None:
            import torch.distributed as dist  # no other worker needs it

            gpu_id = device if device.type == "cuda" else None
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpu_id else "gloo",
                timeout=timedelta(days=365),  # weighin itself ends the ranks at the cell's time-out
                device_id=gpu_id,
            )
        self.manifest = read_manifest(Path(job.manifest))
        if cell.cache == "warm":
            read_through(checkpoint)

    def _run_strategy(self, argument: Any) -> Any:
        """Import the strategy and call it with ``argument``; the load time includes the import."""
        marks, job = self.marks, self.job
        marks.restart()
        start_ns = marks.clock_ns()
        returned = loading.import_strategy(job.strategy_path, job.cell.operation)(argument)
        if marks.cuda:
            marks.cuda.synchronize()
        load_ns = marks.clock_ns() - start_ns
        marks.flush()
        marks.send("told", load_ns=load_ns, notes=marks.cuda.notes_at_end() if marks.cuda else [])
        return returned

    def save(self) -> None:
        """Let the strategy save the model, sync the written files, and read them back to verify them."""
        from weighin.worker import saving

        marks, load, cell, target = self.marks, self.argument, self.job.cell, Path(self.job.target)
        self._run_strategy(loading.Save(self.model, target, cell.format, cell.options, load.phase))
        if not saving.files_in(target):
            marks.fail(Outcome.STRATEGY_FAILED, "save() left no file in job.target")
        marks.restart()
        start_ns = time.monotonic_ns()
        with marks.phase("sync"):
            saving.sync(target)
            end_ns = time.monotonic_ns()
        written = saving.sizes(target)
        marks.send("ready", ready_at_ns=end_ns, touch_ns=end_ns - start_ns, written=written)
        with marks.phase("verify"):
            saving.check(target, self.manifest, load.dtype)
        marks.send("done", first_use_ns=None, marks_ns=marks.spent_ns)

    def load(self) -> None:
        """Let the strategy load the model, read every byte of it, compare its checksums, and use it."""
        job, marks, load = self.job, self.marks, self.argument
        model = self._run_strategy(load)
        if not isinstance(model, torch.nn.Module):
            kind = "None" if model is None else f"a {type(model).__name__}"
            marks.fail(Outcome.STRATEGY_FAILED, f"load() returned {kind}, not a torch.nn.Module")
        names = [entry.name for entry in self.manifest.tensors]
        tensors = verify.named_tensors(model, names)
        is_renamed = bool(job.files_manifest) and tensors.keys() != {*names}
        if is_renamed:
            verify.check_places(tensors, load.device)
        else:
            verify.check_structure(tensors, self.manifest, load.device, load.dtype)
        marks.restart()
        start_ns = time.monotonic_ns()
        with marks.phase("touch"):
            checksums = verify.touch(tensors)
            end_ns = time.monotonic_ns()
        marks.send("ready", ready_at_ns=end_ns, touch_ns=end_ns - start_ns)
        if job.rank is not None:
            marks.send("shared", pss_bytes=read_rollup()["Pss"])
            # All ranks have read their own shards: now they compare whole tensors together.
            checksums |= {
                name: checksum(tensor.full_tensor())
                for name, tensor in tensors.items()
                if hasattr(tensor, "full_tensor")  # an import of DTensor would take 40 MiB
            }
        if is_renamed:
            known = [self.manifest, read_manifest(Path(job.files_manifest))]
            verify.check_parameters(model, checksums, known, load.dtype)
        else:
            verify.check_values(checksums, self.manifest, load.dtype)
        del tensors  # would keep the old buffers alive while a use converts the model
        inputs = self.inputs and self.inputs.to(load.device)
        start_ns, is_used = marks.clock_ns(), job.cell.use or (inputs and job.cell.passes)
        if job.cell.use:
            from weighin.worker import uses

            self.use = job.cell.use
            with marks.phase(phase_of(self.use)):
                done = uses.function_of(job)(model, inputs, Path(job.target))
            private = done.children_private_bytes
            marks.send("told", gradients=done.gradients, children_private_bytes=private)
        elif inputs:
            for _ in range(job.cell.passes):
                with marks.phase(FORWARD):
                    verify.check_forward(model, inputs)
        used_ns = marks.clock_ns() - start_ns if is_used else None
        marks.send("done", first_use_ns=used_ns, marks_ns=marks.spent_ns)
