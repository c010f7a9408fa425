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
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.stream.slices import ITEM_BYTES, Checkpoint, Slice, is_sizes, row_major
from weighin.stream.torch_files import open_zip
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
_COPY: Final = "copy the whole folder again, from every machine that took part in the training"


def format_of(path: Path) -> str:
    """Return the name of the format of a step's folder; "" for another path."""
    if _universal_weights(path):
        return "deepspeed_universal"
    of_steps = (_OPTIMIZER, _MODEL, _PIPELINE)
    return "deepspeed" if any(_matching(path, pattern) for pattern in of_steps) else ""


def read(path: Path, name: str) -> Checkpoint:
    """Return the model's tensors with their files and offsets.

    Raises:
        CheckpointError: a rank's file or a weight is missing, a file is damaged or has another number
            of elements than the shapes need, or the training used other parallelism than ZeRO.
    """
    if name == "deepspeed_universal":
        found, weights = _read_universal(path), _universal_weights(path).values()
        found.files = (*weights, *(path / each for each in _matching(path, _FIRST_MODEL)))
    else:
        found = _read_step(path)
        files = _matching(path, _OPTIMIZER) | _matching(path, _MODEL)
        found.files = tuple(path / each for each in sorted(files))
    found.format = name
    return found


def _read_step(path: Path) -> Checkpoint:
    _check_parallelism(path)
    by_rank = _by_rank(path, _MODEL)
    if 0 not in by_rank:
        some = by_rank[min(by_rank)].name if by_rank else "mp_rank_00_model_states.pt"
        raise _missing(path, [_of_rank(some, 0)])
    states = _ModelStates(by_rank[0])
    if states.groups is None:
        return states.checkpoint({})
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
    shares = [first, *(_Share(by_rank[rank]) for rank in ranks[1:])]
    if len({(one.is_stage_3, len(one.flats)) for one in shares}) != 1:
        raise _incomplete(path, "the ranks saved with different stages or groups of ZeRO")
    trained = _joined_shares(states.file, states.groups, shares)
    return states.checkpoint(trained | states.frozen(len(shares)))


def _read_universal(path: Path) -> Checkpoint:
    states = [_ModelStates(path / name) for name in _matching(path, _FIRST_MODEL)]
    shapes: dict[str, Shape] = {}
    for group in (group for one in states for group in one.groups or ()):
        shapes |= group
    weights = _universal_weights(path)
    is_whole = len(states) == 1  # each of several files has a part of the module
    if absent := next((name for name in shapes if name not in weights), None):
        module = states[0].module
        if not (is_whole and absent in module and module[absent].nbytes):
            raise _incomplete(path / "zero", f"{shown(absent)} is missing")
    stored = {}
    for name in dict.fromkeys([*(name for name in shapes if name in weights), *weights]):
        pickled = open_zip(weights[name])
        value = pickled.value
        tensor = value.get("param") if isinstance(value, dict) else value
        if not isinstance(tensor, Slice):
            raise _incomplete(weights[name], "holds no weight")
        stored[name] = where = pickled.slice(name, tensor)
        if not isinstance(value, dict):  # ZeRO 3 wrote the weight without its shape
            shape, count = shapes.get(name), prod(where.shape)
            if shape is None or prod(shape) != count:
                what = f"a flat tensor of {count:,} elements"
                raise _incomplete(
                    weights[name], f"{what}, whose shape is in no *_model_states.pt of {path}"
                )
            stored[name] = joined(name, shape, elements(weights[name], [where], 0, count))
    if not states:
        return Checkpoint(stored.values())
    return states[0].checkpoint(stored | states[0].frozen(states[0].ranks), fallback=is_whole)


@contextmanager
def _reading(file: Path, what: str) -> Iterator[None]:
    """Raise CheckpointError if a file holds other values than DeepSpeed writes."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _incomplete(file, f"holds no {what}") from None


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
        with _reading(file, "model states of DeepSpeed"):
            pickled = open_zip(file)
            value = pickled.value
            if any(isinstance(value.get(f"{of}autoep_layers"), list) for of in ("ds_", "")):
                raise _experts_divided(file.parent, f"{file.name} has AutoEP layers")
            is_here = value["module"] is not None
            self._state = pickled.checkpoint("module") if is_here else Checkpoint()
            self.module = {one.name: one for one in self._state}
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

    def frozen(self, ranks: int) -> dict[str, Slice]:
        """Return the parameters that are not trained; under ZeRO-3, each rank has a share of each."""
        if not self._frozen or not _OF_RANK.match(self.file.name):
            return {n: self._fragments[n] for n in self._frozen if n in self._fragments}
        # The number of ranks is the file's word: no more are named than may be there.
        most = 1000 + sum(1 for _ in self.file.parent.iterdir())
        names = (_of_rank(self.file.name, rank) for rank in range(1, min(ranks, most)))
        others = [self.file.with_name(name) for name in names]
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

    def checkpoint(self, stored: Mapping[str, Slice], *, fallback: bool = True) -> Checkpoint:
        """Return all tensors of the model in the order of the state dict.

        ``stored`` has the tensors whose values are in other files. All remaining tensors are
        those of this file of model states; with ``fallback=False``, only buffers may come from it.
        """
        found = Checkpoint()
        found.metadata, found.values = self._state.metadata, self._state.values
        aliases = (name for name, source in self._shared.items() if source in stored)
        for name in dict.fromkeys([*self.module, *stored, *aliases]):
            where = stored.get(self._shared.get(name, name)) or stored.get(name)
            is_buffer = name in self._buffers and name in self.module
            if where and not is_buffer:
                found.append(replace(where, name=name))
            elif is_buffer or (fallback and self.module[name].nbytes):
                found.append(self.module[name])
            else:
                raise CheckpointError(
                    f"{self.file.parent}: no file has the values of {shown(name)}, which the"
                    " optimizer does not train",
                    "save the whole model from the training code: engine.save_16bit_model(FOLDER)",
                )
        return found


class _Share:
    """One rank's share of the float32 weights: a flat tensor for each group of parameters."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with _reading(file, "optimizer states of DeepSpeed's ZeRO"):
            pickled = open_zip(file)
            state = pickled.value["optimizer_state_dict"]
            if state.get("ds_zero_partition_groups"):
                why = f"{file.name} has separate parameter groups for experts"
                raise _experts_divided(file.parent, why)
            self.is_stage_3 = "fp32_flat_groups" in state
            key = "fp32_flat_groups" if self.is_stage_3 else "single_partition_of_fp32_groups"
            flats = [state[key]] if isinstance(state[key], Slice) else state[key]
            self.flats = [pickled.slice(f"{key}.{n}", flat) for n, flat in enumerate(flats)]
            count = state["partition_count"]  # a list has a number for each group of parameters
            self.ranks = max(count) if isinstance(count, list) else count
            paddings = state.get("param_alignment_paddings")  # since DeepSpeed 0.19
            self.paddings = paddings if isinstance(paddings, list) and not self.is_stage_3 else None
            if type(self.ranks) is not int or self.ranks < 1:
                raise ValueError


def _joined_shares(
    states: Path, groups: Sequence[Mapping[str, Shape]], shares: Sequence[_Share]
) -> dict[str, Slice]:
    """Return the trained weights."""
    if is_stage_3 := shares[0].is_stage_3:
        groups = [{name: shape for group in groups for name, shape in group.items()}]
    elif len(shares[0].flats) != len(groups):
        what = f"{states.name} has {len(groups)} groups of parameters, but the partitions have"
        raise _incomplete(states.parent, f"{what} {len(shares[0].flats)}")
    stored = {}
    # Under ZeRO 1 and 2, DeepSpeed pads a group to a multiple of a number that is even.
    aligned = 1 if is_stage_3 else 2 * len(shares)
    for number, shapes in enumerate(groups):
        rows = [one.flats for one in shares]  # of each of which every parameter has a part
        if not is_stage_3:
            rows = [[one.flats[number] for one in shares]]
        paddings: Any = [0] * len(shapes)
        if shares[0].paddings is not None:
            paddings = shares[0].paddings[number] if number < len(shares[0].paddings) else None
            if not is_sizes(paddings) or len(paddings) != len(shapes):
                what = f"the paddings of group {number} are impossible"
                raise _incomplete(shares[0].file, what)
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            size = prod(shape)
            count = -(-size // len(rows))
            pieces: list[Slice] = []
            for n, row in enumerate(rows):
                pieces += elements(states, row, at, max(0, min(count, size - n * count)))
            stored[name] = joined(name, shape, pieces)
            at += count + padding
        for row in rows:
            numel = sum(prod(one.shape) for one in row)
            if -(-at // aligned) != -(-numel // aligned):
                what = (
                    f"the partitions of group {number} have {numel:,} elements, but the shapes in"
                )
                raise _incomplete(states.parent, f"{what} {states.name} need {at:,}")
    return stored


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
    """Raise CheckpointError for parallelism of which the files do not say how it divided the tensors."""
    if expert := next(iter(_matching(path, _EXPERT)), None):
        raise _experts_divided(path, expert)
    ranks = _matching(path, _MODEL) | _matching(path, _OPTIMIZER)
    if name := next(iter(_matching(path, _PIPELINE)), ""):
        what = "layers are divided among ranks (pipeline parallelism)"
    elif name := next((name for name, match in ranks.items() if int(match[2])), ""):
        what = (
            "tensors are divided among ranks (tensor parallelism), and the files do not say along"
        )
        what += " which dimension"
    else:
        return
    raise CheckpointError(
        f"{path}: the {what}: {name}",
        "make a universal checkpoint, which weighin reads: python -m deepspeed.checkpoint.ds_to_universal"
        f" --input_folder {path} --output_folder {path}_universal",
    )


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


def elements(path: Path, flats: Sequence[Slice], first: int, count: int) -> list[Slice]:
    """Return where ``count`` elements from the index ``first`` on lie in flat tensors, one after the
    other.
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


def joined(name: str, shape: Shape, ranges: Sequence[Slice]) -> Slice:
    """Return the tensor of the given shape that has the elements of ``ranges``, in order."""
    if len({where.dtype_name for where in ranges}) != 1:
        raise _incomplete(ranges[0].file, f"the partitions of {shown(name)} have different dtypes")
    parts: list[Slice] = []
    at = 0
    for where in ranges:
        place = where.offset
        for start, size in boxes(shape, at, at + where.shape[0]):
            parts.append(replace(_block(where, name, size, place), start=start))
            place += parts[-1].nbytes
        at += where.shape[0]
    whole = _block(parts[0] if parts else ranges[0], name, shape, (parts or ranges)[0].offset)
    if len(parts) < 2:
        return whole
    return replace(whole, storage_bytes=parts[0].storage_bytes, parts=tuple(parts))


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


def _block(where: Slice, name: str, shape: Shape, offset: int) -> Slice:
    """Return a contiguous block whose storage is the block alone, not the flat tensor around it."""
    size = prod(shape) * ITEM_BYTES[where.dtype_name]
    return Slice(name, shape, row_major(shape), where.dtype_name, where.file, offset, offset, size)
