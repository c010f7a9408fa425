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

Each file of optimizer states has one flat tensor for each group of parameters. Under ZeRO 1 and 2,
a group's flat tensors, joined over all ranks, are the group's parameters one after the other. Under
ZeRO 3, each rank has a share of every parameter, and padding makes the shares equally long. weighin
reads the same values as DeepSpeed's own ``zero_to_fp32.py``: trained weights in float32, buffers
and frozen weights in the stored dtype. weighin does not read the moments of the optimizer.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats import deepspeed_states, pt
from weighin.formats.base import Slices, TensorSlice
from weighin.formats.deepspeed_states import ModelStates, experts_divided, missing, of_rank
from weighin.formats.flat_pieces import COPY, Flat, incomplete, joined
from weighin.formats.tensor_refs import TensorRef

NAME = "deepspeed"
SUFFIX = ""

_OPTIMIZER: Final = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_PIPELINE: Final = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_EXPERT: Final = re.compile(
    r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_.*\.pt"
)
_FIRST_MODEL: Final = "mp_rank_00_model_states.pt"
_MOST_LISTED: Final = 1000


def matches(path: Path) -> bool:
    return any(
        pattern.fullmatch(name)
        for name in _names(path)
        for pattern in (_OPTIMIZER, _MODEL, _PIPELINE)
    )


def files(path: Path) -> list[Path]:
    names = [name for name in _names(path) if _OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name)]
    return [path / name for name in sorted(names)]


def read(path: Path) -> Slices:
    """Return the model's tensors with their files and offsets: under ZeRO, trained weights in
    float32; all other tensors as stored.

    Raises:
        CheckpointError: a rank's file is missing, a file is damaged or has another number of
            elements than the shapes need, or the training used other parallelism than ZeRO.
    """
    _check_parallelism(path)
    by_rank = _by_rank(path, _MODEL)
    if 0 not in by_rank:
        raise missing(path, [of_rank(by_rank[min(by_rank)].name, 0) if by_rank else _FIRST_MODEL])
    states = deepspeed_states.read(by_rank[0])
    if states.shapes is None:
        return states.state_dict({})
    partitions = _partitions(path)
    if len({one.stage for one in partitions}) != 1:
        raise incomplete(path, "the ranks saved with different stages of ZeRO")
    states = replace(states, ranks=len(partitions))
    divided = _of_stage_3 if partitions[0].stage == 3 else _of_stages_1_and_2
    return states.state_dict(divided(states, partitions) | deepspeed_states.frozen(states))


@dataclass(frozen=True, slots=True)
class _Partition:
    """One rank's share of the float32 weights: a flat tensor for each group of parameters.

    ``paddings[GROUP]`` lists the number of padding elements after each parameter of the group.
    """

    file: Path
    stage: int
    ranks: int
    groups: tuple[TensorSlice, ...]
    paddings: Any


def _of_stage_3(states: ModelStates, partitions: Sequence[_Partition]) -> dict[str, TensorSlice]:
    assert states.shapes is not None
    flats = [Flat(one.file, one.groups) for one in partitions]
    stored, at = {}, 0
    for name, shape in ((name, shape) for group in states.shapes for name, shape in group.items()):
        size = prod(shape)
        share = -(-size // len(flats))
        ranges = [
            piece
            for rank, flat in enumerate(flats)
            for piece in flat.ranges(at, max(0, min(share, size - rank * share)))
        ]
        stored[name] = joined(name, shape, ranges)
        at += share
    for flat, one in zip(flats, partitions, strict=True):
        if flat.numel != at:
            raise incomplete(
                one.file,
                f"has {flat.numel:,} elements of weights, but the tensor shapes in"
                f" {states.file.name} need {at:,} for each of {len(flats)} ranks",
            )
    return stored


def _of_stages_1_and_2(
    states: ModelStates, partitions: Sequence[_Partition]
) -> dict[str, TensorSlice]:
    assert states.shapes is not None
    path, stored = states.file.parent, {}
    aligned = 2 * len(partitions)  # DeepSpeed pads a group to a multiple of this number
    if any(len(one.groups) != len(states.shapes) for one in partitions):
        raise incomplete(
            path,
            f"{states.file.name} has {len(states.shapes)} groups of parameters, but the partitions"
            f" have {len(partitions[0].groups)}",
        )
    for number, shapes in enumerate(states.shapes):
        flat = Flat(path, [one.groups[number] for one in partitions])
        paddings = _paddings(partitions[0], number, len(shapes))
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            stored[name] = joined(name, shape, flat.ranges(at, prod(shape)))
            at += prod(shape) + padding
        if -(-at // aligned) != -(-flat.numel // aligned):
            raise incomplete(
                path,
                f"the partitions of group {number} have {flat.numel:,} elements, but the shapes in"
                f" {states.file.name} need {at:,}",
            )
    return stored


def _paddings(partition: _Partition, group: int, count: int) -> list[int]:
    if partition.paddings is None:  # DeepSpeed before 0.19 wrote no paddings
        return [0] * count
    paddings = partition.paddings[group] if group < len(partition.paddings) else None
    if (
        isinstance(paddings, list)
        and len(paddings) == count
        and all(type(one) is int and one >= 0 for one in paddings)
    ):
        return paddings
    raise incomplete(partition.file, f"the paddings of group {group} are impossible")


def _partitions(path: Path) -> list[_Partition]:
    by_rank = _by_rank(path, _OPTIMIZER)
    if not by_rank:
        raise CheckpointError(
            f"{path}: the folder has no files *_optim_states.pt, where DeepSpeed's ZeRO keeps the"
            " float32 weights",
            f"{COPY}; or, only under ZeRO 1 and 2, give the file with the weights in the module's"
            f" own dtype: {path / 'mp_rank_00_model_states.pt'} --key module",
        )
    first, file = min(by_rank.items())
    partition = _partition(file)
    absent = (of_rank(file.name, rank) for rank in range(partition.ranks) if rank not in by_rank)
    if names := list(islice(absent, _MOST_LISTED)):
        raise missing(path, names)
    if len(by_rank) > partition.ranks:
        beyond = by_rank[max(by_rank)].name
        raise CheckpointError(
            f"{path}: {file.name} was written by {partition.ranks} ranks, so the file {beyond}"
            " comes from another run",
            "find out which files the last run wrote, and remove the files of the other run",
        )
    others = (_partition(by_rank[rank]) for rank in range(partition.ranks) if rank != first)
    return sorted([partition, *others], key=lambda one: _rank(_OPTIMIZER.fullmatch(one.file.name)))


def _by_rank(path: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return the file of each rank; raise CheckpointError if a rank has two files."""
    by_rank: dict[int, Path] = {}
    for name, match in _matching(path, pattern):
        if other := by_rank.get(_rank(match)):
            raise CheckpointError(
                f"{path}: {other.name} and {name} are both of rank {_rank(match)}: two runs wrote"
                " their files into this folder",
                "move the files of one run into a folder of their own",
            )
        by_rank[_rank(match)] = path / name
    return by_rank


def _partition(file: Path) -> _Partition:
    value, place = pt.read_value(file)
    state = value.get("optimizer_state_dict") if isinstance(value, dict) else None
    if not isinstance(state, dict):
        raise incomplete(file, "holds no optimizer states of DeepSpeed")
    if state.get("ds_zero_partition_groups"):
        raise experts_divided(file.parent, f"{file.name} has separate parameter groups for experts")
    by_key = {"fp32_flat_groups": 3, "single_partition_of_fp32_groups": 2}
    key = next((key for key in by_key if key in state), "")
    groups, count = state.get(key), state.get("partition_count")
    if isinstance(groups, TensorRef):
        groups = [groups]
    if isinstance(count, list) and count and all(type(one) is int for one in count):
        count = max(count)  # a list has a number for each group of parameters
    if not (isinstance(groups, list) and all(isinstance(one, TensorRef) for one in groups)):
        raise incomplete(file, "holds no float32 weights of ZeRO")
    if not (type(count) is int and count > 0):
        raise incomplete(file, "does not say how many ranks wrote the checkpoint")
    paddings = state.get("param_alignment_paddings")
    return _Partition(
        file,
        by_key[key],
        count,
        tuple(place(f"{key}.{number}", one) for number, one in enumerate(groups)),
        paddings if isinstance(paddings, list) else None,
    )


def _check_parallelism(path: Path) -> None:
    """Raise CheckpointError if the training used pipeline, expert or tensor parallelism.

    The files do not say how such a training divided the tensors among the ranks.
    """
    universal = (
        "make a universal checkpoint, which weighin reads: python -m deepspeed.checkpoint.ds_to_universal"
        f" --input_folder {path} --output_folder {path}_universal"
    )
    names = _names(path)
    if layer := next((name for name in names if _PIPELINE.fullmatch(name)), None):
        raise CheckpointError(
            f"{path}: the layers are divided among ranks (pipeline parallelism): {layer}", universal
        )
    if expert := next((name for name in names if _EXPERT.fullmatch(name)), None):
        raise experts_divided(path, expert)
    for pattern in (_MODEL, _OPTIMIZER):
        for name, match in _matching(path, pattern):
            if int(match[2]):
                raise CheckpointError(
                    f"{path}: the tensors are divided among ranks (tensor parallelism), and the files do"
                    f" not say along which dimension: {name}",
                    universal,
                )


def _matching(path: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    for name in _names(path):
        if match := pattern.fullmatch(name):
            yield name, match


def _rank(match: re.Match[str] | None) -> int:
    return int((match and match[1]) or 0)


def _names(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []
