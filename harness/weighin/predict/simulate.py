"""Make a checkpoint of holes (a sparse file), run a strategy on it, touch every tensor, and use the model."""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from heapq import nlargest
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from weighin.cell import TRAINING, Cell, ModelSpec, phase_of
from weighin.checkpoint import generate, reader
from weighin.checkpoint.checksum import CELL_DTYPES
from weighin.checkpoint.manifest import Manifest
from weighin.predict.allocators import CachingAllocator
from weighin.predict.dispatch import CannotFollow, Operations
from weighin.predict.ledger import Ledger, anon_bytes
from weighin.predict.patches import declared, pretended, safetensors_reads
from weighin.predict.prediction import ABOVE_PEAK_BYTES, PredictedUse, Prediction, Work, reasons
from weighin.predict.process import PRELOADED
from weighin.probes.process import memory_of, read_status
from weighin.result import WINDOWS_IN_FLIGHT, Memory
from weighin.stream import formats, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream.construct import Builder
from weighin.stream.hugging_face_folder import adapter_of, own_dtype, refuse_part
from weighin.stream.pretrained_library import WHOLE, Selection, library_of
from weighin.stream.tensors import named_tensors, tensors_in, tied_names
from weighin.stream.write import write
from weighin.units import MIB
from weighin.worker.loading import Inputs, Load, import_strategy
from weighin.worker.uses import Function
from weighin.worker.verify import identity, touch

_PAGE_TABLE_SHARE: Final = 512  # page tables take 1/512 of the memory, even with huge pages
_USE_BYTES: Final = 16 * MIB
"""The RAM floor of a use adds 1 % and these bytes to the predicted peak, which may be too low: in each
run, the pages that a backward pass frees are at different addresses of the heap.
"""
_PART: Final = 4096  # rows or columns of a matrix: a larger matrix needs no larger buffers
_TOUCHED_BYTES: Final = 8 * MIB  # two chunks of a checksum: more chunks need no more memory


def make_sparse(
    model: ModelSpec,
    fmt: str,
    folder: Path,
    source: Path | None = None,
    selection: Selection = WHOLE,
) -> Path:
    """Write a checkpoint of holes, a sparse file that uses almost no disk space; return its path.

    It has the tensors that ``selection`` selects in ``source``, or those of ``model`` without a source. For
    a model of a library (transformers), it has the model's tensors in the widest dtype of ``source``,
    because a Hugging Face folder's keys may differ from the model's.
    """
    slices = None if source is None else formats.read(source, selection)
    if slices is not None and library_of(model.builder) is None:
        tensors = reader.plans(slices)
    else:
        own = getattr(torch, own_dtype(model))
        kind = own if slices is None else reader.widest_dtype(slices)
        tensors = generate.plans(generate.describe(model, kind))
    target = formats.checkpoint_in(folder, fmt)
    target.parent.mkdir(parents=True)
    write(fmt, target, tensors, None)
    if library_of(model.builder):
        _tell_apart(target)
    return target


def _tell_apart(checkpoint: Path) -> None:
    """Give each tensor other first bytes, so that no two are equal but those that are one."""
    for number, one in enumerate(formats.read(checkpoint), start=1):
        with one.file.open("rb+") as file:
            file.seek(one.offset)
            file.write(number.to_bytes(8, "little")[: one.nbytes])


def main_dtype(checkpoint: Path) -> str:
    """Return the dtype that most bytes of a checkpoint have; "" for an empty checkpoint."""
    sizes: Counter[str] = Counter()
    for one in formats.read(checkpoint):
        sizes[one.dtype_name] += one.nbytes
    return next((name for name, _ in sizes.most_common(1)), "")


def write_manifest(model: ModelSpec, dtype: str, folder: Path) -> Path:
    """Write a manifest (list of the model's tensors) with false checksums; return its path.

    ``dtype`` is the dtype of the load. Linux refuses to allocate a tensor that is larger than this
    machine's RAM, even if the tensor is never written. A wider dtype than that of the load would
    therefore make some large models impossible.
    """
    kind = getattr(torch, dtype)
    described = generate.describe(model, kind)
    blank = dict.fromkeys(CELL_DTYPES, "0" * 16)
    entries = tuple(one.entry(blank) for one in described.values())
    path = folder / "manifest.json"
    folder.mkdir(parents=True, exist_ok=True)
    Manifest(model.name, model.builder, "predicted", entries).write(path)
    return path


def refuse_misfit(model: ModelSpec, source: Path, selection: Selection) -> None:
    """Raise CheckpointError for a checkpoint that a model's library cannot load as it is."""
    refuse_part(source, selection)
    if quantised.of_model(model) or formats.detect(source) == gguf.NAME or adapter_of(model):
        return  # the load of the cell alone tells
    ledger = Ledger(None, memory_of(read_status()))
    with suppress(CannotFollow), _intercepted(ledger, model):
        generate.loaded(model, source, getattr(torch, own_dtype(model)))


def run(
    cell: Cell,
    builder: Builder,
    checkpoint: Path,
    strategy: Path,
    baseline: Memory,  # of the parent process, of which this process is a fork
    own_bytes: int,  # anonymous memory of this process that a measured process would not have
    read_ahead_bytes: int,  # what the kernel reads ahead for a missing page of a mapped file
    kernels_bytes: int = 0,  # the part of own_bytes that CUDA takes when a GPU first reads the model
    use: str = "",
    function: Function | None = None,
    inputs: Inputs | None = None,
    *,
    is_own: bool = False,  # whether ``checkpoint`` is the user's
) -> Prediction:
    """Run a cell's strategy on tensors that only reserve address space, and return what a load takes."""
    device, dtype = torch.device(cell.device), getattr(torch, cell.dtype)
    gpu = CachingAllocator(cell.vram_limit_bytes) if cell.needs_gpu else None
    ledger = Ledger(gpu, baseline, own_bytes)
    ledger.has_values = is_own
    PRELOADED.on_import = ledger.adopt
    job = Load(
        checkpoint, device, dtype, cell.options, _model=cell.model, _builder=builder, _marks=ledger
    )
    with _intercepted(ledger, cell.model):
        modules = len(sys.modules)
        load = import_strategy(strategy)
        with safetensors_reads(ledger, load.__globals__):
            start_ns = time.process_time_ns()
            model = load(job)
            ledger.work["cpu_ns"] = time.process_time_ns() - start_ns
        ledger.work["modules"] += len(sys.modules) - modules
    done = _ready(ledger, model, cell, read_ahead_bytes, kernels_bytes)
    if not use:
        return done
    if inputs and device.type == "cpu":
        _multiply(model)
    with _intercepted(ledger, cell.model):
        inputs = inputs and inputs.to(device)
        ledger.restart_peaks()
        with ledger.phase(phase_of(use)):
            kept = _perform(ledger, model, use, function, inputs)
            ledger.update()
            del kept
    used = PredictedUse(name=use, **ledger.figures, **ledger.cuda_peaks)
    most = used.host_anon_most_bytes
    most += most // 100 + _USE_BYTES + ledger.shared_bytes
    floor = max(done.floor_bytes or 0, _floor(most, done.in_flight_bytes))
    return replace(done, use=used, floor_bytes=floor, phases=tuple(ledger.phases))


@contextmanager
def _intercepted(ledger: Ledger, model: ModelSpec) -> Iterator[None]:
    gpu = pretended(ledger) if ledger.cuda else nullcontext()
    with declared(ledger, model), gpu, Operations(ledger):
        yield


def _ready(
    ledger: Ledger, model: torch.nn.Module, cell: Cell, read_ahead_bytes: int, kernels_bytes: int
) -> Prediction:
    """Read every tensor, and return the prediction; the floor includes pages that are being read."""
    tensors = {identity(tensor): tensor for tensor in named_tensors(model).values()}.values()
    with ledger.phase("touch"):
        for tensor in tensors:
            ledger.read(tensor)
        if torch.device(cell.device).type == "cpu":
            _touch(ledger, (tensor.nbytes for tensor in tensors))
        else:
            ledger.adopt(kernels_bytes)
    on_gpu: dict[str, Any] = {
        name: max(getattr(phase, name) or 0 for phase in ledger.phases)
        for name in ledger.cuda_peaks
    }
    figures = ledger.figures
    model_bytes = sum(tensor.nbytes for tensor in tensors)
    mapped = any(ledger.place_of(tensor) == "file" for tensor in tensors)
    in_flight_bytes = mapped * WINDOWS_IN_FLIGHT * read_ahead_bytes
    mapped_bytes = figures["host_file_peak_bytes"] - ledger.baseline.file_bytes
    requested = on_gpu.get("cuda_requested_bytes")
    work = Work(**ledger.work)
    kinds = {one.dtype for one in tensors if one.is_floating_point() or one.is_complex()}
    return Prediction(
        cell,
        model_bytes=model_bytes,
        baseline_anon_bytes=ledger.baseline.anon_bytes,
        baseline_file_bytes=ledger.baseline.file_bytes,
        in_flight_bytes=in_flight_bytes,
        floor_bytes=_floor(figures["host_anon_most_bytes"] + ledger.shared_bytes, in_flight_bytes),
        disk_read_bytes=work.disk_read_bytes,
        work=work,
        phases=tuple(ledger.phases),
        reasons=(*reasons(model_bytes, figures["tensor_peak_bytes"], mapped_bytes, requested),),
        is_mixed=bool(tied_names(model)) or not kinds <= {getattr(torch, cell.dtype)},
        computes_buffers=any(each._non_persistent_buffers_set for each in model.modules()),
        **figures,
        **on_gpu,
    )


def _floor(most_bytes: int, in_flight_bytes: int) -> int:
    return most_bytes + most_bytes // _PAGE_TABLE_SHARE + ABOVE_PEAK_BYTES + in_flight_bytes


def _touch(ledger: Ledger, sizes: Iterable[int]) -> None:
    """Read a part of real tensors, one a thread, as a measured process reads its model."""
    before, other = anon_bytes(), ledger.other_anon_bytes
    largest = nlargest(torch.get_num_threads(), (min(size, _TOUCHED_BYTES) for size in sizes))
    tensors = {f"{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(largest)}
    ledger.other_anon_bytes += anon_bytes() - before
    touch(tensors)
    ledger.update()
    tensors.clear()
    ledger.other_anon_bytes = other


def _multiply(model: torch.nn.Module) -> None:
    """Multiply real matrices, so that the math library allocates its buffers for each thread."""
    shapes = {
        (min(rows, _PART), min(columns, _PART), weight.dtype)
        for weight in model.parameters()
        if weight.dim() == 2 and weight.is_floating_point() and weight.itemsize > 1
        for rows, columns in [weight.shape]
    }
    for rows, columns, dtype in nlargest(2, shapes, key=lambda shape: shape[0] * shape[1]):
        some_tokens = torch.zeros(16, columns, dtype=dtype)
        torch.nn.functional.linear(some_tokens, torch.zeros(rows, columns, dtype=dtype))


def _perform(
    ledger: Ledger,
    model: torch.nn.Module,
    use: str,
    function: Function | None,
    inputs: Inputs | None,
) -> Any:
    if function is None:
        if inputs is None:
            raise CannotFollow("the model's module has no example_inputs for a forward pass")
        model.eval()
        with torch.inference_mode():
            for tensor in tensors_in(model(*inputs.positional, **inputs.keywords)):
                torch.isfinite(tensor).all()
        return None
    with tempfile.TemporaryDirectory() as folder, _saves():
        try:
            return function(model, inputs, Path(folder))
        except (CannotFollow, RuntimeError, NotImplementedError):
            if use not in TRAINING or inputs is None:
                raise
        # Without inputs, the use makes its own gradients; only the activations are then missing.
        for weight in model.parameters():
            weight.grad = None
        ledger.restart_peaks()
        return function(model, None, Path(folder))


def _saves() -> Any:
    """Let ``torch.save`` write no tensor values: a real save makes no copy of them, either."""
    original = torch._C.PyTorchFileWriter

    class Writer(original):  # type: ignore[misc, valid-type]
        def write_record(self, name: str, data: Any, size: int) -> None:
            if isinstance(data, torch.UntypedStorage):
                super().write_record_metadata(name, size)
            else:
                super().write_record(name, data, size)

    return patch.object(torch._C, "PyTorchFileWriter", Writer)
