"""Load a state dict into a model as torch's ``load_state_dict`` does, but with an index of the keys.

torch looks through all keys of a module's state dict for each child of the module. The time of
torch's load therefore grows with the square of the number of children: 20,000 layers in one module
take half a minute. ``state_walk`` puts the keys into a tree, in which each module finds its own
keys without a search.

If a module has no override and no pre-hook, and all its tensors fit, the copies to its tensors are
recorded without a call of ``_load_from_state_dict``. For any other module, ``_load_from_state_dict``
is called with the same state dict as from torch, which the module's code may change.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from weighin.construction.deferred import WriteLog
from weighin.construction.tensors import is_dense
from weighin.errors import CheckpointError, HarnessError
from weighin.formats.base import TensorSlice
from weighin.formats.foreign import misfit, selecting
from weighin.loader.lazy_state import LazyState
from weighin.text import plain

_LOAD_MODEL: Final = nn.Module.load_state_dict
_METHODS: Final = {
    "_load_from_state_dict": nn.Module._load_from_state_dict,
    "set_extra_state": nn.Module.set_extra_state,
}
_MISFIT: Final = re.compile(r"size mismatch for (.+?): copying a param")
_PLAIN_TENSORS: Final = frozenset({torch.Tensor, nn.Parameter})


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
