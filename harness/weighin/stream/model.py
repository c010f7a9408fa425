"""Load a checkpoint straight into a model, without a second copy of the weights.

If all modules load by torch's plain copies and each tensor fits, the loader knows the copies from the
names alone. Any other model is loaded by its own ``load_state_dict``, with all hooks and overrides,
from a state dict whose tensors have addresses but no values; ``construct.WriteLog`` records the
copies that it makes. Either way, nothing is read before the whole checkpoint is known to fit. Several
threads then make the copies piece by piece.

New memory on the CPU is one area of huge pages, in which each large tensor has the alignment that it
has in the file, so that direct reads need no buffer. The peak memory is the model, and half a MiB for
each thread.
"""

import copy
import gc
import io
import itertools
import logging
import pickle
import re
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from weighin.errors import CheckpointError, HarnessError
from weighin.stream import construct, filling, formats
from weighin.stream.bytes import Disk, allocate_all
from weighin.stream.construct import DeferredLoad, WriteLog
from weighin.stream.filling import Fill, dense_stride
from weighin.stream.foreign import misfit, selecting
from weighin.stream.pretrained_library import Selection
from weighin.stream.quantised import refuse_codes
from weighin.stream.slices import Checkpoint, Slice, check_converts
from weighin.stream.state_dicts import is_extra_state
from weighin.stream.tensors import (
    is_dense,
    modules_of,
    named_tensors,
    real_memory,
    storage_key,
    tensors_of,
    use_count,
)
from weighin.text import first_names, plain, shown

Granularity = Literal["all", "module", "tensor"]

_EXACT: Final = frozenset({
    (torch.float16, torch.float32), (torch.float16, torch.float64),
    (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float64),
    (torch.float32, torch.float64),
})  # fmt: skip
"""Pairs of dtypes (from, to) whose conversion loses no precision. If a second conversion follows, the
loader skips the first one, because the result is the same.
"""

_LOAD_MODEL: Final = nn.Module.load_state_dict
_METHODS: Final = {
    "_load_from_state_dict": nn.Module._load_from_state_dict,
    "set_extra_state": nn.Module.set_extra_state,
}
_MISFIT: Final = re.compile(r"size mismatch for (.+?): copying a param")
_FOREIGN: Final = re.compile(r"(?:GLOBAL |unpickle )(\S+?)(?: was not| is not|$)")
_PLAIN_TENSORS: Final = frozenset({torch.Tensor, nn.Parameter})
_SMALL_BYTES: Final = 64 * 1024  # a smaller tensor gains nothing from huge pages
_CPU: Final = torch.device("cpu")
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


def load_streaming(
    model: nn.Module | Callable[[], nn.Module],
    checkpoint: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    threads: int | None = None,
    granularity: Granularity = "all",
    key: str = "",
    strip_prefix: str = "",
) -> nn.Module:
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
    selection = Selection(key, strip_prefix)
    return _load(model, Path(checkpoint), selection, device, dtype, threads, granularity)


@_collecting_later()
def _load(
    model: nn.Module | Callable[[], nn.Module],
    path: Path,
    selection: Selection,
    device: torch.device | str,
    dtype: torch.dtype | None,
    threads: int | None,
    granularity: Granularity,
) -> nn.Module:
    # As a tensor's ``device`` reports it: a GPU with an index, the CPU without one.
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    elif device.type == "cpu":
        device = _CPU
    slices = formats.read(path, selection)
    if dtype is not None:
        check_converts(path, slices, "leave dtype out")
    log = WriteLog(_read_now)
    with ExitStack() as undone:
        with log.recording():
            if not isinstance(model, nn.Module):
                model = _built(model, log)
            was_meta = any(tensor.is_meta for tensor in tensors_of(modules_of(model)))
            refuse_codes(path, slices, _names(model))
            if was_meta:
                dtypes = {source.name: source.dtype for source in slices}
                undone.enter_context(real_memory(model, dtypes))
            values = _extra_values(model, slices, selection)
        _load_state_dict(model, slices, values, log, path)
        loads = log.finish()
        if was_meta:
            left = [name for name, one in named_tensors(model).items() if one.is_meta]
            if left:
                raise CheckpointError(
                    f"{path}: has no values for {first_names(left)}, which the model has on the meta"
                    " device",
                    "pass load_streaming the function that builds the model, not a model on the meta"
                    " device",
                )
        loads.sort(key=lambda load: load.promise.read_order)
        batches = [loads]
        if granularity != "all":
            prefix_of = {
                "module": lambda name: name.rpartition(".")[0],
                "tensor": lambda name: name,
            }
            by_part = itertools.groupby(
                loads, lambda load: prefix_of[granularity](load.promise.name)
            )
            batches = [list(members) for _, members in by_part]
        del loads
        placer, disk = _Placer(model, log, device, dtype), Disk(threads)
        while batches:
            fills = list(placer.all(batches.pop(0)))
            construct.give_back_heap()
            filling.fill(fills, disk)
            del fills
    construct.give_back_heap()  # frees objects that only the load needed
    tensors = tensors_of(modules_of(model))
    if dtype is not None or was_meta or any(tensor.device != device for tensor in tensors):
        model.to(device=device, dtype=dtype)  # also runs the overrides of to() in modules
    return model


def _names(model: nn.Module) -> Iterator[str]:
    """Yield the names in the model's state dict; call ``state_dict`` only when a name is requested."""
    yield from model.state_dict(keep_vars=True)


def _built(builder: Callable[[], nn.Module], log: WriteLog) -> nn.Module:
    with construct.on_cpu():
        model = builder()
    if log.initialised_bytes:
        from weighin.units import format_bytes  # imports decimal, which few loads need

        _log.warning(
            "the model's constructor reads values of its tensors, so %s of them were initialised",
            format_bytes(log.initialised_bytes),
        )
    return model


# -- what is copied where


def _load_state_dict(
    model: nn.Module,
    slices: Checkpoint,
    values: dict[str, Any],
    log: WriteLog,
    checkpoint: Path,
) -> None:
    """Record in ``log`` the copies that ``model.load_state_dict`` would make.

    Args:
        values: the state dict's values that are no tensors.

    Raises:
        CheckpointError: keys are missing or unexpected, shapes differ, or a module's own code fails.
    """
    for one in slices:
        if one.encoding:
            raise CheckpointError(
                f"{one.file}: {plain(one.name)} is quantised to {one.encoding}, which load_streaming"
                " does not dequantise",
                "first write the dequantised values into a folder, and load that folder: weighin"
                f" convert {one.file} FOLDER --keys model",
            )
    if not values and (copies := _plain_copies(model, slices)) is not None:
        log.load(copies)
        return
    state: OrderedDict[str, Any] = OrderedDict()
    for one in slices:
        if one.name in values:
            continue
        try:
            state[one.name] = torch.empty_strided(one.shape, dense_stride(one), dtype=one.dtype)
        except RuntimeError:  # the tensor repeats few elements of the file
            raise CheckpointError(
                f"{one.file}: {plain(one.name)} of the shape {one.shape} is larger than this machine's"
                " memory",
                "choose the model from which this checkpoint was saved",
            ) from None
        log.promise(state[one.name], one)
    state |= values
    if slices.metadata is not None:
        state._metadata = slices.metadata  # type: ignore[attr-defined]
    try:
        with log.recording():
            model.load_state_dict(state)
    except HarnessError:
        raise
    except Exception as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise CheckpointError(
                f"{checkpoint}: the code of a module of this model failed: {type(error).__name__}: {error}",
                "choose the model from which this checkpoint was saved; to debug the module, run"
                " model.load_state_dict(torch.load(...))",
            ) from error
        with log.recording():
            wanted = {
                name: _shape(value) for name, value in model.state_dict(keep_vars=True).items()
            }
        stored = {one.name: one.shape for one in slices} | dict.fromkeys(values, ())
        problems = {
            "missing": wanted.keys() - stored.keys(),
            "unexpected": stored.keys() - wanted.keys(),
            "of another shape": set(_MISFIT.findall(str(error))),
        }
        by_fault = {fault: sorted(map(plain, names)) for fault, names in problems.items()}
        repair = selecting(stored, wanted)
        raise misfit(checkpoint, "this model", by_fault, str(error), repair=repair) from error


def _shape(value: object) -> tuple[int, ...]:
    """Return a tensor's shape; () for a value that is no tensor, and for an uninitialised parameter."""
    if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
        return ()
    return tuple(value.shape)


def _plain_copies(model: nn.Module, slices: Checkpoint) -> list[tuple[torch.Tensor, Slice]] | None:
    """Return each tensor with its source, in torch's order; None if the load needs more than copies.

    A load of copies alone has no override, hook, missing or unexpected key, and no tensor of another
    shape. torch's own load looks through all keys of a module's state dict for each of its children:
    with 20,000 layers in one module it takes half a minute.
    """
    if torch.__future__.get_swap_module_params_on_conversion():
        return None
    if "load_state_dict" in model.__dict__ or type(model).load_state_dict is not _LOAD_MODEL:
        return None
    metadata = (slices.metadata or {}).values()
    if any(local.get("assign_to_params_buffers", False) for local in metadata):
        return None
    left = {one.name: one for one in slices}
    is_plain: dict[type, bool] = {}
    copies = []
    todo = [("", model)]
    while todo:
        prefix, module = todo.pop()
        kind, own = type(module), module.__dict__
        if kind not in is_plain:
            is_plain[kind] = all(getattr(kind, name) is _METHODS[name] for name in _METHODS)
        if (
            not is_plain[kind]
            or module._load_state_dict_pre_hooks
            or module._load_state_dict_post_hooks
            or any(name in own for name in _METHODS)
        ):
            return None
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or name in module._non_persistent_buffers_set:
                    continue
                source = left.pop(prefix + name, None)
                if source is None or not _fits(tensor, source):
                    return None
                copies.append((tensor, source))
        if module._modules:
            children = reversed(module._modules.items())
            todo += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
    return None if left else copies


def _fits(tensor: torch.Tensor, source: Slice) -> bool:
    """Tell whether torch would load a tensor by a plain copy from ``source``, the tensor in the file."""
    return (
        type(tensor) in _PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.shape == source.shape
        and (tensor.is_cpu or tensor.is_cuda)
        and (tensor.is_contiguous() or is_dense(tensor))  # no two elements share memory
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def _extra_values(model: nn.Module, slices: Checkpoint, selection: Selection) -> dict[str, Any]:
    """Return the checkpoint's values that are no tensors, as ``load_state_dict`` needs them.

    An extra state of torch.save that is a tensor is among them: its module keeps it with its strides. The result leaves out the extra state of a module that defines no ``set_extra_state``. A value that
    is no extra state is None in the result; torch then reports its name in an error.
    """
    tensors = {
        one.name for one in slices if is_extra_state(one.name) and slices.format in formats.PICKLED
    }
    if not (slices.values or tensors):
        return {}
    modules = dict(model.named_modules(remove_duplicate=False))
    taken = {
        f"{path}.{nn.modules.module._EXTRA_STATE_KEY_SUFFIX}".removeprefix(".")
        for path, module in modules.items()
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
    if any(module._load_state_dict_pre_hooks for module in modules.values()):
        # A hook may take a prefix away, so that a module takes the rest of the name.
        taken |= {
            each for each in slices.values if any(each.endswith(f".{name}") for name in taken)
        }
    unused = [name for name in slices.values if is_extra_state(name) and name not in taken]
    if dropped := [plain(name) for name in unused if slices.values[name] is not None]:
        _log.warning("no module of this model takes the extra state of %s", first_names(dropped))
    found: dict[str, Any] = dict.fromkeys(name for name in slices.values if name not in unused)
    wanted = {name for name in found if name in taken and slices.values[name] is not None}
    wanted |= tensors & taken
    read: dict[str, Any] = {}
    for file in slices.files if wanted else ():
        read |= _unpickled(file, wanted, selection)
    if lost := sorted(wanted - read.keys()):
        raise CheckpointError(
            f"{slices.files[0]}: torch.load does not find the extra state of {first_names(lost)}",
            "save the file again with the model's own names: torch.save(model.state_dict(), ...)",
        )
    return found | read


def _unpickled(file: Path, names: set[str], selection: Selection) -> dict[str, Any]:
    """Return some values of a file, by ``torch.load`` without any code of the file.

    The whole file is mapped, so that its tensors take no memory.

    Raises:
        CheckpointError: the file holds an object that torch does not know.
    """
    try:
        with torch.serialization.safe_globals(_harmless()):
            maps = zipfile.is_zipfile(file)
            todo = [("", torch.load(file, map_location="cpu", mmap=maps, weights_only=True))]
    except pickle.UnpicklingError as error:
        named = _FOREIGN.search(str(error))
        raise CheckpointError(
            f"{file}: {shown(min(names))} cannot be read, because the file holds"
            f" {named[1] if named else 'an object of a foreign class'}, which was NOT executed",
            "load the checkpoint with torch.load and the code that defines the object",
        ) from error
    prefix = f"{selection.strip_prefix.removesuffix('.')}." if selection.strip_prefix else ""
    # DeepSpeed has the state dict under the key "module".
    roots = (f"{selection.key}.",) if selection.key else ("", "module.")
    places = {
        f"{root}{start}{name}": name for root in roots for start in {"", prefix} for name in names
    }
    found: dict[str, Any] = {}
    while todo:
        above, inside = todo.pop()
        for name, value in inside.items():
            if (place := f"{above}{name}") in places:
                # A copy, because tensors in the value would need the mapped file.
                found[places[place]] = copy.deepcopy(value)
            elif isinstance(value, dict):
                todo.append((f"{place}.", value))
    return found


def _harmless() -> list[Any]:
    """Return the classes without code of a file that extra states hold, beside those that torch knows."""
    classes: list[Any] = [Namespace, io.BytesIO, bytes]
    try:
        import numpy  # torch works without NumPy
    except ImportError:
        return classes
    core: Any = getattr(numpy, "_core", None) or numpy.core
    for name, place in itertools.product(("_reconstruct", "scalar"), ("core", "_core")):
        classes.append((getattr(core.multiarray, name), f"numpy.{place}.multiarray.{name}"))
    dtypes = {type(numpy.dtype(code)) for code in numpy.typecodes["All"] if code not in "OV"}
    return [*classes, numpy.ndarray, numpy.dtype, *dtypes]


# -- where the values go


class _Placer:
    """Decides for each tensor whether the load fills the tensor's present memory or allocates new."""

    def __init__(
        self, model: nn.Module, log: WriteLog, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._log, self._device, self._dtype = log, device, dtype
        self._tensors: dict[int, list[torch.Tensor]] = {}
        self._buffers: dict[int, tuple[nn.Module, str]] = {}
        self._left_to_modules: set[int] = set()
        for module in modules_of(model):
            for tensor in tensors_of([module]):
                self._tensors.setdefault(storage_key(tensor), []).append(tensor)
            for leaf, buffer in module._buffers.items():
                self._buffers[id(buffer)] = module, leaf
            methods = type(module)._apply, type(module).to
            if not all(method.__module__.startswith("torch.nn.modules.") for method in methods):
                self._left_to_modules.update(map(id, tensors_of(modules_of(module))))

    def all(self, loads: list[DeferredLoad]) -> Iterator[Fill]:
        """Yield what is to be filled for the ``loads``, and clear them to free the former memory."""
        needs: list[tuple[Slice, torch.Tensor, torch.dtype]] = []
        for load in loads:
            is_small = self._is_small(load)
            source = load.promise if is_small else _source_of(load)
            if source is None:
                _read_now(load)
            elif is_small or (need := self._need(load, source)) is None:
                yield Fill(source, load.target)
            else:
                needs.append((source, *need))
        loads.clear()
        places = [
            (tensor.numel(), kind, source.offset if kind == source.dtype else 0)
            for source, tensor, kind in needs
        ]
        flats: Iterable[torch.Tensor] = (
            allocate_all(places)
            if self._device == _CPU
            else (torch.empty(size, dtype=kind, device=self._device) for size, kind, _ in places)
        )
        for (source, tensor, _), flat in zip(needs, flats, strict=True):
            tensor.data = flat.as_strided(tensor.shape, tensor.stride(), 0)
            yield Fill(source, tensor.detach())

    def _is_small(self, load: DeferredLoad) -> bool:
        """Tell whether a tensor is small, and its bytes in the file are its bytes in memory."""
        target, source = load.target, load.promise
        return (
            load.source is None
            and self._device == _CPU
            and 0 < target.nbytes <= _SMALL_BYTES
            and target.is_cpu
            and target.dtype == source.dtype == self._final_dtype(target)
            and not source.parts
            and not source.fill
            and target.is_contiguous()
            and bool(source.contiguous)
        )

    def _need(self, load: DeferredLoad, source: Slice) -> tuple[torch.Tensor, torch.dtype] | None:
        """Return a tensor that needs new memory, and its dtype; None if the tensor keeps its memory.

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
        if not stays and more and not isinstance(tensor, nn.Parameter):
            return None
        if not stays and id(tensor) in self._left_to_modules:
            return None
        converted_twice = target.dtype not in {kind, source.dtype}
        exact = not converted_twice or (source.dtype, target.dtype) in _EXACT
        if not (exact and self._device.type in {"cpu", "cuda"} and _is_whole(tensor, target)):
            return None
        if not stays and id(tensor) in self._buffers:
            module, leaf = self._buffers[id(tensor)]
            tensor = module._buffers[leaf] = target  # Module.to() also makes a new buffer
        return tensor, kind

    def _final_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype


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


def _read_now(load: DeferredLoad) -> None:
    """Fill the target of one load, even if its values are only a view of a tensor in the file."""
    source, view = _source_of(load), load.source
    if source is not None:
        filling.fill([Fill(source, load.target)], Disk(1))
        return
    assert view is not None
    promised: Slice = load.promise
    whole = torch.empty_strided(promised.shape, dense_stride(promised), dtype=promised.dtype)
    filling.fill([Fill(promised, whole)], Disk(1))
    seen = torch.empty(0, dtype=view.dtype)
    seen.set_(whole.untyped_storage(), view.storage_offset(), view.shape, view.stride())
    load.target.copy_(seen)


def _source_of(load: DeferredLoad) -> Slice | None:
    """Return the range of the file from which a load reads.

    ``_source_of`` returns None for a view with another dtype than the file's tensor, and for a part
    of a tensor that is not in one block of the file.
    """
    promised: Slice = load.promise
    view = load.source
    if view is None:
        return promised
    if view.dtype != promised.dtype:
        return None
    stride, dense = view.stride(), dense_stride(promised)
    if (tuple(view.shape), stride) == (promised.shape, dense) and not view.storage_offset():
        return promised
    if promised.parts or promised.fill or dense != promised.stride:
        return None
    offset = promised.offset + int(view.storage_offset()) * view.element_size()
    return replace(promised, shape=tuple(view.shape), stride=stride, offset=offset)
