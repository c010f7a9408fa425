"""Load a state dict into a model as torch's ``load_state_dict`` does, but with an index of the keys.

torch looks through all keys of a module's state dict for each child of the module. The time of
torch's load therefore grows with the square of the number of children: 20,000 layers in one module
take half a minute. A tree of the keys, in which each module finds its own keys, needs no search. The
tensors of the state dict have no values yet; their copies are only recorded.

If a module has no override and no pre-hook, and all its tensors fit, the copies to its tensors are
recorded without a call of ``_load_from_state_dict``. For any other module, ``_load_from_state_dict``
is called with the same state dict as from torch, which the module's code may change.
"""

import mmap
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from weighin.construction.deferred import DeferredLoad, WriteLog
from weighin.construction.tensors import is_dense
from weighin.errors import CheckpointError, HarnessError
from weighin.loader import fill
from weighin.loader.direct_io import DiskReaders
from weighin.loader.memory import MAP_NORESERVE, TENSOR_ALIGNMENT, Fill, file_order, is_readable
from weighin.stream.foreign import misfit, selecting
from weighin.stream.slices import Slices, TensorSlice
from weighin.text import plain

_LOAD_MODEL: Final = nn.Module.load_state_dict
_METHODS: Final = {
    "_load_from_state_dict": nn.Module._load_from_state_dict,
    "set_extra_state": nn.Module.set_extra_state,
}
_MISFIT: Final = re.compile(r"size mismatch for (.+?): copying a param")
_PLAIN_TENSORS: Final = frozenset({torch.Tensor, nn.Parameter})

FILLED_DEVICES: Final = frozenset({"cpu", "cuda"})
"""The devices whose memory the loader fills piece by piece. torch fills others from a CPU copy."""


class LazyState(Mapping[str, Any]):
    """The state dict of a checkpoint, with tensors that have no values yet.

    The state dict creates a tensor when the tensor is first looked up. A tensor without values only
    reserves address space, and takes memory only if a module's code reads its values.

    Args:
        log: records the source from which each created tensor will get its values.
        values: the state dict's values that are no tensors.

    Attributes:
        sources: each tensor's file and offset, in the order of the keys; None for a value that is no
            tensor.
        metadata: the modules' version metadata; None if the checkpoint has none.

    Raises:
        CheckpointError: weighin cannot dequantise a tensor, or a tensor is stored in several blocks
            of which one has gaps. ``torch.distributed.checkpoint`` never writes such gaps.
    """

    def __init__(self, log: WriteLog, slices: Slices, values: Mapping[str, Any]) -> None:
        self._log = log
        self._numbers: dict[str, int] = {}
        self._values: dict[str, Any] = {}
        self.sources: list[TensorSlice | None] = []
        self.metadata = slices.metadata
        for number, source in enumerate(slices):
            if source.parts or source.encoding:
                _check_blocks(source)
            self._numbers[source.name] = number
        self.sources += slices
        for name, value in values.items():
            self._numbers[name] = len(self.sources)
            self._values[name] = value
            self.sources.append(None)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._made(self._numbers[name])
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def all(self) -> dict[str, Any]:
        """Return the whole state dict as an ``OrderedDict`` with the attribute ``_metadata``."""
        state = OrderedDict(self)
        if self.metadata is not None:
            state._metadata = self.metadata  # type: ignore[attr-defined]
        return state

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each value; () for values that are no tensors."""
        places = zip(self, self.sources, strict=True)
        return {name: source.shape if source else () for name, source in places}

    @cached_property
    def _reserved(self) -> tuple[mmap.mmap, list[int]]:
        """Address space for all tensors, and the offset of each tensor within this space."""
        offsets, length = [], 0
        for source in self.sources:
            offsets.append(length)
            size = source.span * source.dtype.itemsize if source else 0
            length += -(-size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | MAP_NORESERVE), offsets

    def _made(self, number: int) -> torch.Tensor:
        source = self.sources[number]
        assert source is not None
        if count := source.span:
            memory, offsets = self._reserved
            flat = torch.frombuffer(memory, dtype=source.dtype, count=count, offset=offsets[number])
            tensor = flat.as_strided(source.shape, source.stride)
        else:
            tensor = torch.empty_strided(source.shape, source.stride, dtype=source.dtype)
        self._log.promise(tensor, source)
        return tensor


def load_state(
    model: nn.Module,
    state: LazyState,
    log: WriteLog,
    checkpoint: Path,
    optional: Collection[str] | None = None,
) -> None:
    """Record the load of a state dict into a model, and turn torch's errors into CheckpointErrors.

    Args:
        log: records the copies that the load consists of.
        optional: names that may be missing in ``state``; None means that all names are required.

    Raises:
        CheckpointError: keys are missing or unexpected, shapes differ, or a module's own code fails.
    """
    try:
        _load_state_dict(model, state, log, strict=optional is None)
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
        stored = state.shapes()
        problems = {
            "missing": wanted.keys() - stored.keys() - set(optional or ()),
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


def _load_state_dict(model: nn.Module, state: LazyState, log: WriteLog, *, strict: bool) -> None:
    """Record in ``log`` the copies that ``model.load_state_dict(state, strict)`` would make.

    Raises:
        RuntimeError: for the same reasons as ``load_state_dict``, and with the same message.
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    own = "load_state_dict" in model.__dict__ or type(model).load_state_dict is not _LOAD_MODEL
    if swaps or own:
        with log.recording():
            model.load_state_dict(state.all(), strict=strict)
        return
    if (copies := _Plain(state).copies(model)) is not None:
        log.load(copies)
        return
    walk = _Walk(state, log)
    walk.load(model, _View.of(state, ""), "")
    walk.report(type(model).__name__, strict=strict)


@dataclass(slots=True)
class _Node:
    """One module's keys, as positions in the state dict: its own are ``leaves``, others in ``children``."""

    leaves: dict[str, int] = field(default_factory=dict)
    children: dict[str, "_Node"] = field(default_factory=dict)

    def below(self, name: str) -> "_Node":
        """Return the node of a child module, or an empty node. The child's name may contain dots."""
        node = self
        for part in name.split("."):
            found = node.children.get(part)
            if found is None:
                return _Node()
            node = found
        return node

    def numbers(self) -> list[int]:
        """Return the sorted positions of all keys of this module and its descendants."""
        found: list[int] = []
        todo = [self]
        while todo:
            node = todo.pop()
            found += node.leaves.values()
            todo += node.children.values()
        return sorted(found)


@dataclass(slots=True)
class _View:
    """The state dict of one module: those of all ``keys`` whose positions are in ``node``.

    ``values`` is the checkpoint's state dict, or a dict that a module's code may have changed.
    """

    values: LazyState | dict[str, Any]
    keys: Sequence[str]
    node: _Node

    @classmethod
    def of(cls, values: LazyState | dict[str, Any], prefix: str) -> "_View":
        """Return the view of all keys that begin with ``prefix``."""
        root, start, keys = _Node(), len(prefix), list(values)
        nodes = {"": root}
        for number, key in enumerate(keys):
            if not key.startswith(prefix):
                continue
            path, _, leaf = f".{key[start:]}".rpartition(".")
            node = nodes.get(path)
            if node is None:
                node = _add(nodes, path)
            node.leaves[leaf] = number
        return cls(values, keys, root)

    def below(self, name: str) -> "_View":
        return _View(self.values, self.keys, self.node.below(name))

    def as_dict(self) -> dict[str, Any]:
        """Return the state dict that torch would give to the module, in torch's order."""
        keys = map(self.keys.__getitem__, self.node.numbers())
        return {key: self.values[key] for key in keys}


def _add(nodes: dict[str, _Node], path: str) -> _Node:
    """Add a node for ``path``, such as ".blocks.0", and the missing nodes of its parent modules;
    return the node for ``path``.
    """
    missing = []
    while path not in nodes:
        missing.append(path)
        path = path.rpartition(".")[0]
    node = nodes[path]
    for lower in reversed(missing):
        node.children[lower.rpartition(".")[2]] = nodes[lower] = _Node()
        node = nodes[lower]
    return node


class _Plain:
    """The copies of a load that consists only of copies.

    Such a load has no override, hook, missing or unexpected key, and no tensor of another shape.
    """

    def __init__(self, state: LazyState) -> None:
        self._left: dict[str, TensorSlice | None] = dict(zip(state, state.sources, strict=True))
        self._assigns = any(
            local.get("assign_to_params_buffers", False)
            for local in (state.metadata or {}).values()
        )
        self._are_plain: dict[type, bool] = {}
        self._copies: list[tuple[torch.Tensor, TensorSlice]] = []

    def copies(self, model: nn.Module) -> list[tuple[torch.Tensor, TensorSlice]] | None:
        """Return each tensor with its source, in torch's order; None if the load needs more than copies."""
        plain = not self._assigns and self._add(model, "") and not self._left
        return self._copies if plain else None

    def _add(self, module: nn.Module, prefix: str) -> bool:
        """Add the copies of a module and its descendants; return False if they need more than copies."""
        if module._load_state_dict_post_hooks or not _is_plain(module, self._are_plain):
            return False
        left, copies, unsaved = self._left, self._copies, module._non_persistent_buffers_set
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or name in unsaved:
                    continue
                source = left.pop(prefix + name, None)
                if source is None or not _fits(tensor, source):
                    return False
                copies.append((tensor, source))
        if module._modules:
            for name, child in module._modules.items():
                if child is not None and not self._add(child, f"{prefix}{name}."):
                    return False
        return True


class _Walk:
    """A load that visits the modules in torch's order, and collects the errors that torch reports."""

    def __init__(self, state: LazyState, log: WriteLog) -> None:
        self._state, self._log = state, log
        self._are_plain: dict[type, bool] = {}
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._errors: list[str] = []

    def load(self, module: nn.Module, view: _View, prefix: str) -> None:
        metadata = self._state.metadata
        local = {} if metadata is None else metadata.get(prefix[:-1], {})
        plain = _is_plain(module, self._are_plain)
        copies = self._copies(module, view.node) if plain and view.values is self._state else None
        if copies is not None and not local.get("assign_to_params_buffers", False):
            self._log.load(copies)
        else:
            values = (
                self._state.all() if not prefix and view.values is self._state else view.as_dict()
            )
            with self._log.recording():
                module._load_from_state_dict(
                    values, prefix, local, True, self._missing, self._unexpected, self._errors
                )
            if not plain and module._modules:
                view = _View.of(values, prefix)
        for name, child in module._modules.items():
            if child is not None:
                self.load(child, view.below(name), f"{prefix}{name}.")
        if module._load_state_dict_post_hooks:
            self._call_post_hooks(module)

    def _copies(
        self, module: nn.Module, node: _Node
    ) -> list[tuple[torch.Tensor, TensorSlice]] | None:
        """Return the module's own tensors and their sources; None if torch's code must load them."""
        if not node.children.keys() <= module._modules.keys():
            return None
        copies = []
        leaves, sources = node.leaves, self._state.sources
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or name in module._non_persistent_buffers_set:
                    continue
                source = sources[leaves[name]] if name in leaves else None
                if source is None or not _fits(tensor, source):
                    return None
                copies.append((tensor, source))
        return copies if len(copies) == len(leaves) else None

    def _call_post_hooks(self, module: nn.Module) -> None:
        keys = nn.modules.module._IncompatibleKeys(self._missing, self._unexpected)
        with self._log.recording():
            for hook in module._load_state_dict_post_hooks.values():
                if hook(module, keys) is not None:
                    raise AssertionError(
                        "Hooks registered with ``register_load_state_dict_post_hook`` are not "
                        "expected to return new values, if incompatible_keys need to be modified, "
                        "it should be done inplace."
                    )

    def report(self, model_name: str, *, strict: bool) -> None:
        """Raise torch's exception if there are errors or, with ``strict``, missing or unexpected keys."""
        errors = self._errors
        if strict:
            kinds = (("Unexpected", self._unexpected), ("Missing", self._missing))
            for kind, keys in kinds:
                if keys:
                    listed = ", ".join(f'"{key}"' for key in keys)
                    errors.insert(0, f"{kind} key(s) in state_dict: {listed}. ")
        if errors:
            joined = "\n\t".join(errors)
            raise RuntimeError(f"Error(s) in loading state_dict for {model_name}:\n\t{joined}")


def _is_plain(module: nn.Module, known: dict[type, bool]) -> bool:
    """Tell whether a module has neither a pre-hook nor an override that could change its load.

    ``known`` caches for each class whether the class overrides none of the ``_METHODS``.
    """
    if module._load_state_dict_pre_hooks:
        return False
    kind = type(module)
    if kind not in known:
        known[kind] = all(getattr(kind, name) is _METHODS[name] for name in _METHODS)
    own = module.__dict__
    return known[kind] and "_load_from_state_dict" not in own and "set_extra_state" not in own


def _fits(tensor: torch.Tensor, source: TensorSlice) -> bool:
    """Tell whether torch would load a tensor by a plain copy from ``source``, the tensor in the file."""
    return (
        type(tensor) in _PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.shape == source.shape
        and (tensor.is_cpu or tensor.is_cuda)
        and (tensor.is_contiguous() or is_dense(tensor))  # no two elements share memory
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def read_at_once(load: DeferredLoad) -> None:
    """Fill the target of one load, even if its values are only a view of a tensor in the file."""
    source, target = source_of(load), load.target
    direct = target.device.type in FILLED_DEVICES
    if direct and source is not None and is_readable(source) and not source.encoding:
        _fill(source, target)
        return
    promised, view = load.promise, load.source
    count = prod(promised.shape) if promised.parts else promised.span
    flat = torch.empty(count, dtype=promised.dtype)
    if promised.parts:
        _fill(promised, flat.view(promised.shape))
    else:
        _fill(replace(promised, shape=(count,), stride=(1,)), flat)
    if torch._debug_has_internal_overlap(target) == 1:  # an expanded tensor of the state dict
        target = target.as_strided((count,), (1,), target.storage_offset())
        target.copy_(flat)
        return
    if view is None:
        target.copy_(flat.as_strided(promised.shape, promised.stride))
        return
    target.copy_(flat.as_strided(view.shape, view.stride(), view.storage_offset()))


def _fill(source: TensorSlice, target: torch.Tensor) -> None:
    with fill.being_filled([Fill(source, target)], DiskReaders(1)):
        pass


def source_of(load: DeferredLoad) -> TensorSlice | None:
    """Return the range of the file from which a load reads.

    ``source_of`` returns None for a view with another dtype than the file's tensor, and for a part
    of a tensor that is quantised or stored in several blocks.
    """
    promised: TensorSlice = load.promise
    view = load.source
    if view is None:
        return promised
    same = (tuple(view.shape), view.stride()) == (promised.shape, promised.stride)
    if same and not view.storage_offset() and view.dtype == promised.dtype:
        return promised
    if promised.parts or promised.encoding or view.dtype != promised.dtype:
        return None
    offset = promised.offset + int(view.storage_offset()) * view.element_size()
    return replace(promised, shape=tuple(view.shape), stride=tuple(view.stride()), offset=offset)


def _check_blocks(source: TensorSlice) -> None:
    if source.encoding:
        raise CheckpointError(
            f"{source.file}: {plain(source.name)} is quantised to {source.encoding}, which load_streaming"
            " does not dequantise",
            "first write the dequantised values into a folder, and load that folder: weighin"
            f" convert {source.file} FOLDER --keys model",
        )
    for where in source.parts:
        if file_order(where) is None:
            raise CheckpointError(
                f"{where.file}: the part of {source.name!r} at byte {where.offset:,} has gaps between its "
                "elements",
                "rewrite the checkpoint with each tensor in one block: "
                f"weighin convert {where.file.parent} WHOLE --format dcp",
            )
