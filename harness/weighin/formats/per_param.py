"""Read and write a folder with one file for each tensor, and an index that lists the keys in order.

``index.json``::

    {"format": "per_param", "version": 1,
     "tensors": {"tok_emb.weight": "tok_emb.weight.pt", ...},
     "shared": {"head.weight": "tok_emb.weight"}}

``tensors`` maps every key to its file. ``shared`` maps a tied key to the first key of the same
tensor; both keys have the same file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from weighin.errors import CheckpointError
from weighin.formats import folder_index
from weighin.formats.base import Pieces, Plans, Progress, Slices, TensorPlan
from weighin.formats.folder_index import INDEX_NAME, file_name
from weighin.formats.parallel_headers import map_files
from weighin.formats.unknown_file import shown
from weighin.stream.torch_files import read_one

NAME = "per_param"
SUFFIX = ""


def matches(path: Path) -> bool:
    return (path / INDEX_NAME).is_file()


def files(path: Path) -> list[Path]:
    return sorted({path / INDEX_NAME, *read_index(path).values()})


def read(path: Path) -> Slices:
    """Return the file and offset of each tensor; tied tensors are in the same file.

    Raises:
        CheckpointError: the index is damaged, or a file is missing or does not contain one tensor.
    """
    index = read_index(path)
    keys: dict[Path, str] = {}  # the first key of each file
    for key, file in index.items():
        keys.setdefault(file, key)
    places = map_files(lambda file: read_one(file, keys[file]), [*keys])
    by_file = dict(zip(keys, places, strict=True))
    return Slices(replace(by_file[file], name=key) for key, file in index.items())


def write(target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None) -> None:
    from weighin.formats.zip_writer import placeholder, run_parallel, write_tensor

    def write_one(plan: TensorPlan) -> None:
        file = target / file_name(plan.name)
        write_tensor(file, placeholder(plan.shape, plan.dtype), pieces(plan.name), progress)

    target.mkdir()
    run_parallel(partial(write_one, plan) for plan in tensors if plan.shared_with is None)
    shared = {plan.name: plan.shared_with for plan in tensors if plan.shared_with is not None}
    write_index(target, [plan.name for plan in tensors], shared)


def write_index(folder: Path, keys: Iterable[str], shared: Mapping[str, str]) -> None:
    """Write ``index.json``, whose fields the module's docstring describes."""
    tensors = {key: file_name(shared.get(key, key)) for key in keys}
    folder_index.write(folder, NAME, {"tensors": tensors, "shared": dict(shared)})


def read_index(folder: Path) -> dict[str, Path]:
    """Return the file of each key, in the state dict's order; keys of one tied tensor have one file.

    Raises:
        CheckpointError: the index is missing or damaged, a file is missing or outside the folder, or
            two keys share a file without being tied.
    """
    index = folder_index.read(folder, NAME, {"tensors": dict, "shared": dict})
    tensors, shared = index["tensors"], index["shared"]
    if not tensors:
        raise _damaged(folder, "lists no tensors")
    owners: dict[str, str] = {}
    for key, name in tensors.items():
        folder_index.check_name(folder, NAME, name, shown(key))
        owner = owners.setdefault(name, key)
        if owner != key and shared.get(key) != owner:
            what = f"{shown(owner)} and {shown(key)} are not tied but share {shown(name)}"
            raise _damaged(folder, what)
    for key, first in shared.items():
        if key not in tensors or owners.get(tensors[key]) != first:
            raise _damaged(folder, f"{shown(key)} is tied to {shown(first)} but is in another file")
    return {key: folder / name for key, name in tensors.items()}


def _damaged(folder: Path, what: str) -> CheckpointError:
    return folder_index.damaged(folder, NAME, what)
