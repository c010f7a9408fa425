"""Load or save a model in phases: prepare, run the strategy, read every byte, verify and use the model."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from weighin.cell import FORWARD, ModelSpec, phase_of
from weighin.checkpoint.manifest import read_manifest
from weighin.phase_reporter import read_text
from weighin.probes.process import read_rollup
from weighin.stream.construct import Builder, construct, reset_buffers, resolve_builder
from weighin.worker.phases import Marks, named_by_strategy

_WARM_PIECE_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The implementation of ``weighin.strategy.Load`` in the measured process."""

    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    options: Mapping[str, Any]
    model: ModelSpec
    builder: Callable[..., torch.nn.Module]
    marks: Any  # measures phases: a worker has a ``Marks``, and a prediction has a ``Ledger``

    # Few strategies need ``pretrained_folder``, whose import is a part of their memory.

    @property
    def pretrained(self) -> Mapping[str, Any]:
        from weighin.stream.pretrained_folder import code_of

        names = ("architecture", "config")
        return {name: self.model.kwargs[name] for name in names} | {"code": code_of(self.model)}

    @property
    def folder(self) -> Mapping[str, Any] | None:
        from weighin.stream.pretrained_folder import arguments_of

        return arguments_of(self.model, self.checkpoint)

    @property
    def adapter(self) -> Path | None:
        from weighin.stream.pretrained_folder import adapter_of

        return adapter_of(self.model)

    def build_model(self) -> torch.nn.Module:
        return construct(lambda: self.builder(**self.model.kwargs), self.dtype)

    def reset_buffers(self, model: torch.nn.Module) -> None:
        reset_buffers(model, self.builder, self.model.kwargs, self.device, self.dtype)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.marks.phase(named_by_strategy(name))  # type: ignore[no-any-return]


def import_strategy(path: Path | str, name: str = "load") -> Callable[[Any], Any]:
    """Import a strategy's or use's file, and return its function ``name``: "load", "save" or "use"."""
    spec = spec_from_file_location(f"weighin_strategy_{Path(path).stem}", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[Any], Any] = getattr(module, name)
    return function


class Inputs(NamedTuple):
    """The arguments of one forward pass."""

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = MappingProxyType({})

    def to(self, device: torch.device) -> "Inputs":
        return self.each(lambda tensor: tensor.to(device))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        return Inputs(*tree_map_only(torch.Tensor, change, tuple(self)))


def example_inputs(
    builder: Builder, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Inputs | None:
    """Return the inputs of one forward pass, on the CPU, with floating-point tensors of ``dtype``.

    ``example_inputs`` in the builder's module may return positional arguments (a tuple or list), keyword
    arguments (a mapping), or one tensor. Without this function, return None.
    """
    examples = getattr(sys.modules[builder.__module__], "example_inputs", None)
    arguments = examples(**kwargs) if examples else None
    if isinstance(arguments, torch.Tensor):
        arguments = (arguments,)
    if not arguments:
        return None
    if isinstance(arguments, Mapping):
        inputs = Inputs(keywords=dict(arguments))
    else:
        inputs = Inputs(tuple(arguments))
    return inputs.each(lambda one: one.to(dtype) if one.is_floating_point() else one)


def settle_math() -> None:
    """Call MKL's vector functions on one thread, so that MKL selects its kernels there.

    If two threads make the first calls at the same time, MKL sometimes computes a part of the
    result with another kernel. In 1 of 100 processes on a busy machine, a table of rotary cosines
    was wrong by 1.5e-4 (torch 2.13, MKL 2024.2). weighin would blame the strategy for this error.
    """
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh):
        function(torch.ones(8))


def read_through(checkpoint: Path) -> None:
    """Read every file of the checkpoint, so that the kernel charges its pages to the cell's cgroup."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.iterdir())
    if checkpoint.suffix == ".json":  # an index of shards
        from weighin.stream import formats  # no other load needs it

        files = formats.files(checkpoint)
    piece = bytearray(_WARM_PIECE_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as source:
            while source.readinto(piece):
                pass


class NoResult(Exception):
    """A strategy returned no model, or left no file."""


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

            gpu = device if device.type == "cuda" else torch.device("cuda")
            if job.rank is not None and gpu.index is None:
                gpu = torch.device("cuda", job.rank % torch.cuda.device_count())
            marks.cuda = CudaMemory(gpu, cell.vram_limit_bytes)
            device = marks.cuda.device if device.type == "cuda" else device
        self.inputs = example_inputs(builder, cell.model.kwargs, dtype)
        self.argument = WorkerLoad(
            checkpoint, device, dtype, cell.options, cell.model, builder, marks
        )
        settle_math()
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
        marks = self.marks
        marks.restart()
        start_ns = marks.clock_ns()
        returned = import_strategy(self.job.strategy_path, self.job.cell.operation)(argument)
        marks.refuse_open()
        if marks.cuda:
            marks.cuda.synchronize()
        load_ns = marks.clock_ns() - start_ns
        marks.flush()
        notes = marks.cuda.notes_at_end() if marks.cuda else []
        marks.send("told", load_ns=load_ns, notes=notes)
        return returned

    def save(self) -> None:
        """Let the strategy save the model, sync the written files, and read them back to verify them."""
        from weighin.worker import saving

        marks, load, cell = self.marks, self.argument, self.job.cell
        argument = SimpleNamespace(  # a ``weighin.strategy.Save``
            model=self.model,
            target=(target := Path(self.job.target)),
            format=cell.format,
            options=cell.options,
            phase=load.phase,
        )
        self._run_strategy(argument)
        if not saving.files_in(target):
            raise NoResult("save() left no file in job.target")
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
        from weighin.checkpoint.checksum import checksum
        from weighin.worker import verify

        job, marks, load = self.job, self.marks, self.argument
        model = self._run_strategy(load)
        if not isinstance(model, torch.nn.Module):
            kind = "None" if model is None else f"a {type(model).__name__}"
            raise NoResult(f"load() returned {kind}, not a torch.nn.Module")
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
            # All ranks have read their own shards: now they compare whole tensors together.
            checksums |= {
                name: checksum(tensor.full_tensor())
                for name, tensor in tensors.items()
                if hasattr(tensor, "full_tensor")  # an import of DTensor would take 40 MiB
            }
        notes = verify.check_values(checksums, self.manifest, load.dtype)
        if not job.rank:  # only rank 0 sends notes
            marks.send("told", notes=notes)
        del tensors  # would keep the old buffers alive while a use converts the model
        inputs = self.inputs and self.inputs.to(load.device)
        start_ns, used_ns = marks.clock_ns(), None
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
        if job.cell.use or (inputs and job.cell.passes):
            used_ns = marks.clock_ns() - start_ns
        marks.send("done", first_use_ns=used_ns, marks_ns=marks.spent_ns)
