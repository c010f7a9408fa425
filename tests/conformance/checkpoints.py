"""Make checkpoints of a model with new values, in any format, dtype and storage, whole or damaged."""

import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from cells import FORMATS, files_of, page_cache, suffix_of, write_state
from hypothesis import strategies as st
from model_differences import seed
from modules import Recipe, leaves
from standard import STANDARD
from tensors import FLOATS, fill
from torch import nn

State = dict[str, Any]

PT = ("pt", "pt_legacy")
STORAGES = ("as they are", "apart", "gaps", "expanded", "one storage")
DAMAGES = ("missing", "unexpected", "misshapen", "empty", "prefixed", "old batch norm", "type")
_SAFETENSORS = {"safetensors", "sharded"}


@dataclass(frozen=True)
class Checkpoint:
    """The options of a checkpoint. ``dtype`` is of all floating-point tensors; None keeps their own."""

    fmt: str = "pt"
    seed: int = 1
    dtype: str | None = None
    storage: str = "as they are"
    specials: bool = False
    metadata: bool = True
    damage: str | None = None
    cold: bool = False


def checkpoints() -> st.SearchStrategy[Checkpoint]:
    """Return a hypothesis strategy for a checkpoint: most in torch's formats, some damaged, few cold."""
    return st.builds(
        Checkpoint,
        fmt=st.sampled_from(("pt", "pt", "pt", "pt_legacy", "safetensors", *FORMATS)),
        seed=st.integers(1, 100),
        dtype=st.sampled_from((None, None, None, *FLOATS)),
        storage=st.sampled_from((*STORAGES, "as they are", "apart")),
        specials=st.booleans(),
        metadata=st.sampled_from((True, True, True, False)),
        damage=st.sampled_from((*[None] * 20, *DAMAGES)),
        cold=st.sampled_from((*[False] * 9, True)),
    )


def make(recipe: Recipe, how: Checkpoint, folder: Path) -> tuple[Path, State]:
    """Write a checkpoint of a model into a folder; return its path and the state dict to load.

    The state dict is the one that torch reads from the file; for formats that torch cannot read, it
    is a plain dict of the tensors.
    """
    state = _state(recipe, how)
    fmt = how.fmt if _holds(how.fmt, state) else "pt"
    path = folder / f"model{suffix_of(fmt)}"
    _remove(path)
    if fmt in PT:
        torch.save(state, path, _use_new_zipfile_serialization=fmt == "pt")
        state = torch.load(path, weights_only=True)
    else:
        write_state(path, fmt, state)
        as_written = torch.contiguous_format
        state = {name: one.clone(memory_format=as_written) for name, one in state.items()}
    if how.cold:
        page_cache.drop(files_of(path))
    return path, state


def _state(recipe: Recipe, how: Checkpoint) -> State:
    """Return the state dict of another instance of the model, with new values."""
    seed(how.seed)
    build, _foreign = recipe.prepare()
    model = build()
    materialise(model, recipe)
    generator = torch.Generator().manual_seed(how.seed)
    own: Any = model.state_dict()  # with torch's attribute _metadata
    with torch.no_grad():
        for tensor in own.values():
            if isinstance(tensor, torch.Tensor):
                fill(tensor, generator, specials=how.specials)
    state: Any = OrderedDict(own)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            state[key] = _cast(value.detach(), how.dtype)
    state = _damaged(_stored(state, how.storage, generator, how.specials), how.damage)
    if how.metadata and how.damage != "old batch norm":
        state._metadata = own._metadata
    return cast(State, state)


def materialise(model: nn.Module, recipe: Recipe) -> None:
    """Call lazy modules, so that they create their parameters."""
    for path, leaf in leaves(recipe.root):
        if leaf.kind.startswith("Lazy"):
            inputs = STANDARD[leaf.kind][1]
            assert inputs is not None
            model.get_submodule(path)(*inputs(leaf.size))


def _cast(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    return tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor


def _stored(state: State, storage: str, generator: torch.Generator, specials: bool) -> State:
    """Return the tensors in storages of the given kind; "apart" gives tied names different values."""
    if storage == "as they are":
        return state
    flats: dict[torch.dtype, torch.Tensor] = {}
    for key, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        size = tensor.numel()
        if storage == "gaps" and tensor.dim():
            new = tensor.new_zeros((*tensor.shape, 2))[..., 1].copy_(tensor)
        elif storage == "expanded" and size:
            new = tensor.reshape(-1)[:1].clone().reshape([1] * tensor.dim()).expand(tensor.shape)
        elif storage == "one storage" and size < 100:
            flat = flats.setdefault(tensor.dtype, torch.zeros(400, dtype=tensor.dtype))
            start = (
                sum(key.encode()) * 7 % 300
            )  # some overlap; unlike hash(), equal in every process
            new = flat[start : start + size].view(tensor.shape).copy_(tensor)
        else:
            new = tensor.clone()
            fill(new, generator, specials=specials)
        state[key] = new
    return state


def _damaged(state: State, damage: str | None) -> State:
    keys = list(state)
    if damage == "empty":
        return OrderedDict()
    if damage == "prefixed":
        return OrderedDict((f"module.{key}", value) for key, value in state.items())
    if damage == "old batch norm":
        return OrderedDict(item for item in state.items() if "num_batches" not in item[0])
    if damage == "unexpected":
        state["extra.weight"] = torch.ones(2)
    elif damage == "missing" and keys:
        del state[keys[len(keys) // 2]]
    elif damage == "misshapen" and keys and isinstance(state[keys[-1]], torch.Tensor):
        state[keys[-1]] = torch.ones(*state[keys[-1]].shape, 2, 3)
    elif damage == "type" and keys and isinstance(state[keys[0]], torch.Tensor):
        state[keys[0]] = torch.ones(state[keys[0]].shape, dtype=torch.int32)
    return state


def _holds(fmt: str, state: State) -> bool:
    """Tell whether a format can store a state dict; formats other than torch's store only tensors."""
    if fmt == "pt_legacy":  # torch cannot load float8 from it
        return not any("float8" in str(getattr(value, "dtype", "")) for value in state.values())
    if fmt == "pt":
        return True
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        return False
    return not (fmt in _SAFETENSORS and any(value.is_complex() for value in state.values()))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
