"""Load a checkpoint straight into a model, without a second copy of the weights.

If all modules load by torch's plain copies and each tensor fits, the loader knows the copies from the
names alone. Any other model is loaded by its own ``load_state_dict``, with all hooks and overrides,
from a state dict whose tensors have addresses but no values; ``construct.WriteLog`` records the
copies that it makes. Either way, nothing is read before the whole checkpoint is known to fit. Several
threads then make the copies piece by piece, on the CPU into one area of huge pages. The peak memory is
the model, and half a MiB for each thread.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from weighin.errors import CheckpointError, HarnessError
from weighin.stream import construct, filling, formats
from weighin.stream.bytes import Disk, allocate_all
from weighin.stream.construct import WriteLog
from weighin.stream.filling import dense_stride
from weighin.stream.foreign import misfit, selecting
from weighin.stream.pretrained_library import Selection
from weighin.stream.quantised import refuse_codes
from weighin.stream.slices import Checkpoint, Fill, Slice, check_converts
from weighin.stream.tensors import is_dense, named_tensors, storage_key, tensors_of, use_count
from weighin.stream.torch_files import is_extra_state
from weighin.text import first_names, plain, shown

Granularity = Literal["all", "module", "tensor"]

# Dtypes (from, to) whose conversion loses no precision. If a second conversion follows, the loader skips
# the first one, because the result is the same.
_EXACT: Final = frozenset({
    (torch.float16, torch.float32), (torch.float16, torch.float64),
    (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float64),
    (torch.float32, torch.float64),
})  # fmt: skip
_LOADING: Final = {
    name: getattr(nn.Module, name)
    for name in ("load_state_dict", "_load_from_state_dict", "set_extra_state")
}
_UNITS: Final[dict[str, Callable[[Fill], str]]] = {
    "all": lambda _: "",
    "module": lambda fill: fill.where.name.rpartition(".")[0],
    "tensor": lambda fill: fill.where.name,
}
_MISFIT: Final = re.compile(r"size mismatch for (.+?): copying a param")
_FOREIGN: Final = re.compile(r"(?:GLOBAL |unpickle )(\S+?)(?: was not| is not|$)")
_SMALL_BYTES: Final = 64 * 1024  # a smaller tensor gains nothing from huge pages
_SAVED_FROM: Final = "choose the model from which this checkpoint was saved"
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
    that the constructor itself reads are initialised. If ``model`` is a module, the load fills each
    tensor in place that already has the wanted device and dtype. Weights that the model ties are read
    once, and stay tied. As for ``load_state_dict``, the checkpoint must have every name of a tied weight.

    The tensors in the checkpoint must have the names that the model gives them. A Hugging Face folder,
    whose library renames and converts tensors, is loaded by ``load_pretrained``.

    Args:
        dtype: the dtype of all floating-point tensors after the load; None keeps the model's own.
        threads: the number of threads that read. By default, a cached checkpoint is read by one thread
            for each processor, at most 4. Otherwise, it is read by 16 threads from a local disk, and
            by up to 64 from storage behind a network.
        granularity: "tensor" reads one tensor after the other. "module" reads one module after the
            other, and the tensors of a module concurrently. "all" reads all tensors concurrently.
        key: the key of the state dict in a training checkpoint: "model", or "state.model" in nested
            dicts. Only the tensors under this key are read. No code from the checkpoint runs.
        strip_prefix: a prefix of the checkpoint's names that the model's names lack, such as "module.".

    Raises:
        CheckpointError: the checkpoint is unreadable; it does not fit the model (missing or unexpected
            keys, other shapes); torch cannot convert a tensor to ``dtype``; the model has no
            parameters for the scales of quantised tensors; or it has a tensor on the meta device.
    """
    path, selection = Path(checkpoint), Selection(key, strip_prefix)
    device = torch.empty(0, device=device).device  # as tensors report it: "cuda" with its number
    slices = formats.read(path, selection)
    if dtype is not None:
        check_converts(path, slices, "leave dtype out")
    log = WriteLog()
    with log.recording():
        if not isinstance(model, nn.Module):
            with construct.on_cpu():
                model = model()
        if any(tensor.is_meta for tensor in tensors_of(model)):
            names = [name for name, one in named_tensors(model).items() if one.is_meta]
            raise CheckpointError(
                f"{path}: not loaded: tensors of the model are on the meta device: {first_names(names)}",
                "pass load_streaming a function that builds the model on the CPU, not on the meta device",
            )
        refuse_codes(path, slices, model.state_dict)
        values = _extra_values(model, slices, selection)
    _record(model, slices, values, log, path)
    fills = sorted(log.finish(), key=lambda fill: (str(fill.where.file), fill.where.offset))
    batches = [list(members) for _, members in itertools.groupby(fills, _UNITS[granularity])]
    del fills
    placer, disk = _Placer(model, log, device, dtype), Disk(threads)
    while batches:
        fills = placer.place(batches.pop(0))
        construct.give_back_heap()
        filling.fill(fills, disk)
        del fills
    construct.give_back_heap()  # frees objects that only the load needed
    if dtype is not None or any(tensor.device != device for tensor in tensors_of(model)):
        model.to(device=device, dtype=dtype)  # also runs the overrides of to() in modules
    return model


def _record(
    model: nn.Module, slices: Checkpoint, values: dict[str, Any], log: WriteLog, path: Path
) -> None:
    """Record the copies that ``load_state_dict`` makes of ``slices``; ``values`` are no tensors."""
    if encoded := next((one for one in slices if one.encoding), None):
        raise CheckpointError(
            f"{encoded.file}: {plain(encoded.name)} is quantised to {encoded.encoding}, which"
            " load_streaming does not dequantise",
            f"convert it once, and load the new folder: weighin convert {encoded.file} FOLDER --keys model",
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
                f"{one.file}: {plain(one.name)} repeats few stored elements to the shape {one.shape},"
                " for which this machine has too little memory",
                _SAVED_FROM,
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
                f"{path}: a module of this model failed to load: {type(error).__name__}: {error}",
                f"{_SAVED_FROM}; to debug the module, run model.load_state_dict(torch.load(...))",
            ) from error
        with log.recording():
            own = model.state_dict(keep_vars=True)
        stored = dict.fromkeys([one.name for one in slices] + [*values])
        by_fault = {
            "missing": sorted(map(plain, own.keys() - stored.keys())),
            "unexpected": sorted(map(plain, stored.keys() - own.keys())),
            "of another shape": sorted({plain(name) for name in _MISFIT.findall(str(error))}),
        }
        repair = selecting(stored, own)
        raise misfit(path, "this model", by_fault, str(error), repair=repair) from error


def _plain_copies(model: nn.Module, slices: Checkpoint) -> list[Fill] | None:
    """Return the copies in torch's order; None if an override, a hook or a misfit needs torch's own load.

    That looks through all keys of a module's state dict for each child: half a minute for 20,000 layers.
    """
    metadata = (slices.metadata or {}).values()
    if torch.__future__.get_swap_module_params_on_conversion() or any(
        local.get("assign_to_params_buffers", False) for local in metadata
    ):
        return None
    left = {one.name: one for one in slices}
    copies = []
    todo = [("", model)]
    while todo:
        prefix, module = todo.pop()
        kind, own = type(module), module.__dict__
        if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
            return None
        if any(name in own or getattr(kind, name) is not ours for name, ours in _LOADING.items()):
            return None
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            source = left.pop(prefix + name, None)
            if source is None or not _fits(tensor, source):
                return None
            copies.append(Fill(source, tensor))
        children = reversed(module._modules.items())
        todo += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
    return None if left else copies


def _fits(tensor: torch.Tensor, source: Slice) -> bool:
    """Tell whether torch would load a tensor by a plain copy from ``source``, the tensor in the file."""
    return (
        type(tensor) in {torch.Tensor, nn.Parameter}
        and tensor.layout is torch.strided
        and tensor.shape == source.shape
        and (tensor.is_cpu or tensor.is_cuda)
        and (tensor.is_contiguous() or is_dense(tensor))  # no two elements share memory
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def _extra_values(model: nn.Module, slices: Checkpoint, selection: Selection) -> dict[str, Any]:
    """Return the values that ``load_state_dict`` needs and that are no tensors, or are extra states.

    ``torch.load`` reads an extra state, also a tensor, which then keeps its strides; one that no module
    takes is left out. Any other value is None: torch reports its name in an error.
    """
    stored = dict(slices.values)
    if slices.format in formats.PICKLED:
        stored |= {one.name: one for one in slices if is_extra_state(one.name)}
    if not stored:
        return {}
    takers = {
        f"{path}._extra_state".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
    own = nn.Module._load_from_state_dict
    # What is run before the names are compared may take a prefix away: a module then takes the rest of a name.
    if any(
        m._load_state_dict_pre_hooks or type(m)._load_from_state_dict is not own
        for m in model.modules()
    ):
        takers |= {name for name in stored if any(name.endswith(f".{one}") for one in takers)}
    found: dict[str, Any] = {
        name: None for name in stored if name in takers or not is_extra_state(name)
    }
    unused = [name for name in slices.values if name not in found]
    if dropped := [plain(name) for name in unused if slices.values[name] is not None]:
        _log.warning("no module of this model takes these extra states: %s", first_names(dropped))
    wanted = {name for name in found if name in takers and stored[name] is not None}
    read: dict[str, Any] = {}
    for file in slices.files if wanted else ():
        read |= _unpickled(file, wanted, selection)
    if lost := sorted(wanted - read.keys()):
        raise CheckpointError(
            f"{slices.files[0]}: torch.load returns no extra state called {first_names(lost)}",
            "save the file again with the model's own names: torch.save(model.state_dict(), ...)",
        )
    return found | read


def _unpickled(file: Path, names: set[str], selection: Selection) -> dict[str, Any]:
    """Return some values of a file, by ``torch.load`` without any code of the file."""
    try:
        with torch.serialization.safe_globals(_harmless()):
            maps = zipfile.is_zipfile(file)  # then the file's tensors take no memory
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
    memo: dict[int, Any] = {}  # of all copies, so that tensors which share memory still do
    while todo:
        above, inside = todo.pop()
        for name, value in inside.items():
            if (place := f"{above}{name}") in places:
                # A copy, because tensors in the value would need the mapped file.
                found[places[place]] = copy.deepcopy(value, memo)
            elif isinstance(value, dict):
                todo.append((f"{place}.", value))
    return found


def _harmless() -> list[Any]:
    """Return the classes without code of a file that extra states hold, beside those that torch knows."""
    classes: list[Any] = [Namespace, io.BytesIO, bytes]
    with suppress(ImportError):  # torch works without NumPy
        import numpy

        core: Any = getattr(numpy, "_core", None) or numpy.core
        for name, place in itertools.product(("_reconstruct", "scalar"), ("core", "_core")):
            classes.append((getattr(core.multiarray, name), f"numpy.{place}.multiarray.{name}"))
        codes = set(numpy.typecodes["All"]) - {"O", "V"}
        classes += [numpy.ndarray, numpy.dtype, *{type(numpy.dtype(code)) for code in codes}]
    return classes


class _Placer:
    """Decides for each tensor whether the load fills the tensor's present memory or allocates new."""

    def __init__(
        self, model: nn.Module, log: WriteLog, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._log, self._device, self._dtype = log, device, dtype
        # The places of the tensors of each storage: a module, and the name in it.
        self._places: dict[int, list[tuple[nn.Module, str, torch.Tensor]]] = {}
        self._left_to_modules: set[int] = set()
        for module in model.modules():
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._places.setdefault(storage_key(tensor), []).append((module, leaf, tensor))
            methods = type(module)._apply, type(module).to
            if not all(method.__module__.startswith("torch.nn.modules.") for method in methods):
                self._left_to_modules.update(map(id, tensors_of(module)))

    def place(self, loads: list[Fill]) -> list[Fill]:
        """Return what is to be filled for the ``loads``, and clear them to free the former memory."""
        fills: list[Fill] = []
        moved: list[Fill] = []
        places: list[tuple[int, torch.dtype, int]] = []
        for where, target in loads:
            kind = self._dtype if self._dtype and target.is_floating_point() else target.dtype
            if (tensor := self._to_move(target, where.dtype, kind)) is None:
                fills.append(Fill(where, target))
            else:
                moved.append(Fill(where, tensor))
                places.append((tensor.numel(), kind, where.offset if kind == where.dtype else 0))
        loads.clear()
        flats: Iterable[torch.Tensor]
        if self._device.type == "cpu":
            flats = allocate_all(places)
        else:  # each is allocated when the one before has replaced the former memory of its tensor
            device = self._device
            flats = (torch.empty(size, dtype=kind, device=device) for size, kind, _ in places)
        for (where, tensor), flat in zip(moved, flats, strict=True):
            tensor.data = flat.as_strided(tensor.shape, tensor.stride(), 0)
            fills.append(Fill(where, tensor.detach()))
        return fills

    def _to_move(
        self, target: torch.Tensor, stored: torch.dtype, final: torch.dtype
    ) -> torch.Tensor | None:
        """Return the model's tensor that needs new memory; None if it keeps the memory of ``target``.

        A tensor of the wanted device and dtype keeps memory from before the load. Any tensor keeps its
        memory if another shares it, if the load fills a part of it, or if one conversion in place of two
        would change the values. One to convert also does if a module overrides torch's conversion, or if
        it is a buffer with several names, which torch's conversion would untie.
        """
        stays = target.dtype == final and target.device == self._device
        if stays and (target.nbytes <= _SMALL_BYTES or not self._log.owns(target)):
            return None
        places = self._places.get(storage_key(target), [])
        if len({id(tensor) for *_, tensor in places}) != 1:
            return None
        module, leaf, tensor = places[0]
        is_buffer = any(name in owner._buffers for owner, name, _ in places)
        if not stays and (id(tensor) in self._left_to_modules or (is_buffer and len(places) > 1)):
            return None
        if target.dtype not in {final, stored} and (stored, target.dtype) not in _EXACT:
            return None
        if self._device.type not in {"cpu", "cuda"} or not _is_whole(tensor, target):
            return None
        if not stays and is_buffer:
            tensor = module._buffers[leaf] = target  # Module.to() also makes a new buffer
        return tensor


def _is_whole(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """Tell whether only ``tensor`` and ``target`` use their memory, and each fills it without gaps."""
    return (
        tensor.layout is torch.strided
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.dtype == target.dtype
        and (tensor.shape, tensor.stride()) == (target.shape, target.stride())
        and tensor.storage_offset() == target.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and is_dense(tensor)
        and use_count(tensor) == 2  # the tensor of the model, and ``target``
    )
