"""Load a checkpoint straight into a model: no second copy, converted on the way.

What a model becomes is torch's own doing: ``load_state_dict`` runs, with every hook and override, on
a state dict without values, whose copies are noted (``models/deferred.py``). Then they are made all
at once: tensors are read from their places in the file into fresh memory that asks for huge pages and
lies as the file does, by several threads, a piece at a time. What is converted is read out of the page
cache where it lies there, else by way of memory that is filled last; what goes to a GPU passes two
pinned buffers. Peak: the model, and a few MiB for each thread; while what is cached is copied, its
pages in the cache are mapped, and so in the RSS: up to 400 MiB for each thread.
"""

import gc
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal

import torch

from weighin import formats
from weighin.errors import CheckpointError
from weighin.formats.base import TensorSlice
from weighin.formats.misfit import first_names
from weighin.loader import fill
from weighin.loader.arena import MemoryNeed, provide
from weighin.loader.fill import Fill, is_readable
from weighin.loader.lazy_state import (
    FILLED_DEVICES,
    lazy_state,
    load_state,
    read_at_once,
    source_of,
)
from weighin.loader.reads import Fillable
from weighin.models import skeleton
from weighin.models.deferred import DeferredLoad, WriteLog, is_dense, storage_key, use_count
from weighin.models.meta import real_memory

Granularity = Literal["all", "module", "tensor"]

_EXACT: Final = frozenset({
    (torch.float16, torch.float32), (torch.float16, torch.float64),
    (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float64),
    (torch.float32, torch.float64),
})  # fmt: skip
"""Conversions that lose nothing: one that follows may begin from the original."""

_log = logging.getLogger("weighin")


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Keep Python from looking for garbage: among all that torch imported, while every thread waits."""
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
) -> torch.nn.Module:
    """Load a checkpoint of any layout that ``weighin inspect`` reads into ``model``; return it.

    The model ends as ``model.load_state_dict(torch.load(checkpoint))`` and then ``model.to(device,
    dtype)`` leave it. Give a function that builds it: then its weights are never initialised, but
    where the constructor itself looks at their values, which is logged. Or a model: a tensor of it
    that has the right device and dtype is filled where it is. A tensor on the meta device gets the
    dtype that the checkpoint has.

    Args:
        dtype: of all floating-point tensors; None keeps the model's own.
        threads: how many read; None: one for each processor, up to 4, what is cached; 16 what is not.
        granularity: whether reading one tensor, or one module, ends before the next begins.

    Raises:
        CheckpointError: unreadable, or not this model's: missing or unexpected keys, other shapes; or
            a tensor that is in no checkpoint is on the meta device.
    """
    device = _with_index(torch.device(device))
    found, was_meta = _load(model, Path(checkpoint), device, dtype, threads, granularity)
    skeleton.give_back_heap()  # what the load itself took
    if dtype is not None or was_meta or any(one.device != device for one in _tensors(found)):
        found.to(device=device, dtype=dtype)  # with what modules do on their own account then
    return found


def _load(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    path: Path,
    device: torch.device,
    dtype: torch.dtype | None,
    threads: int | None,
    granularity: Granularity,
) -> tuple[torch.nn.Module, bool]:
    """Return the model with the checkpoint's values, and whether some of it was on the meta device."""
    slices = formats.read(path)[1]
    log = WriteLog(read_at_once)
    with ExitStack() as undone:
        with log.recording():
            if not isinstance(model, torch.nn.Module):
                model = _built(model, log)
            was_meta = any(one.is_meta for one in _tensors(model))
            undone.enter_context(real_memory(model, {one.name: one.dtype for one in slices}))
            load_state(model, lazy_state(log, slices), path)
        loads = log.finish()
        _refuse_meta(model, path)
    place = _Placer(model, log, device, dtype)
    loads.sort(key=lambda load: _position(load.promise))
    batches = _batches(loads, granularity)
    del loads
    while batches:
        fills = list(place.all(batches.pop(0)))
        skeleton.give_back_heap()
        with fill.being_filled(fills, threads):
            pass
    return model, was_meta


def _with_index(device: torch.device) -> torch.device:
    """Return the device as its tensors name theirs."""
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
            "the model's constructor looks at values of its tensors: %s were initialised for that",
            format_bytes(log.initialised_bytes),
        )
    return model


class _Placer:
    """Decides where tensors are filled: in their own memory, or in fresh memory, which they get."""

    def __init__(
        self,
        model: torch.nn.Module,
        log: WriteLog,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self._log, self._device, self._dtype = log, device, dtype
        self._tensors: dict[int, list[torch.Tensor]] = {}
        for one in _tensors(model):
            self._tensors.setdefault(storage_key(one), []).append(one)
        self._buffers = {
            id(one): (module, leaf)
            for module in model.modules()
            for leaf, one in module._buffers.items()
        }
        self._left_to_modules = {
            id(one) for module in model.modules() if _converts(module) for one in _tensors(module)
        }

    def all(self, loads: list[DeferredLoad]) -> Iterator[Fillable]:
        """Yield what is to be filled; what cannot be read piece by piece is read at once."""
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
        loads.clear()  # with them goes the memory that tensors had
        yield from provide(needs)

    def _need(self, load: DeferredLoad, source: TensorSlice) -> MemoryNeed | None:
        """Return what fresh memory a load wants; None where the tensor's own is filled.

        Its own, where others share it, torch's conversions would tell the names of a buffer apart, or
        a module converts in a way of its own.
        """
        target = load.target
        tensors = self._tensors.get(storage_key(target), [])
        if len({id(one) for one in tensors}) != 1:
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
            tensor = module._buffers[leaf] = target  # torch makes a new one, too
        return MemoryNeed(source, tensor, kind, self._device)

    def _final_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype


def _converts(module: torch.nn.Module) -> bool:
    """Tell whether a module has a way of its own to go to another dtype or device."""
    ways = type(module)._apply, type(module).to
    return not all(way.__module__.startswith("torch.nn.modules.") for way in ways)


def _is_whole(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """Tell whether a model's tensor has its memory alone, without gaps, and all of it is the target."""
    return (
        tensor.layout is torch.strided
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and (tensor.shape, tensor.stride()) == (target.shape, target.stride())
        and tensor.storage_offset() == target.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and is_dense(tensor)
        and use_count(tensor) == 2  # itself, and the load's target
    )


def _position(source: TensorSlice) -> tuple[str, int]:
    return str(source.file), source.offset


def _batches(loads: list[DeferredLoad], granularity: Granularity) -> list[list[DeferredLoad]]:
    """Return the loads to be made together."""
    if granularity == "all":
        return [loads]
    if granularity == "tensor":
        return [[load] for load in loads]
    modules = itertools.groupby(loads, key=lambda load: load.promise.name.rpartition(".")[0])
    return [list(members) for _, members in modules]


def _refuse_meta(model: torch.nn.Module, checkpoint: Path) -> None:
    left = [
        name
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
        if tensor.is_meta
    ]
    if left:
        raise CheckpointError(
            f"{checkpoint}: has no values for {first_names(left)}, which the model has on the meta device",
            "give load_streaming the function that builds the model, not a model without values",
        )


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for _, parameter in model.named_parameters(remove_duplicate=False):
        yield parameter
    for _, buffer in model.named_buffers(remove_duplicate=False):
        yield buffer
