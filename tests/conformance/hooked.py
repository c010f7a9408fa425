"""Define modules that change the saving and loading of state dicts: hooks, overrides, extra state."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

State = dict[str, Any]


def untyped(module: nn.Module) -> Any:
    """Return the module, for calls of the methods that have no types in torch."""
    return module


class RenamesOldKey(nn.Module):
    """Saves and loads its weight under the name of an older version."""

    _version = 2

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 2))
        untyped(self)._register_state_dict_hook(_save_as_gamma)

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        if prefix + "gamma" in state:
            state[prefix + "weight"] = state.pop(prefix + "gamma")
        super()._load_from_state_dict(state, prefix, *rest)


def _save_as_gamma(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
    state[prefix + "gamma"] = state.pop(prefix + "weight")


class ComputesOnLoad(nn.Module):
    """Computes a buffer from the loaded weight, and counts the loads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 2))
        self.register_buffer("norm", torch.zeros(()), persistent=False)
        self.loads = 0

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        self.norm = self.weight.detach().float().abs().sum()
        self.loads += 1


class TransformsOnLoad(nn.Module):
    """A pre-hook that scales one value, splits another, drops one and adds one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(size, 2))
        self.k = nn.Parameter(torch.randn(size, 2))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("added", torch.zeros(3))
        untyped(self)._register_state_dict_hook(_join)
        untyped(self).register_load_state_dict_pre_hook(_split)


def _join(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
    names = [prefix + name for name in ("q", "k")]
    state[prefix + "qk"] = torch.cat([state.pop(name).detach() for name in names])
    state[prefix + "obsolete"] = torch.ones(2)
    del state[prefix + "added"]


def _split(module: nn.Module, state: State, prefix: str, *rest: Any) -> None:
    if prefix + "qk" in state:
        state[prefix + "q"], state[prefix + "k"] = state.pop(prefix + "qk").chunk(2)
    state.pop(prefix + "obsolete", None)
    if prefix + "scale" in state:
        state[prefix + "scale"] = state[prefix + "scale"].float() * 2
    state.setdefault(prefix + "added", torch.arange(3.0))


class ComputesAfterLoad(nn.Module):
    """A post-hook that computes a buffer and a number from the loaded weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 2))
        self.register_buffer("transposed", self.weight.detach().t().clone(), persistent=False)
        self.total = 0.0
        untyped(self).register_load_state_dict_post_hook(_after)


def _after(module: Any, keys: Any) -> None:
    module.transposed = module.weight.detach().t().clone()
    module.total = float(module.weight.detach().double().sum())


class ForgivesMissing(nn.Module):
    """A post-hook that removes a missing key from the list, so that the buffer keeps its value."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("count", torch.full((2,), 4.0))
        untyped(self)._register_state_dict_hook(_drop_count)
        untyped(self).register_load_state_dict_post_hook(_forgive)


def _drop_count(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
    del state[prefix + "count"]


def _forgive(module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("count")]


class DropsOnSave(nn.Module):
    """Leaves a key out of its state dict, so that torch refuses to load it again."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("count", torch.zeros(2))
        untyped(self)._register_state_dict_hook(_drop_count)


class DetachesOnSave(nn.Module):
    """Returns copies in its state dict, so that writing to them does not change the weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 3))
        untyped(self).register_state_dict_post_hook(_clone)


def _clone(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].detach().clone()


class KeepsDtype(nn.Module):
    """Overrides _apply: its table stays float32, and it counts the calls."""

    table: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 2))
        self.register_buffer("table", torch.arange(3.0) / 3)
        self.moves = 0

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        table = self.table
        nn.Module._apply(self, fn, recurse)
        self.table = table
        self.moves += 1
        return self


class ExtraTensor(nn.Module):
    """Extra state that is a tensor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.extra = torch.zeros(2)
        self.told = 0

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state
        self.told += 1


class ExtraDict(nn.Module):
    """Extra state that is a dict of numbers, which formats of tensors alone cannot store."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.extra: State = {"step": size, "range": [0.5, 2.0]}

    def get_extra_state(self) -> Any:
        return {**self.extra, "step": self.extra["step"] + 1}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class FillsItself(nn.Module):
    """Loads with code of its own: the weight is the sum of two keys of the checkpoint."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 2))
        self.register_buffer("shift", torch.randn(2))

    def _load_from_state_dict(
        self,
        state: State,
        prefix: str,
        metadata: State,
        strict: bool,
        missing: list[str],
        *rest: Any,
    ) -> None:
        names = [prefix + "weight", prefix + "shift"]
        missing += [name for name in names if name not in state]
        if not missing:
            with torch.no_grad():
                self.weight.copy_(state[names[0]].float() + state[names[1]].float())
        self.version = metadata.get("version")


HOOKED = {
    kind.__name__: kind
    for kind in (
        RenamesOldKey, ComputesOnLoad, TransformsOnLoad, ComputesAfterLoad, ForgivesMissing,
        DropsOnSave, DetachesOnSave, KeepsDtype, ExtraTensor, ExtraDict, FillsItself,
    )
}  # fmt: skip

WRITES_ON_LOAD = frozenset({
    "ComputesOnLoad", "TransformsOnLoad", "ComputesAfterLoad", "FillsItself", "ExtraTensor",
})  # fmt: skip
"""Modules that write to their own tensors during a load, also if torch then refuses the load."""
