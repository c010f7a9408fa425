"""Read the folder that DeepSpeed wrote at a training step: with ZeRO stage 1, 2 or 3, or no ZeRO.

::

    global_step10/
        mp_rank_00_model_states.pt                   ZeRO 1 and 2: the module in its own dtype
        zero_pp_rank_0_mp_rank_00_optim_states.pt    rank 0's share of the float32 weights
        zero_pp_rank_1_mp_rank_00_optim_states.pt
    global_step20/
        zero_pp_rank_0_mp_rank_00_model_states.pt    ZeRO 3: parameters are empty in these files
        zero_pp_rank_0_mp_rank_00_optim_states.pt
        ...
    global_step30_universal/                         as ds_to_universal.py writes it
        zero/layers.0.weight/fp32.pt                 the whole weight; other files are not read
        mp_rank_00_model_states.pt                   names, buffers and tied weights

Each file of optimizer states has one flat tensor for each group of parameters. Under ZeRO 1 and 2,
a group's flat tensors, joined over all ranks, are the group's parameters one after the other. Under
ZeRO 3, each rank has a share of every parameter, and padding makes the shares equally long. weighin
reads the same values as DeepSpeed's own ``zero_to_fp32.py``: trained weights in float32, buffers
and frozen weights in the stored dtype. weighin does not read the moments of the optimizer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats.base import Part, Slices, TensorSlice, row_major
from weighin.formats.dtypes import ITEM_BYTES, is_sizes
from weighin.stream.pickles import Tensor
from weighin.stream.state_dicts import state_dict
from weighin.stream.torch_files import TorchFile, open_zip
from weighin.text import few, shown

Shape = tuple[int, ...]

_OPTIMIZER: Final = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_FIRST_MODEL: Final = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_(\d+)_model_states\.pt")
_PIPELINE: Final = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_EXPERT: Final = re.compile(
    r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_.*\.pt"
)
_OF_RANK: Final = re.compile(r"((?:[a-z0-9]+_)?zero_pp_rank_)\d+_")
_OTHER_VALUES: Final = (AttributeError, KeyError, TypeError, ValueError)
"""What reading a value of another kind than DeepSpeed writes raises."""

_COPY: Final = "copy the whole folder again, from every machine that took part in the training"


class _Zero:
    NAME = "deepspeed"
    SUFFIX = ""

    def matches(self, path: Path) -> bool:
        return any(_matching(path, pattern) for pattern in (_OPTIMIZER, _MODEL, _PIPELINE))

    def files(self, path: Path) -> list[Path]:
        return [
            path / name for name in sorted(_matching(path, _OPTIMIZER) | _matching(path, _MODEL))
        ]

    def read(self, path: Path) -> Slices:
        """Return the model's tensors with their files and offsets: under ZeRO, trained weights in
        float32; all other tensors as stored.

        Raises:
            CheckpointError: a rank's file is missing, a file is damaged or has another number of
                elements than the shapes need, or the training used other parallelism than ZeRO.
        """
        _check_parallelism(path)
        by_rank = _by_rank(path, _MODEL)
        if 0 not in by_rank:
            some = by_rank[min(by_rank)].name if by_rank else "mp_rank_00_model_states.pt"
            raise _missing(path, [_of_rank(some, 0)])
        states = _ModelStates(by_rank[0])
        if states.groups is None:
            return states.state_dict({})
        shares = _shares(path)
        if len({(one.is_stage_3, len(one.flats)) for one in shares}) != 1:
            raise _incomplete(path, "the ranks saved with different stages or groups of ZeRO")
        stored = _divided(states, states.groups, shares)
        return states.state_dict(stored | states.frozen(len(shares)))


class _Universal:
    NAME = "deepspeed_universal"
    SUFFIX = ""

    def matches(self, path: Path) -> bool:
        return next(path.glob("zero/*/fp32.pt"), None) is not None

    def files(self, path: Path) -> list[Path]:
        states = sorted(path / name for name in _matching(path, _FIRST_MODEL))
        return [*_universal_weights(path).values(), *states]

    def read(self, path: Path) -> Slices:
        """Return the model's tensors with their files and offsets, in the state dict's order if known.

        Raises:
            CheckpointError: a weight or the shape of a weight is missing, or a file is damaged.
        """
        states = [_ModelStates(path / name) for name in _matching(path, _FIRST_MODEL)]
        shapes: dict[str, Shape] = {}
        for group in (group for one in states for group in one.groups or ()):
            shapes |= group
        weights = _universal_weights(path)
        whole = len(states) == 1  # each of several files has a part of the module
        if absent := next((name for name in shapes if name not in weights), None):
            module = states[0].module
            if not (whole and absent in module and module[absent].nbytes):
                raise _incomplete(path / "zero", f"{shown(absent)} is missing")
        order = dict.fromkeys([*(name for name in shapes if name in weights), *weights])
        stored = {name: _weight(path, name, weights[name], shapes.get(name)) for name in order}
        if not states:
            return Slices(stored.values())
        return states[0].state_dict(stored | states[0].frozen(states[0].ranks), fallback=whole)


ZERO: Final = _Zero()
UNIVERSAL: Final = _Universal()


class _ModelStates:
    """One file ``*_model_states.pt``.

    Attributes:
        module: the tensors of the model's state dict, in the dict's order. A parameter that ZeRO-3
            divides among ranks is empty here.
        groups: for each parameter group of the optimizer, a dict from the names of the trained
            parameters to their shapes, in the order of the stored elements. None if no ZeRO
            optimizer wrote the checkpoint.
        ranks: the number of ranks among which ZeRO divided the parameters; 0 if the file has no number.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        pickled = open_zip(file)
        value = pickled.value
        try:
            if any(
                isinstance(value.get(key), list) for key in ("ds_autoep_layers", "autoep_layers")
            ):
                raise _experts_divided(file.parent, f"{file.name} has AutoEP layers")
            state: Any = ({}, {}, None)
            if value["module"] is not None:
                state = state_dict(file, value, "module")
            tensors, self._values, self._metadata = state
            self.module = {name: pickled.slice(name, each) for name, each in tensors.items()}
            groups = value.get("param_shapes")
            if isinstance(groups, dict):  # DeepSpeed before 0.4 wrote one group
                groups = [groups]
            self.groups = None if groups is None else [_shapes(group) for group in groups]
            self.ranks = ranks if type(ranks := value.get("dp_world_size")) is int else 0
            self._frozen = _shapes(value.get("frozen_param_shapes") or {})
            fragments = (value.get("frozen_param_fragments") or {}).items()
            self._fragments = {name: pickled.slice(name, each) for name, each in fragments}
            buffers, shared = value.get("buffer_names") or (), value.get("shared_params") or {}
            self._buffers = {name for name in buffers if isinstance(name, str)}
            self._shared = {new: old for new, old in shared.items() if isinstance(old, str)}
        except _OTHER_VALUES:
            raise _incomplete(file, "holds no model states of DeepSpeed") from None

    def frozen(self, ranks: int) -> dict[str, TensorSlice]:
        """Return the parameters that are not trained; under ZeRO-3, each rank has a share of each.

        Raises:
            CheckpointError: the file of a rank is missing, or lacks a share.
        """
        if not self._frozen or not _OF_RANK.match(self.file.name):
            return {n: self._fragments[n] for n in self._frozen if n in self._fragments}
        # The number of ranks is the file's word: no more are named than may be there.
        most = 1000 + sum(1 for _ in self.file.parent.iterdir())
        others = [
            self.file.with_name(_of_rank(self.file.name, rank))
            for rank in range(1, min(ranks, most))
        ]
        if absent := [file.name for file in others if not file.is_file()]:
            raise _missing(self.file.parent, absent)
        every = [self, *map(_ModelStates, others)]
        stored = {}
        for name, shape in self._frozen.items():
            if lacking := next((one for one in every if name not in one._fragments), None):
                raise _incomplete(lacking.file, f"has no share of {shown(name)}")
            flats = [one._fragments[name] for one in every]
            stored[name] = joined(name, shape, elements(self.file, flats, 0, prod(shape)))
        return stored

    def state_dict(self, stored: Mapping[str, TensorSlice], *, fallback: bool = True) -> Slices:
        """Return all tensors of the model in the order of the state dict.

        ``stored`` has the tensors whose values are in other files. All remaining tensors are
        those of this file of model states; with ``fallback=False``, only buffers may come from it.

        Raises:
            CheckpointError: no file has the values of a parameter.
        """
        slices = Slices()
        slices.metadata, slices.values = self._metadata, self._values
        aliases = (name for name, source in self._shared.items() if source in stored)
        for name in dict.fromkeys([*self.module, *stored, *aliases]):
            where = stored.get(self._shared.get(name, name)) or stored.get(name)
            is_buffer = name in self._buffers and name in self.module
            if where and not is_buffer:
                slices.append(replace(where, name=name))
            elif is_buffer or (fallback and self.module[name].nbytes):
                slices.append(self.module[name])
            else:
                raise CheckpointError(
                    f"{self.file.parent}: no file has the values of {shown(name)}, which the"
                    " optimizer does not train",
                    "save the whole model from the training code: engine.save_16bit_model(FOLDER)",
                )
        return slices


class _Share:
    """One rank's share of the float32 weights: a flat tensor for each group of parameters."""

    def __init__(self, file: Path) -> None:
        self.file = file
        pickled = open_zip(file)
        try:
            state = pickled.value["optimizer_state_dict"]
            if state.get("ds_zero_partition_groups"):
                why = f"{file.name} has separate parameter groups for experts"
                raise _experts_divided(file.parent, why)
            self.is_stage_3 = "fp32_flat_groups" in state
            key = "fp32_flat_groups" if self.is_stage_3 else "single_partition_of_fp32_groups"
            flats = [state[key]] if isinstance(state[key], Tensor) else state[key]
            self.flats = [pickled.slice(f"{key}.{n}", flat) for n, flat in enumerate(flats)]
            count = state["partition_count"]  # a list has a number for each group of parameters
            self.ranks = max(count) if isinstance(count, list) else count
            self._paddings = state.get("param_alignment_paddings")  # since DeepSpeed 0.19
            if type(self.ranks) is not int or self.ranks < 1:
                raise ValueError
        except _OTHER_VALUES:
            raise _incomplete(file, "holds no optimizer states of DeepSpeed's ZeRO") from None

    def paddings(self, group: int, count: int) -> list[int]:
        """Return the number of padding elements after each of the ``count`` parameters of a group."""
        if not isinstance(self._paddings, list) or self.is_stage_3:
            return [0] * count
        paddings: Any = self._paddings[group] if group < len(self._paddings) else None
        is_right = isinstance(paddings, list) and len(paddings) == count
        if is_right and all(type(one) is int and one >= 0 for one in paddings):
            return list(paddings)
        raise _incomplete(self.file, f"the paddings of group {group} are impossible")


def _divided(
    states: _ModelStates, groups: Sequence[Mapping[str, Shape]], shares: Sequence[_Share]
) -> dict[str, TensorSlice]:
    """Return the trained weights.

    Raises:
        CheckpointError: the shares have another number of elements than the shapes need.
    """
    if is_stage_3 := shares[0].is_stage_3:
        groups = [{name: shape for group in groups for name, shape in group.items()}]
    elif len(shares[0].flats) != len(groups):
        what = f"{states.file.name} has {len(groups)} groups of parameters, but the partitions have"
        raise _incomplete(states.file.parent, f"{what} {len(shares[0].flats)}")
    stored = {}
    # Under ZeRO 1 and 2, DeepSpeed pads a group to a multiple of a number that is even.
    aligned = 1 if is_stage_3 else 2 * len(shares)
    for number, shapes in enumerate(groups):
        paddings = shares[0].paddings(number, len(shapes))
        rows = [one.flats for one in shares]  # of each of which every parameter has a part
        if not is_stage_3:
            rows = [[one.flats[number] for one in shares]]
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            size = prod(shape)
            count = -(-size // len(rows))
            counts = [max(0, min(count, size - n * count)) for n in range(len(rows))]
            pieces = [
                elements(states.file, row, at, n) for row, n in zip(rows, counts, strict=True)
            ]
            stored[name] = joined(name, shape, [piece for each in pieces for piece in each])
            at += count + padding
        for row in rows:
            if -(-at // aligned) != -(-(numel := sum(prod(one.shape) for one in row)) // aligned):
                raise _incomplete(
                    states.file.parent,
                    f"the partitions of group {number} have {numel:,} elements, but the shapes in"
                    f" {states.file.name} need {at:,}",
                )
    return stored


def _shares(path: Path) -> list[_Share]:
    """Return the shares of all ranks, in order; raise CheckpointError if one is missing."""
    by_rank = _by_rank(path, _OPTIMIZER)
    if not by_rank:
        raise CheckpointError(
            f"{path}: the folder has no files *_optim_states.pt, where DeepSpeed's ZeRO keeps the"
            " float32 weights",
            f"{_COPY}; or, only under ZeRO 1 and 2, give the file with the weights in the module's"
            f" own dtype: {path / 'mp_rank_00_model_states.pt'} --key module",
        )
    first = _Share(by_rank[min(by_rank)])
    ranks = range(min(first.ranks, 1000 + len(by_rank)))  # the file may lie about the number
    if absent := [_of_rank(first.file.name, rank) for rank in ranks if rank not in by_rank]:
        raise _missing(path, absent)
    if len(by_rank) > first.ranks:
        beyond = by_rank[max(by_rank)].name
        raise CheckpointError(
            f"{path}: {first.file.name} was written by {first.ranks} ranks, so the file {beyond}"
            " comes from another run",
            "find out which files the last run wrote, and remove the files of the other run",
        )
    return [first, *(_Share(by_rank[rank]) for rank in ranks[1:])]


def _by_rank(path: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return the file of each rank; raise CheckpointError if a rank has two files."""
    by_rank: dict[int, Path] = {}
    for name, match in _matching(path, pattern).items():
        rank = int(match[1] or 0)
        if rank in by_rank:
            raise CheckpointError(
                f"{path}: {by_rank[rank].name} and {name} are both of rank {rank}: two runs wrote"
                " their files into this folder",
                "move the files of one run into a folder of their own",
            )
        by_rank[rank] = path / name
    return by_rank


def _check_parallelism(path: Path) -> None:
    """Raise CheckpointError if the training used pipeline, expert or tensor parallelism.

    The files do not say how such a training divided the tensors among the ranks.
    """
    if expert := next(iter(_matching(path, _EXPERT)), None):
        raise _experts_divided(path, expert)
    ranks = _matching(path, _MODEL) | _matching(path, _OPTIMIZER)
    name, what = next(iter(_matching(path, _PIPELINE)), ""), "layers are"
    kind, more = "pipeline", ""
    if not name:
        name = next((name for name, match in ranks.items() if int(match[2])), "")
        what, kind = "tensors are", "tensor"
        more = ", and the files do not say along which dimension"
    if name:
        raise CheckpointError(
            f"{path}: the {what} divided among ranks ({kind} parallelism){more}: {name}",
            "make a universal checkpoint, which weighin reads: python -m deepspeed.checkpoint.ds_to_universal"
            f" --input_folder {path} --output_folder {path}_universal",
        )


def _weight(path: Path, name: str, file: Path, shape: Shape | None) -> TensorSlice:
    """Return a weight of a universal checkpoint; of ZeRO 3 it is flat, and ``shape`` is its shape."""
    pickled: TorchFile = open_zip(file)
    value = pickled.value
    tensor = value.get("param") if isinstance(value, dict) else value
    if not isinstance(tensor, Tensor):
        raise _incomplete(file, "holds no weight")
    where = pickled.slice(name, tensor)
    if isinstance(value, dict):
        return where
    if shape is None or prod(shape) != prod(where.shape):
        what = f"a flat tensor of {prod(where.shape):,} elements"
        raise _incomplete(file, f"{what}, whose shape is in no *_model_states.pt of {path}")
    return joined(name, shape, elements(file, [where], 0, prod(shape)))


def _universal_weights(path: Path) -> dict[str, Path]:
    """Return the file of each weight by the weight's name, sorted with 2 before 10 in names."""

    def natural(name: str) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", name)
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    names = [file.parent.name for file in path.glob("zero/*/fp32.pt")]
    return {name: path / "zero" / name / "fp32.pt" for name in sorted(names, key=natural)}


def _matching(path: Path, pattern: re.Pattern[str]) -> dict[str, re.Match[str]]:
    """Return the sorted names in a folder that match, with their matches; {} for no folder."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError:
        return {}
    return {name: match for name in names if (match := pattern.fullmatch(name))}


def _of_rank(name: str, rank: int) -> str:
    """Return the file name ``name`` with the rank ``rank`` in place of the file's own rank."""
    return _OF_RANK.sub(rf"\g<1>{rank}_", name)


def _missing(folder: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{folder}: files of some ranks are missing: {few(names)}",
        "copy them here: each machine of a training may have kept the files of its own ranks",
    )


def _experts_divided(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: the experts are divided among ranks (expert parallelism): {why}",
        "load it with DeepSpeed on as many ranks, and save the experts of all ranks in one state dict",
    )


def _incomplete(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", _COPY)


def _shapes(value: Any) -> dict[str, Shape]:
    if not all(isinstance(name, str) and is_sizes(shape) for name, shape in value.items()):
        raise ValueError
    return {name: tuple(shape) for name, shape in value.items()}


def elements(path: Path, flats: Sequence[TensorSlice], first: int, count: int) -> list[TensorSlice]:
    """Return where ``count`` elements from the index ``first`` on lie in flat tensors, which follow
    one another.

    Raises:
        CheckpointError: the tensors have fewer elements, or they are not flat.
    """
    ranges, at = [], 0
    for one in flats:
        if len(one.shape) != 1 or not one.contiguous:
            raise _incomplete(one.file, f"{shown(one.name)} is no flat tensor")
        begin, end = max(first, at), min(first + count, at + one.shape[0])
        if begin < end:
            offset = one.offset + (begin - at) * ITEM_BYTES[one.dtype_name]
            ranges.append(_block(one, one.name, (end - begin,), offset))
        at += one.shape[0]
    if first + count > at or not flats:
        what = f"elements {first:,} to {first + count:,} of a partition are needed, but it has"
        raise _incomplete(path, f"{what} {at:,}")
    return ranges or [_block(flats[0], "", (0,), flats[0].offset)]


def joined(name: str, shape: Shape, ranges: Sequence[TensorSlice]) -> TensorSlice:
    """Return the tensor of the given shape that has the elements of ``ranges``, in order."""
    if len({where.dtype_name for where in ranges}) != 1:
        raise _incomplete(ranges[0].file, f"the partitions of {shown(name)} have different dtypes")
    parts: list[Part] = []
    at = 0
    for where in ranges:
        place = where.offset
        for start, size in boxes(shape, at, at + where.shape[0]):
            block = _block(where, name, size, place)
            parts.append(Part(start, block))
            place += block.nbytes
        at += where.shape[0]
    if len(parts) > 1:
        return replace(parts[0].where, shape=shape, stride=row_major(shape), parts=tuple(parts))
    first = parts[0].where if parts else ranges[0]
    return _block(first, name, shape, first.offset)


def boxes(shape: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield blocks, as (start, shape), that cover a tensor's elements ``first`` to ``last - 1``.

    The blocks are in row-major order, and each is contiguous. The first blocks cover an incomplete first
    row, one block the whole rows, and the last blocks an incomplete last row.
    """
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    (begin, head), (end, tail) = divmod(first, row), divmod(last, row)
    if head:
        for start, size in boxes(shape[1:], head, row if begin < end else tail):
            yield (begin, *start), (1, *size)
        begin += 1
    if begin < end:
        yield (begin, *[0] * len(shape[1:])), (end - begin, *shape[1:])
    if tail and begin <= end:
        for start, size in boxes(shape[1:], 0, tail):
            yield (end, *start), (1, *size)


def _block(where: TensorSlice, name: str, shape: Shape, offset: int) -> TensorSlice:
    """Return a contiguous block whose storage is the block alone, not the flat tensor around it."""
    size = prod(shape) * ITEM_BYTES[where.dtype_name]
    return TensorSlice(
        name, shape, row_major(shape), where.dtype_name, where.file, offset, offset, size
    )
