"""Run a strategy on tensors without values, from its import until every tensor was read once.

A use of the loaded model, such as a training step, may follow.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from heapq import nlargest
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from weighin.cell import FORK, TRAINING, Cell, phase_of
from weighin.predict.allocators import CachingAllocator, Extents
from weighin.predict.dispatch import CannotFollow, Operations
from weighin.predict.ledger import Ledger, extent
from weighin.predict.patches import declared, gguf_reads, pretended, safetensors_reads
from weighin.predict.prediction import ABOVE_PEAK_BYTES, PredictedUse, Prediction, Work, reasons
from weighin.predict.process import PRELOADED
from weighin.result import WINDOWS_IN_FLIGHT, Memory
from weighin.stream.tensors import tensors_in, tied_names
from weighin.units import MIB
from weighin.worker.loading import Inputs, WorkerLoad, import_strategy
from weighin.worker.uses import CHILDREN, Function
from weighin.worker.verify import identity, named_tensors, touch

_PAGE_TABLE_SHARE: Final = 512  # page tables take 1/512 of the memory, even with huge pages
_USE_SHARE: Final = 100
_USE_BYTES: Final = 16 * MIB
"""The RAM floor of a use adds 1 % and these bytes to the predicted peak, which may be too low.

In each run, the pages that a backward pass frees are at different addresses of the heap.
"""
_PART: Final = 4096  # rows or columns of a matrix: a larger matrix needs no larger buffers
_TOUCHED_BYTES: Final = 8 * MIB  # two chunks of a checksum: more chunks need no more memory

_OF_A_CHILD_BYTES: Final = 4 * MIB
"""The private memory of a forked Python process, without the weights that it writes."""


@dataclass(frozen=True, slots=True)
class UseToFollow:
    """The use of a loaded model: its name, its function, and inputs of a forward pass."""

    name: str
    function: Function | None = None
    inputs: Inputs | None = None


def run(
    cell: Cell,
    builder: Callable[..., torch.nn.Module],
    checkpoint: Path,
    strategy: Path,
    baseline: Memory,
    own_bytes: int,
    read_ahead_bytes: int,
    kernels_bytes: int = 0,
    use: UseToFollow | None = None,
) -> Prediction:
    """Run a cell's strategy on tensors without values; return the memory and work of a real load.

    Args:
        baseline: the memory of the parent process, of which this process is a fork.
        own_bytes: the anonymous memory of this process that a measured process would not have.
        read_ahead_bytes: the bytes that the kernel reads ahead for a missing page of a mapped file.
        kernels_bytes: the part of ``own_bytes`` that CUDA takes when a GPU first reads the model.
        use: the use that follows the load; None if nothing follows the load.
    """
    device = torch.device(cell.device)
    gpu = CachingAllocator(cell.vram_limit_bytes) if cell.needs_gpu else None
    ledger = Ledger(gpu, baseline, own_bytes)
    PRELOADED.on_import = ledger.adopt
    job = WorkerLoad(
        checkpoint=checkpoint,
        device=device,
        dtype=getattr(torch, cell.dtype),
        options=cell.options,
        model=cell.model,
        builder=builder,
        marks=ledger,
    )
    with _intercepted(ledger, checkpoint):
        modules = len(sys.modules)
        load = import_strategy(strategy)
        with safetensors_reads(ledger, load.__globals__):
            start_ns = time.process_time_ns()
            model = load(job)
            ledger.work["cpu_ns"] = time.process_time_ns() - start_ns
        ledger.work["modules"] += len(sys.modules) - modules
    loaded = _ready(ledger, model, cell, read_ahead_bytes, kernels_bytes)
    if use is None:
        return loaded
    if use.inputs and device.type == "cpu":
        _multiply(model)
    with _intercepted(ledger, checkpoint):
        inputs = use.inputs and use.inputs.to(device)
        used = follow(ledger, model, replace(use, inputs=inputs))
    most = used.all_most_bytes
    most += most // _USE_SHARE + _USE_BYTES + ledger.shared_bytes
    in_use = _floor(most, loaded.in_flight_bytes)
    return replace(
        loaded,
        use=used,
        floor_bytes=max(loaded.floor_bytes or 0, in_use),
        phases=tuple(ledger.phases),
    )


@contextmanager
def _intercepted(ledger: Ledger, checkpoint: Path) -> Iterator[None]:
    gpu = pretended(ledger) if ledger.cuda else nullcontext()
    with declared(ledger), gguf_reads(ledger, checkpoint), gpu, Operations(ledger):
        yield


def _ready(
    ledger: Ledger, model: torch.nn.Module, cell: Cell, read_ahead_bytes: int, kernels_bytes: int
) -> Prediction:
    """Read every tensor of the loaded model, and return the prediction of the load.

    The RAM floor includes the file pages that the disk is reading: they cannot be reclaimed.
    """
    tensors = {identity(tensor): tensor for tensor in named_tensors(model).values()}
    with ledger.phase("touch"):
        for tensor in tensors.values():
            ledger.read(tensor)
        if torch.device(cell.device).type == "cpu":
            _touch(ledger, (tensor.nbytes for tensor in tensors.values()))
        else:
            ledger.adopt(kernels_bytes)
    model_bytes = sum(tensor.nbytes for tensor in tensors.values())
    mapped = any(ledger.place_of(tensor) == "file" for tensor in tensors.values())
    in_flight_bytes = mapped * WINDOWS_IN_FLIGHT * read_ahead_bytes
    highest: dict[str, Any] = dict.fromkeys(ledger.phases[-1].cuda)
    for name in highest if ledger.cuda else ():
        highest[name] = max(getattr(phase, name) or 0 for phase in ledger.phases)
    work = Work(**ledger.work)
    kinds = {one.dtype for one in tensors.values() if one.is_floating_point() or one.is_complex()}
    most_bytes = max(ledger.most_anon_bytes, ledger.peak_anon_bytes)
    mapped_bytes = ledger.peak_file_bytes - ledger.baseline.file_bytes
    requested = highest["cuda_requested_bytes"]
    return Prediction(
        cell,
        model_bytes=model_bytes,
        baseline_anon_bytes=ledger.baseline.anon_bytes,
        baseline_file_bytes=ledger.baseline.file_bytes,
        host_anon_peak_bytes=ledger.peak_anon_bytes,
        host_anon_least_bytes=min(ledger.least_anon_bytes, ledger.peak_anon_bytes),
        host_anon_most_bytes=most_bytes,
        tensor_peak_bytes=ledger.peak_tensor_bytes,
        host_file_peak_bytes=ledger.peak_file_bytes,
        in_flight_bytes=in_flight_bytes,
        floor_bytes=_floor(most_bytes + ledger.shared_bytes, in_flight_bytes),
        disk_read_bytes=work.disk_read_bytes,
        work=work,
        phases=tuple(ledger.phases),
        reasons=(*reasons(model_bytes, ledger.peak_tensor_bytes, mapped_bytes, requested),),
        is_mixed=bool(tied_names(model)) or not kinds <= {getattr(torch, cell.dtype)},
        computes_buffers=any(each._non_persistent_buffers_set for each in model.modules()),
        **highest,
    )


def _floor(most_bytes: int, in_flight_bytes: int) -> int:
    return most_bytes + most_bytes // _PAGE_TABLE_SHARE + ABOVE_PEAK_BYTES + in_flight_bytes


def _touch(ledger: Ledger, sizes: Iterable[int]) -> None:
    """Read real tensors as a measured process reads its model, to measure the memory of reading.

    ``sizes`` are the sizes of the model's tensors, in bytes. Each thread reads one tensor. A part
    of a large tensor suffices, because reading the whole tensor needs no more memory.
    """
    before, other = ledger.own_anon_bytes, ledger.other_anon_bytes
    largest = nlargest(torch.get_num_threads(), (min(size, _TOUCHED_BYTES) for size in sizes))
    tensors = {f"{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(largest)}
    ledger.other_anon_bytes += ledger.own_anon_bytes - before
    touch(tensors)
    ledger.update()
    tensors.clear()
    ledger.other_anon_bytes = other


def _multiply(model: torch.nn.Module) -> None:
    """Multiply real matrices like a forward pass, so that the math library allocates buffers.

    The library allocates buffers for each thread, of a fixed size for large matrices.
    """
    shapes = {
        (min(rows, _PART), min(columns, _PART), weight.dtype)
        for weight in model.parameters()
        if weight.dim() == 2 and weight.is_floating_point() and weight.itemsize > 1
        for rows, columns in [weight.shape]
    }
    for rows, columns, dtype in nlargest(2, shapes, key=lambda shape: shape[0] * shape[1]):
        some_tokens = torch.zeros(16, columns, dtype=dtype)
        torch.nn.functional.linear(some_tokens, torch.zeros(rows, columns, dtype=dtype))


def follow(ledger: Ledger, model: torch.nn.Module, use: UseToFollow) -> PredictedUse:
    """Run the use, recorded as one phase, and return its peaks; the use "fork" is only computed.

    Raises:
        CannotFollow: the use runs code whose memory cannot be predicted.
    """
    ledger.restart_peaks()
    written_bytes = 0
    with ledger.phase(phase_of(use.name)):
        if use.name == FORK:
            pages = Extents()
            written_bytes = sum(pages.add(*extent(t)) for t in named_tensors(model).values())
        else:
            kept = _perform(ledger, model, use)
            ledger.update()
            del kept
    child_bytes = written_bytes + _OF_A_CHILD_BYTES
    return PredictedUse(
        name=use.name,
        host_anon_peak_bytes=ledger.peak_anon_bytes,
        host_anon_least_bytes=min(ledger.least_anon_bytes, ledger.peak_anon_bytes),
        host_anon_most_bytes=max(ledger.most_anon_bytes, ledger.peak_anon_bytes),
        tensor_peak_bytes=ledger.peak_tensor_bytes + CHILDREN * written_bytes,
        host_file_peak_bytes=ledger.peak_file_bytes,
        children_private_bytes=(child_bytes,) * CHILDREN if use.name == FORK else (),
        **ledger.phases[-1].cuda,
    )


def _perform(ledger: Ledger, model: torch.nn.Module, use: UseToFollow) -> Any:
    if use.function is None:
        if use.inputs is None:
            raise CannotFollow("the model's module has no example_inputs for a forward pass")
        model.eval()
        with torch.inference_mode():
            for tensor in tensors_in(model(*use.inputs.positional, **use.inputs.keywords)):
                torch.isfinite(tensor).all()
        return None
    with tempfile.TemporaryDirectory() as folder, _saves():
        try:
            return use.function(model, use.inputs, Path(folder))
        except (CannotFollow, RuntimeError, NotImplementedError):
            if use.name not in TRAINING or use.inputs is None:
                raise
        # Without inputs, the use makes its own gradients; only the activations are then missing.
        for weight in model.parameters():
            weight.grad = None
        ledger.restart_peaks()
        return use.function(model, None, Path(folder))


@contextmanager
def _saves() -> Iterator[None]:
    """Let ``torch.save`` write no tensor values.

    The memory of the save stays the same, because a real save makes no copy of the values.
    """
    original = torch._C.PyTorchFileWriter

    class Writer(original):  # type: ignore[misc, valid-type]
        def write_record(self, name: str, data: Any, size: int) -> None:
            if isinstance(data, torch.UntypedStorage):
                super().write_record_metadata(name, size)
            else:
                super().write_record(name, data, size)

    with patch.object(torch._C, "PyTorchFileWriter", Writer):
        yield
