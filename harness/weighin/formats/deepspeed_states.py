"""Read DeepSpeed's ``*_model_states.pt``: the names of a model's tensors, and the values of some
tensors.

A file of model states has the names and shapes of all tensors, and the values of buffers and frozen
parameters. Other files have the values of the trained weights, in float32.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats import pt
from weighin.formats.base import Slices, TensorSlice
from weighin.formats.dtypes import is_sizes
from weighin.formats.flat_pieces import Flat, Shape, incomplete, joined
from weighin.formats.state_dicts import StateDictParts, state_dict
from weighin.formats.tensor_refs import TensorRef, type_name
from weighin.formats.unknown_file import short, shown
from weighin.text import few

_OF_RANK: Final = re.compile(r"((?:[a-z0-9]+_)?zero_pp_rank_)\d+_")
_AUTO_EXPERTS: Final = ("ds_autoep_layers", "autoep_layers")


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The content of one file of model states.

    Attributes:
        module: the tensors of the model's state dict, in the dict's order. A parameter that ZeRO-3
            divides among ranks is empty here.
        values: the values of the model's state dict other than tensors.
        metadata: the version metadata of the model's modules.
        shapes: for each parameter group of the optimizer, a dict from the names of the trained
            parameters to their shapes, in the order of the stored elements. None if no ZeRO
            optimizer wrote the checkpoint.
        frozen: maps the names to the shapes of the parameters that the optimizer does not train.
        fragments: the values of the frozen parameters; under ZeRO-3, this rank's share of the values.
        ranks: the number of ranks among which ZeRO divided the parameters; 0 if the file has no number.
        buffers: the names of buffers.
        shared: maps the name of a tied parameter to the name under which its values are stored.
    """

    file: Path
    module: Mapping[str, TensorSlice]
    values: Mapping[str, object]
    metadata: Mapping[str, Mapping[str, object]] | None
    shapes: tuple[dict[str, Shape], ...] | None
    frozen: dict[str, Shape]
    fragments: Mapping[str, TensorSlice]
    ranks: int
    buffers: frozenset[str]
    shared: dict[str, str]

    def state_dict(self, stored: Mapping[str, TensorSlice], *, fallback: bool = True) -> Slices:
        """Return all tensors of the model in the order of the state dict.

        ``stored`` has the tensors whose values are in other files. All remaining tensors are
        those of this file of model states; with ``fallback=False``, only buffers may come from it.

        Raises:
            CheckpointError: no file has the values of a parameter.
        """
        slices = Slices()
        slices.metadata, slices.values = self.metadata, self.values
        aliases = (name for name, source in self.shared.items() if source in stored)
        for name in dict.fromkeys([*self.module, *stored, *aliases]):
            source = self.shared.get(name, name)
            source = name if source not in stored else source
            is_buffer = name in self.buffers and name in self.module
            if source in stored and not is_buffer:
                slices.append(replace(stored[source], name=name))
            elif is_buffer or (fallback and self.module[name].nbytes):
                slices.append(self.module[name])
            else:
                raise CheckpointError(
                    f"{self.file.parent}: no file has the values of {shown(name)}, which the"
                    " optimizer does not train",
                    "save the whole model from the training code: engine.save_16bit_model(FOLDER)",
                )
        return slices


def read(file: Path) -> ModelStates:
    """Return the content of a file of model states.

    Raises:
        CheckpointError: the file is damaged, or has other content than DeepSpeed writes.
    """
    value, place = pt.read_value(file)
    if not isinstance(value, dict) or "module" not in value:
        raise incomplete(file, "holds no model states of DeepSpeed")
    module = StateDictParts({}, {}, None)
    if value["module"] is not None:
        module = state_dict(file, value, "module")
    if any(isinstance(value.get(key), list) for key in _AUTO_EXPERTS):
        raise experts_divided(file.parent, f"{file.name} has AutoEP layers")
    groups = value.get("param_shapes")
    if isinstance(groups, dict):  # DeepSpeed before 0.4 wrote one group
        groups = [groups]
    shapes = (
        None if groups is None else tuple(_shapes(file, group) for group in _list(file, groups))
    )
    names = value.get("buffer_names") or []
    shared = value.get("shared_params") or {}
    fragments = value.get("frozen_param_fragments") or {}
    return ModelStates(
        file,
        {name: place(name, tensor) for name, tensor in module.tensors.items()},
        module.values,
        module.metadata,
        shapes,
        _shapes(file, value.get("frozen_param_shapes") or {}),
        {
            name: place(name, each)
            for name, each in _pairs(file, fragments)
            if isinstance(each, TensorRef)
        },
        ranks if type(ranks := value.get("dp_world_size")) is int else 0,
        frozenset(name for name in _list(file, names) if isinstance(name, str)),
        {name: source for name, source in _pairs(file, shared) if isinstance(source, str)},
    )


def frozen(states: ModelStates) -> dict[str, TensorSlice]:
    """Return the frozen parameters; under ZeRO-3, the files of all ranks have a share of each.

    Raises:
        CheckpointError: the file of a rank is missing, or lacks a share.
    """
    if not _OF_RANK.match(states.file.name):
        return {name: states.fragments[name] for name in states.frozen if name in states.fragments}
    if not states.frozen:
        return {}
    others = [
        states.file.with_name(of_rank(states.file.name, rank)) for rank in range(1, states.ranks)
    ]
    if absent := [file.name for file in others if not file.is_file()]:
        raise missing(states.file.parent, absent)
    every = [states, *map(read, others)]
    stored = {}
    for name, shape in states.frozen.items():
        for one in every:
            if name not in one.fragments:
                raise incomplete(one.file, f"has no share of {shown(name)}")
        flat = Flat(states.file.parent, [one.fragments[name] for one in every])
        stored[name] = joined(name, shape, flat.ranges(0, prod(shape)))
    return stored


def of_rank(name: str, rank: int) -> str:
    """Return the file name ``name`` with the rank ``rank`` in place of the file's own rank."""
    return _OF_RANK.sub(rf"\g<1>{rank}_", name)


def missing(folder: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{folder}: files of some ranks are missing: {few(names)}",
        "copy them here: each machine of a training may have kept the files of its own ranks",
    )


def experts_divided(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: the experts are divided among ranks (expert parallelism): {why}",
        "load it with DeepSpeed on as many ranks, and save the experts of all ranks in one state dict",
    )


def _shapes(file: Path, value: Any) -> dict[str, Shape]:
    shapes = {}
    for name, shape in _pairs(file, value):
        if not is_sizes(shape):
            what = f"the shape of {shown(name)} is {short(shape)}"
            raise incomplete(file, f"{what}, and not a list of sizes of 0 or more")
        shapes[name] = tuple(shape)
    return shapes


def _pairs(file: Path, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return value.items()
    raise incomplete(file, f"has a {type_name(value)} in place of a dict of names")


def _list(file: Path, value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    raise incomplete(file, f"has a {type_name(value)} in place of a list")
