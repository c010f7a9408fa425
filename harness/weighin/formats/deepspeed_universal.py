"""Read a universal checkpoint of DeepSpeed, as ``ds_to_universal.py`` writes it.

::

    global_step10_universal/
        zero/layers.0.weight/fp32.pt         the whole weight; exp_avg.pt and others are not read
        mp_rank_00_model_states.pt           names, buffers and tied weights

For a checkpoint that ZeRO 3 wrote, ``fp32.pt`` is a flat tensor; the other file has its shape.
"""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Final

from weighin.formats import deepspeed_states, pt
from weighin.formats.base import Slices, TensorSlice
from weighin.formats.flat_pieces import Flat, Shape, incomplete, joined
from weighin.formats.tensor_refs import TensorRef, type_name
from weighin.formats.unknown_file import shown

NAME = "deepspeed_universal"
SUFFIX = ""

_FOLDER: Final = "zero"
_WEIGHTS: Final = "fp32.pt"
_STATES: Final = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_(\d+)_model_states\.pt")
_NUMBER: Final = re.compile(r"(\d+)")


def matches(path: Path) -> bool:
    return next(path.glob(f"{_FOLDER}/*/{_WEIGHTS}"), None) is not None


def files(path: Path) -> list[Path]:
    return [*(_weights(path).values()), *_states(path)]


def read(path: Path) -> Slices:
    """Return the model's tensors with their files and offsets, in the state dict's order if known.

    Raises:
        CheckpointError: a weight or the shape of a weight is missing, or a file is damaged.
    """
    states = [deepspeed_states.read(file) for file in _states(path)]
    shapes = {
        name: shape for one in states for group in one.shapes or () for name, shape in group.items()
    }
    weights = _weights(path)
    whole = len(states) == 1  # each of several files has a part of the module
    if absent := next((name for name in shapes if name not in weights), None):
        module: Mapping[str, TensorSlice] = states[0].module
        if not (whole and absent in module and module[absent].nbytes):
            raise incomplete(path / _FOLDER, f"{shown(absent)} is missing")
    order = dict.fromkeys([*(name for name in shapes if name in weights), *weights])
    stored = {name: _read(path, name, weights[name], shapes.get(name)) for name in order}
    if states:
        stored |= deepspeed_states.frozen(states[0])
    return states[0].state_dict(stored, fallback=whole) if states else Slices(stored.values())


def _read(path: Path, name: str, file: Path, shape: Shape | None) -> TensorSlice:
    value, place = pt.read_value(file)
    tensor = value.get("param") if isinstance(value, dict) else value
    if not isinstance(tensor, TensorRef):
        raise incomplete(file, f"holds a {type_name(value)}, not a weight")
    where = place(name, tensor)
    if isinstance(value, dict):
        return where
    if shape is None or prod(shape) != prod(where.shape):
        what = f"a flat tensor of {prod(where.shape):,} elements"
        raise incomplete(file, f"{what}, whose shape is in no *_model_states.pt of {path}")
    return joined(name, shape, Flat(file, [where]).ranges(0, prod(shape)))


def _weights(path: Path) -> dict[str, Path]:
    """Return the file of each weight by the weight's name, sorted with 2 before 10 in names."""
    names = [file.parent.name for file in path.glob(f"{_FOLDER}/*/{_WEIGHTS}")]
    return {name: path / _FOLDER / name / _WEIGHTS for name in sorted(names, key=_natural)}


def _natural(name: str) -> list[tuple[int, str]]:
    parts = _NUMBER.split(name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _states(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if _STATES.fullmatch(file.name))
