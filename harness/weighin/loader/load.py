"""Load a checkpoint straight into a model, without a second copy of the weights.

The load runs every hook and override of ``load_state_dict``, on a state dict whose tensors have no
values. ``construction/deferred.py`` records the copies that ``load_state_dict`` would make. Several
threads then make these copies piece by piece. New memory for large tensors on the CPU is in huge
pages, and has the alignment that the tensors have in the file, so that direct reads need no buffer.

A tensor whose dtype changes is converted directly from the page cache if the file is cached. If not,
the tensor is first read into its own memory or into a buffer. Tensors that are filled last lend
their memory as buffers. Values for a GPU pass through two pinned buffers of each thread.

The peak memory is the model and a few MiB for each thread. A thread that copies from the page cache
maps up to 400 MiB of the file at a time. These mapped pages count in the resident set size.
"""

import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal

import torch

from weighin.construction import skeleton
from weighin.construction.deferred import DeferredLoad, WriteLog
from weighin.construction.tensors import (
    is_dense,
    modules_of,
    named_tensors,
    real_memory,
    storage_key,
    tensors_of,
    use_count,
)
from weighin.errors import CheckpointError
from weighin.formats.pretrained_library import Selection
from weighin.formats.quantised import refuse_codes
from weighin.loader import fill
from weighin.loader.direct_io import DiskReaders
from weighin.loader.extra_state import extra_values
from weighin.loader.memory import Fill, MemoryNeed, is_readable, provide
from weighin.loader.state_dict import FILLED_DEVICES, LazyState, load_state, read_at_once, source_of
from weighin.stream import formats
from weighin.stream.slices import Slices, TensorSlice, check_converts
from weighin.text import first_names

Granularity = Literal["all", "module", "tensor"]

Rename = Callable[[torch.nn.Module, Slices], Slices]
"""A function that gives the file's tensors their names in a model, and leaves out those of no use."""

_EXACT: Final = frozenset({
    (torch.float16, torch.float32), (torch.float16, torch.float64),
    (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float64),
    (torch.float32, torch.float64),
})  # fmt: skip
"""Pairs of dtypes (from, to) whose conversion loses no precision. If a second conversion follows, the
loader skips the first one, because the result is the same.
"""

_log = logging.getLogger("weighin")


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Turn Python's garbage collector off during the load, because a collection stops all threads."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@_collecting_later()
def load_streaming(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    checkpoint: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    threads: int | None = None,
    granularity: Granularity = "all",
    key: str = "",
    strip_prefix: str = "",
) -> torch.nn.Module:
    """Load a checkpoint, in any format that ``weighin inspect`` reads, into ``model``; return the model.

    The result equals that of ``model.load_state_dict(torch.load(checkpoint))`` followed by
    ``model.to(device, dtype)``. If ``model`` is a function that builds the model, only the weights
    that the constructor itself reads are initialised; a warning in the log gives the size of these
    weights. If ``model`` is a module, the load fills each tensor in place that already has the
    wanted device and dtype. Without ``dtype``, tensors on the meta device get the checkpoint's dtype.

    The checkpoint has the model's own names. A Hugging Face folder, whose library renames and converts
    tensors, is loaded by ``load_pretrained``.

    Args:
        dtype: the dtype of all floating-point tensors after the load; None keeps the model's own.
        threads: the number of threads that read. The default for a cached checkpoint is one thread
            for each processor, at most 4. The default is 16 threads for a local disk, and up to 64
            for storage behind a network.
        granularity: "tensor" reads one tensor after the other. "module" reads one module after the
            other, and the tensors of a module concurrently. "all" reads all tensors concurrently.
        key: the key of the state dict in a training checkpoint: "model", or "state.model" in nested
            dicts. Only the tensors under this key are read. No code from the checkpoint runs.
        strip_prefix: a prefix of the checkpoint's names that the model's names lack, such as "module.".

    Raises:
        CheckpointError: the checkpoint is unreadable; it does not fit the model (missing or unexpected
            keys, other shapes); torch cannot convert a tensor to ``dtype``; the model has no
            parameters for the scales of quantised tensors; or a tensor of the model is on the meta
            device, and the checkpoint has no values for this tensor.
    """
    device = _with_index(torch.device(device))
    disk, selection = DiskReaders(threads), Selection(key, strip_prefix)
    loaded, was_meta = _load(model, Path(checkpoint), selection, device, dtype, disk, granularity)
    skeleton.give_back_heap()  # frees objects that only the load needed
    tensors = tensors_of(modules_of(loaded))
    if dtype is not None or was_meta or any(tensor.device != device for tensor in tensors):
        loaded.to(device=device, dtype=dtype)  # also runs the overrides of to() in modules
    return loaded


def _load(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    path: Path,
    selection: Selection,
    device: torch.device,
    dtype: torch.dtype | None,
    disk: DiskReaders,
    granularity: Granularity,
    rename: Rename | None = None,
) -> tuple[torch.nn.Module, bool]:
    """Return the filled model, and whether one of its tensors was on the meta device before the load."""
    slices = formats.read(path, selection)
    if dtype is not None:
        check_converts(path, slices, "leave dtype out")
    log = WriteLog(read_at_once)
    with ExitStack() as undone:
        with log.recording():
            if not isinstance(model, torch.nn.Module):
                model = _built(model, log)
            was_meta = any(tensor.is_meta for tensor in tensors_of(modules_of(model)))
            refuse_codes(path, slices, _names(model))
            slices = rename(model, slices) if rename else slices
            if was_meta:
                dtypes = {source.name: source.dtype for source in slices}
                undone.enter_context(real_memory(model, dtypes))
            values = {} if rename else extra_values(model, slices, path)
            optional = {*_names(model)} if rename else None  # rename refuses what is missing
        # A variable for the LazyState would keep it in memory until the end of the load.
        load_state(model, LazyState(log, slices, values), log, path, optional)
        loads = log.finish()
        if was_meta and any(tensor.is_meta for tensor in tensors_of(modules_of(model))):
            raise _on_meta(model, path)
    loads.sort(key=lambda load: load.promise.read_order)
    batches = [fill.groups_of_small(batch, device, dtype) for batch in _batches(loads, granularity)]
    del loads
    if any(others for _, others in batches):
        place = _Placer(modules_of(model), log, device, dtype)
    while batches:
        groups, others = batches.pop(0)
        fill.fill_groups(groups, disk)
        if not others:
            continue
        fills = list(place.all(others))
        skeleton.give_back_heap()
        with fill.being_filled(fills, disk):
            pass
    return model, was_meta


def load_renamed(
    build: Callable[[], torch.nn.Module],
    checkpoint: Path,
    rename: Rename,
    *,
    device: torch.device,
    threads: int | None,
    selection: Selection,
) -> torch.nn.Module:
    """Load a checkpoint into a new model as ``load_streaming`` does, with the names of ``rename``.

    ``rename`` raises CheckpointError if the checkpoint lacks a tensor of the model.
    """
    place, disk = _with_index(device), DiskReaders(threads)
    with _collecting_later():
        loaded, _ = _load(build, checkpoint, selection, place, None, disk, "all", rename)
        skeleton.give_back_heap()
        return loaded.to(device=place)


def _names(model: torch.nn.Module) -> Iterator[str]:
    """Yield the names in the model's state dict; call ``state_dict`` only when a name is requested."""
    yield from model.state_dict(keep_vars=True)


def _with_index(device: torch.device) -> torch.device:
    """Return a device as a tensor's ``device`` reports it: a GPU with an index, the CPU without one."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _built(builder: Callable[[], torch.nn.Module], log: WriteLog) -> torch.nn.Module:
    with skeleton.on_cpu():
        model = builder()
    if log.initialised_bytes:
        from weighin.units import format_bytes  # imports decimal, which few loads need

        _log.warning(
            "the model's constructor reads values of its tensors, so %s of them were initialised",
            format_bytes(log.initialised_bytes),
        )
    return model


class _Placer:
    """Decides for each tensor whether the load fills the tensor's present memory or allocates new."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        log: WriteLog,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self._log, self._device, self._dtype = log, device, dtype
        self._tensors: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors_of(modules):
            self._tensors.setdefault(storage_key(tensor), []).append(tensor)
        self._buffers = {
            id(buffer): (module, leaf)
            for module in modules
            for leaf, buffer in module._buffers.items()
        }
        self._left_to_modules = {
            id(tensor)
            for module in modules
            if _converts(module)
            for tensor in tensors_of(modules_of(module))
        }

    def all(self, loads: list[DeferredLoad]) -> Iterator[Fill]:
        """Yield a ``Fill`` for the tensors that can be read in pieces; read all others immediately."""
        needs: list[MemoryNeed] = []
        for load in loads:
            source = source_of(load)
            filled = load.target.device.type in FILLED_DEVICES
            if source is None or not (filled and is_readable(source)):
                read_at_once(load)
            elif (need := self._need(load, source)) is not None:
                needs.append(need)
            else:
                yield Fill(source, load.target)
        loads.clear()  # frees the tensors' former memory
        yield from provide(needs)

    def _need(self, load: DeferredLoad, source: TensorSlice) -> MemoryNeed | None:
        """Return the new memory that a tensor needs; None if the tensor keeps its memory.

        A tensor with the wanted device and dtype keeps its memory if the memory existed before the
        load. Any tensor keeps its memory if another tensor shares it, if the load fills only a part
        of it, or if one conversion in place of two would change the values. A tensor to convert also
        keeps its memory if a module overrides torch's conversion, or if the tensor is a buffer with
        several names, which torch's conversion would untie.
        """
        target = load.target
        tensors = self._tensors.get(storage_key(target), [])
        if len({id(tensor) for tensor in tensors}) != 1:
            return None
        (tensor, *more), kind = tensors, self._final_dtype(target)
        stays = (tensor.device, tensor.dtype) == (self._device, kind)
        if stays and not self._log.owns(tensor):
            return None
        if not stays and more and not isinstance(tensor, torch.nn.Parameter):
            return None
        if not stays and id(tensor) in self._left_to_modules:
            return None
        converted_twice = target.dtype not in {kind, source.dtype}
        exact = not converted_twice or (source.dtype, target.dtype) in _EXACT
        if not (exact and self._device.type in FILLED_DEVICES and _is_whole(tensor, target)):
            return None
        if not stays and id(tensor) in self._buffers:
            module, leaf = self._buffers[id(tensor)]
            tensor = module._buffers[leaf] = target  # Module.to() also makes a new buffer
        return MemoryNeed(source, tensor, kind, self._device)

    def _final_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype


def _converts(module: torch.nn.Module) -> bool:
    """Tell whether a module overrides torch's methods that convert it to another dtype or device."""
    methods = type(module)._apply, type(module).to
    return not all(method.__module__.startswith("torch.nn.modules.") for method in methods)


def _is_whole(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """Tell whether only ``tensor`` and ``target`` use their memory, and each fills it without gaps."""
    return (
        tensor.layout is torch.strided
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and (tensor.shape, tensor.stride()) == (target.shape, target.stride())
        and tensor.storage_offset() == target.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and is_dense(tensor)
        and use_count(tensor) == 2  # the tensor of the model, and ``target``
    )


def _batches(loads: list[DeferredLoad], granularity: Granularity) -> list[list[DeferredLoad]]:
    """Divide the loads into groups, by ``granularity``; the tensors of a group are read together."""
    if granularity == "all":
        return [loads]
    if granularity == "tensor":
        return [[load] for load in loads]
    modules = itertools.groupby(loads, key=lambda load: load.promise.name.rpartition(".")[0])
    return [list(members) for _, members in modules]


def _on_meta(model: torch.nn.Module, checkpoint: Path) -> CheckpointError:
    left = [name for name, tensor in named_tensors(model).items() if tensor.is_meta]
    return CheckpointError(
        f"{checkpoint}: has no values for {first_names(left)}, which the model has on the meta device",
        "pass load_streaming the function that builds the model, not a model on the meta device",
    )
