"""Read the folder that DeepSpeed wrote at a training step: with ZeRO stage 1, 2 or 3, or no ZeRO.

::

    global_step10/
        mp_rank_00_model_states.pt                   ZeRO 1 and 2: the module in its own dtype
        zero_pp_rank_0_mp_rank_00_optim_states.pt    rank 0's share of the float32 weights
    global_step20/
        zero_pp_rank_0_mp_rank_00_model_states.pt    ZeRO 3: parameters are empty in these files
        zero_pp_rank_0_mp_rank_00_optim_states.pt
    global_step30_universal/                         as ds_to_universal.py writes it
        zero/layers.0.weight/fp32.pt                 the whole weight; other files are not read
        mp_rank_00_model_states.pt                   names, buffers and tied weights

Each file of optimizer states has a flat tensor for each group of parameters. Under ZeRO 1 and 2, these, joined over
all ranks, are the group's parameters one after the other; under ZeRO 3, each rank has an equal share of every
parameter. Like DeepSpeed's own ``zero_to_fp32.py``, weighin reads trained weights in float32, and buffers and
frozen weights in the stored dtype.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.stream import foreign
from weighin.stream.slices import ITEM_BYTES, Checkpoint, Slice, is_sizes, row_major
from weighin.stream.torch_files import open_file
from weighin.text import few, first_names, shown

Shape = tuple[int, ...]
Rows = Sequence[Sequence[Slice]]

_RANK: Final = r"(?P<of>(?:[a-z0-9]+_)?zero_pp_rank_)(?P<rank>\d+)_"
_OPTIMIZER: Final = rf"{_RANK}mp_rank_\d+_optim_states\.pt"
_MODEL: Final = rf"(?:{_RANK})?mp_rank_\d+_model_states\.pt"
_PIPELINE: Final = r"layer_\d+-model_\d+-model_states\.pt"
_COPY: Final = "copy the whole folder again, from every machine that took part in the training"
_EXPERTS: Final = "experts are divided among ranks (expert parallelism)"
_SAVE_EXPERTS: Final = (
    "load it with DeepSpeed on as many ranks, and save the experts of all ranks in one state dict"
)


def format_of(path: Path) -> str:
    """Return the name of the format of a step's folder; "" for another path."""
    if next(path.glob("zero/*/fp32.pt"), None):
        return "deepspeed_universal"
    return "deepspeed" if any(_matching(path, of) for of in (_OPTIMIZER, _MODEL, _PIPELINE)) else ""


def read(path: Path, name: str) -> Checkpoint:
    """Return the model's tensors with their files and offsets."""
    if name == "deepspeed_universal":
        return _read_universal(path)
    if divided := foreign.recognised("deepspeed", "\n".join(_matching(path, ".*")), path):
        raise divided
    models, optimizers = _by_rank(path, _MODEL), list[Path]()
    states, stored = _ModelStates(models[0]), dict[str, Slice]()
    if states.groups is not None:
        if not _matching(path, _OPTIMIZER):
            what = "the folder has no files *_optim_states.pt, where DeepSpeed's ZeRO keeps the float32 weights"
            own = f"give the file with the weights in the module's own dtype: {states.file} --key module"
            raise _refused(path, what, f"{_COPY}; or, only under ZeRO 1 and 2, {own}")
        optimizers = _by_rank(path, _OPTIMIZER)
        shares = [_Share(file) for file in optimizers]
        _by_rank(path, _OPTIMIZER, shares[0].ranks)
        stored = _trained(states, shares) | states.frozen(len(shares))
    found = states.checkpoint(stored)
    found.files = tuple(sorted([*models, *optimizers]))
    return found


def _read_universal(path: Path) -> Checkpoint:
    weights = {file.parent.name: file for file in sorted(path.glob("zero/*/fp32.pt"))}
    first_rank = r"(?:zero_pp_rank_0_)?mp_rank_\d+_model_states\.pt"
    states = [_ModelStates(path / name) for name in _matching(path, first_rank)]
    shapes = {name: of for one in states for each in one.groups or () for name, of in each.items()}
    module = {one.name for one in states[0].module} if states else {*shapes}
    for name in shapes:  # one without values must be in the module: ``checkpoint`` takes it there
        if name not in weights and name not in module:
            raise _without_values(path, name)
    stored: dict[str, Slice] = {}
    for name in dict.fromkeys([*(name for name in shapes if name in weights), *weights]):
        pickled = open_file(weights[name])
        value = pickled.value
        tensor = value.get("param") if isinstance(value, dict) else value
        if not isinstance(tensor, Slice):
            raise _refused(weights[name], "holds no weight")
        stored[name] = where = pickled.slice(name, tensor)
        if tensor is value:  # ZeRO 3 wrote the weight without its shape
            if name not in shapes:
                what = f"has a flat tensor of {prod(where.shape):,} elements"
                raise _refused(where.file, f"{what}, but no *_model_states.pt has its shape")
            stored |= laid_out(where.file, {name: shapes[name]}, [[where]])
    found = Checkpoint(stored.values())
    if states:  # each of several files has a part of the module
        frozen = states[0].frozen(states[0].ranks)
        found = states[0].checkpoint(stored | frozen, fallback=len(states) == 1)
    found.files = (*weights.values(), *(one.file for one in states))
    return found


@contextmanager
def _reading(file: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _refused(file, f"holds no {what}") from None


class _ModelStates:
    """One file ``*_model_states.pt``.

    ``module`` is the model's state dict, in which a parameter that ZeRO-3 divides among ranks is empty.
    ``groups`` has the shapes of the trained parameters of each group, in the order of the stored
    elements, and is None if no ZeRO optimizer wrote the checkpoint.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with _reading(file, "model states of DeepSpeed"):
            pickled = open_file(file)
            value = pickled.value
            if value.get("ds_autoep_layers") or value.get("autoep_layers"):
                raise _refused(file, f"the {_EXPERTS} by AutoEP", _SAVE_EXPERTS)
            self.module = Checkpoint() if value["module"] is None else pickled.checkpoint("module")
            groups = value.get("param_shapes")
            self.groups = None if groups is None else [_shapes(group) for group in groups]
            self.ranks = value.get("dp_world_size", 1) or 0
            self._frozen = _shapes(value.get("frozen_param_shapes") or {})
            shares = (value.get("frozen_param_fragments") or {}).items()
            self._shares = {name: pickled.slice(name, share) for name, share in shares}
            buffers = value.get("buffer_names") or ()  # to hash another value may take for ever
            self._buffers = {name for name in buffers if isinstance(name, str)}
            shared = (value.get("shared_params") or {}).items()
            self._shared = {new: old for new, old in shared if isinstance(old, str)}

    def frozen(self, ranks: int) -> dict[str, Slice]:
        """Return the parameters that are not trained, of which under ZeRO-3 each rank has a share."""
        folder, name = self.file.parent, self.file.name
        if not self._frozen or not name.startswith("zero_pp_rank"):
            return {}  # they are in ``module``
        files = _by_rank(folder, _RANK + re.escape(re.sub(_RANK, "", name)), ranks)
        every = [_ModelStates(file)._shares for file in files]
        stored: dict[str, Slice] = {}
        with _reading(folder, f"shares of {first_names(self._frozen)} in each rank"):
            for key, shape in self._frozen.items():
                stored |= laid_out(self.file, {key: shape}, [[shares[key]] for shares in every])
        return stored

    def checkpoint(self, stored: Mapping[str, Slice], *, fallback: bool = True) -> Checkpoint:
        """Return all tensors in order; without ``fallback``, only buffers may come from this file."""
        found, module = Checkpoint(), {one.name: one for one in self.module}
        found.metadata, found.values = self.module.metadata, self.module.values
        aliases = (name for name, source in self._shared.items() if source in stored)
        for name in dict.fromkeys([*module, *stored, *aliases]):
            where = stored.get(self._shared.get(name, name)) or stored.get(name)
            own = module.get(name)
            if own and (name in self._buffers or (not where and fallback and own.nbytes)):
                where = own
            if not where:
                raise _without_values(self.file.parent, name)
            found.append(replace(where, name=name))
        return found


class _Share:
    """One rank's share of the float32 weights: a flat tensor for each group of parameters."""

    def __init__(self, file: Path) -> None:
        with _reading(file, "optimizer states of DeepSpeed's ZeRO"):
            pickled = open_file(file)
            state = pickled.value["optimizer_state_dict"]
            if state.get("ds_zero_partition_groups"):
                raise _refused(file, f"the {_EXPERTS} by groups", _SAVE_EXPERTS)
            self.is_stage_3 = "fp32_flat_groups" in state
            key = "fp32_flat_groups" if self.is_stage_3 else "single_partition_of_fp32_groups"
            flats = [state[key]] if isinstance(state[key], Slice) else state[key]
            self.flats = [pickled.slice(f"{key}.{n}", flat) for n, flat in enumerate(flats)]
            count = state["partition_count"]  # a list has a number for each group of parameters
            counts = count if isinstance(count, list) else [count]
            self.ranks = max(one for one in counts if type(one) is int)
            # Of each parameter, since DeepSpeed 0.19.
            self.paddings = state.get("param_alignment_paddings") or [()] * len(self.flats)


def _shapes(value: Any) -> dict[str, Shape]:
    if not all(isinstance(name, str) and is_sizes(shape) for name, shape in value.items()):
        raise ValueError
    return {name: tuple(shape) for name, shape in value.items()}


def _trained(states: _ModelStates, shares: Sequence[_Share]) -> dict[str, Slice]:
    folder, groups = states.file.parent, states.groups or []
    if len({(one.is_stage_3, len(one.flats)) for one in shares}) != 1:
        raise _refused(folder, "the ranks' files have different stages or parameter groups of ZeRO")
    rows = [one.flats for one in shares]
    if shares[0].is_stage_3:  # each rank has a part of every parameter
        every = {name: shape for group in groups for name, shape in group.items()}
        return laid_out(states.file, every, rows)
    stored: dict[str, Slice] = {}
    with _reading(folder, "shares of the same groups of parameters"):
        of_groups = zip(groups, shares[0].paddings, zip(*rows, strict=True), strict=True)
        for shapes, paddings, row in of_groups:
            # DeepSpeed pads a group to a multiple of a number that is even.
            stored |= laid_out(states.file, shapes, [row], paddings, aligned=2 * len(rows))
    return stored


def laid_out(
    path: Path, shapes: dict[str, Shape], rows: Rows, paddings: Sequence[int] = (), aligned: int = 1
) -> dict[str, Slice]:
    """Return tensors that lie one after the other in rows of flat tensors: each row has an equal share of all.

    ``paddings`` are the elements after each tensor; a row's end is padded to a multiple of ``aligned``.
    """
    flats = [one for row in rows for one in row]
    for one in flats:
        if len(one.shape) != 1 or not one.contiguous or one.dtype_name != flats[0].dtype_name:
            raise _refused(
                one.file, f"{shown(one.name)} is not flat, or has another dtype than the others"
            )
    stored, at = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
        if not is_sizes((padding,)):
            raise ValueError
        size = prod(shape)
        count, done = -(-size // len(rows)), 0
        parts: list[Slice] = []
        for number, row in enumerate(rows):
            begin, last = 0, at + max(0, min(count, size - number * count))
            for flat in row:
                first, end = max(at, begin), begin + flat.shape[0]
                offset = flat.offset + (first - begin) * ITEM_BYTES[flat.dtype_name]
                for start, block in boxes(shape, done, done + min(last, end) - first):
                    parts.append(replace(_block(flat, name, block, offset), start=start))
                    offset += parts[-1].nbytes
                done, begin = done + max(0, min(last, end) - first), end
        at += count + padding
        if done != size or not flats:
            what = f"the partitions have {done:,} of the {size:,} elements of {shown(name)}"
            raise _refused(path.parent, what)
        whole = parts[0] if parts else _block(flats[0], name, shape, flats[0].offset)
        stored[name] = replace(whole, shape=shape, stride=row_major(shape), start=())
        if len(parts) > 1:
            stored[name].parts = tuple(parts)
    for row in rows:
        numel = sum(one.shape[0] for one in row)
        if -(-at // aligned) != -(-numel // aligned):
            what = f"the partitions have {numel:,} elements, but the shapes in {path.name} need"
            raise _refused(path.parent, f"{what} {at:,}")
    return stored


def boxes(shape: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the largest contiguous blocks, as (start, shape), of the elements ``first`` to ``last - 1``, in order."""
    steps = [prod(shape[n + 1 :]) for n in range(len(shape))]
    while first < last:
        start = tuple(first // step % size for step, size in zip(steps, shape, strict=True))
        size, length = shape, 1
        for n, step in enumerate(steps):
            if first % step == 0 and step <= last - first:
                count = min((last - first) // step, shape[n] - start[n])
                size, length = (*[1] * n, count, *shape[n + 1 :]), count * step
                break
        yield start, size
        first += length


def _block(flat: Slice, name: str, shape: Shape, offset: int) -> Slice:
    """Return a contiguous block whose storage is the block alone, not the flat tensor around it."""
    size = prod(shape) * ITEM_BYTES[flat.dtype_name]
    return Slice(name, shape, row_major(shape), flat.dtype_name, flat.file, offset, offset, size)


def _by_rank(path: Path, pattern: str, ranks: int | None = None) -> list[Path]:
    """Return the files of exactly these ranks in their order; without ``ranks``, of rank 0 and any others."""
    found = sorted((int(of["rank"] or 0), name) for name, of in _matching(path, pattern).items())
    numbers = [rank for rank, _ in found]
    some = found[0][1] if found else "mp_rank_00_model_states.pt"
    if ranks is not None and not (is_sizes((ranks,)) and ranks):
        raise _refused(path / some, "names an impossible number of ranks")
    needed = range(min(ranks or 1, 1000 + len(found)))  # a crafted number may be endless
    if absent := [rank for rank in needed if rank not in numbers]:
        missing = few([re.sub(_RANK, rf"\g<of>{rank}_", some) for rank in absent])
        repair = "copy them here; in a training on several machines, each may have kept its own ranks' files"
        raise _refused(path, f"the files of some ranks are missing: {missing}", repair)
    odd = [name for rank, name in found if numbers.count(rank) > 1 or rank >= (ranks or rank + 1)]
    if odd:
        what = f"two runs wrote their files into this folder: {few(odd)}"
        raise _refused(path, what, "move the files of one run into a folder of their own")
    return [path / name for _, name in found]


def _matching(path: Path, pattern: str) -> dict[str, re.Match[str]]:
    """Return the sorted names in a folder that match, with their matches."""
    names = sorted(entry.name for entry in path.iterdir())
    return {name: match for name in names if (match := re.fullmatch(pattern, name))}


def _without_values(folder: Path, name: str) -> CheckpointError:
    repair = (
        f"{_COPY}; if the optimizer does not train this weight, save the whole model from"
        " the training code: engine.save_16bit_model(FOLDER)"
    )
    return _refused(folder, f"no file has values for the weight {shown(name)}", repair)


def _refused(path: Path, what: str, repair: str = _COPY) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", repair)
