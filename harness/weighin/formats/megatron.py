"""Read Megatron-LM's folder of a training step in its format "torch": one file for each rank.

::

    iter_0000010/
        mp_rank_00/model_optim_rng.pt     the model of one rank is in the key "model"

If several processes (ranks) trained the model, the file of each has only a part of the tensors or
of the layers. weighin refuses such a folder, because the files do not say along which dimension a
tensor is divided.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats import pt
from weighin.formats.base import Slices
from weighin.formats.tensor_refs import Opaque, TensorRef

NAME = "megatron"
SUFFIX = ""

_RANK: Final = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_FILES: Final = ("model_optim_rng.pt", "model_rng.pt")
_DEEPEST: Final = 6
_SIZES: Final = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "expert_model_parallel_size": "expert",
}
_MERGE: Final = (
    "merge the ranks with Megatron-LM: python tools/checkpoint/convert.py --model-type GPT --loader core"
    " --saver core --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1 --load-dir RUN"
    " --save-dir MERGED"
)


def matches(path: Path) -> bool:
    return bool(_rank_files(path))


def files(path: Path) -> list[Path]:
    return list(_rank_files(path).values())


def read(path: Path) -> Slices:
    """Return the places (files and offsets) of the model's tensors.

    Raises:
        CheckpointError: the model is divided among several ranks, or the file is damaged.
    """
    by_rank = _rank_files(path)
    if len(by_rank) > 1:
        names = sorted(by_rank)
        raise CheckpointError(
            f"{path}: the model is divided among {len(names)} ranks ({names[0]} to {names[-1]}), and the"
            " files do not say along which dimension each tensor is divided",
            _MERGE,
        )
    (rank, file), *_ = by_rank.items()
    value, place = pt.read_value(file)
    model = value.get("model") if isinstance(value, dict) else None
    if not isinstance(model, dict):
        raise CheckpointError(
            f"{file}: has no key 'model', which Megatron-LM writes",
            "copy the file again, because this copy may be incomplete",
        )
    for size, kind in _SIZES.items():
        if (ranks := _argument(value.get("args"), size)) > 1:
            raise CheckpointError(
                f"{path}: the model is divided among {ranks} {kind}-parallel ranks, but only {rank}"
                " is in this folder",
                f"copy the folders of all ranks here, then {_MERGE}",
            )
    values = dict(_flat(model, "", _DEEPEST))
    tensors = {name: each for name, each in values.items() if isinstance(each, TensorRef)}
    slices = Slices(place(name, tensor) for name, tensor in tensors.items())
    slices.values = {name: each for name, each in values.items() if name not in tensors}
    slices.metadata = getattr(model, "metadata", None)
    return slices


def _flat(model: dict[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts, which old Megatron-LM releases wrote, by dotted names."""
    for name, value in model.items():
        if isinstance(value, dict) and depth:
            yield from _flat(value, f"{prefix}{name}.", depth - 1)
        else:
            yield f"{prefix}{name}", value


def _argument(arguments: Any, name: str) -> int:
    """Return a number from the training's pickled ``argparse.Namespace``; 1 if it is missing."""
    for state in arguments.contents if isinstance(arguments, Opaque) else ():
        if isinstance(state, dict) and type(state.get(name)) is int:
            return int(state[name])
    return 1


def _rank_files(path: Path) -> dict[str, Path]:
    found = {}
    for folder in sorted(path.glob("mp_rank_*")):
        file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
        if file and _RANK.fullmatch(folder.name):
            found[folder.name] = file
    return found
