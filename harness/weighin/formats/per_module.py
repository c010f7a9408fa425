"""Read and write one file for each layer or submodule, in a folder with an index.

``index.json``::

    {"format": "per_module", "version": 1,
     "files": {"trf_blocks.0.pt": ["trf_blocks.0.norm1.scale", ...], ...},
     "shared": {"head.weight": "tok_emb.weight"},
     "order": ["tok_emb.weight", "trf_blocks.0.norm1.scale", ...]}

The module of a key is the key up to its first number, such as ``trf_blocks.3``. The module of a key
without a number is the key's first part, such as ``tok_emb``. Each file is a flat state dict.
``shared`` maps a tied key to the first key of the same tensor; both are in one file and share a
storage. ``order`` lists the keys of the whole state dict.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats import folder_index
from weighin.formats.base import Pieces, Plans, Progress, Slices, TensorPlan, TensorSlice
from weighin.formats.folder_index import INDEX_NAME, file_name
from weighin.formats.parallel_headers import map_files
from weighin.formats.unknown_file import shown
from weighin.stream.torch_files import PT

NAME = "per_module"
SUFFIX = ""

_NUMBERED: Final = re.compile(r"(.*?\.\d+)\..")


def matches(path: Path) -> bool:
    return folder_index.says(path, NAME)


def files(path: Path) -> list[Path]:
    return sorted([path / INDEX_NAME, *(path / name for name in read_index(path)["files"])])


def read(path: Path) -> Slices:
    """Return the file and offset of each tensor, in the state dict's order.

    Raises:
        CheckpointError: the index is damaged, a file is missing or damaged, or a file has other keys
            than the index lists for the file.
    """
    slices: dict[str, TensorSlice] = {}
    index = read_index(path)
    files = {path / name: keys for name, keys in index["files"].items()}
    for (file, keys), places in zip(files.items(), map_files(PT.read, [*files]), strict=True):
        state = {where.name: where for where in places}
        if list(state) != keys:
            odd = next(iter(set(state) ^ set(keys)), keys[0])
            raise CheckpointError(
                f"{file}: its keys differ from those that {INDEX_NAME} lists, such as {shown(odd)}",
                "convert the checkpoint again: weighin convert CHECKPOINT OUT --format per_module",
            )
        slices |= state
    for key, first in index["shared"].items():
        one, other = slices[key], slices[first]
        if (one.file, one.offset, one.shape) != (other.file, other.offset, other.shape):
            raise _damaged(path, f"{shown(key)} is tied to {shown(first)} but stored elsewhere")
    return Slices(slices[key] for key in index["order"])


def write(target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None) -> None:
    from weighin.formats.zip_writer import placeholders, write_pt

    groups: dict[str, list[TensorPlan]] = {}
    for plan in tensors:
        groups.setdefault(module_of(plan.shared_with or plan.name), []).append(plan)
    target.mkdir()
    for module, plans in groups.items():
        write_pt(target / file_name(module), placeholders(plans), pieces, progress)
    files = {module: [plan.name for plan in plans] for module, plans in groups.items()}
    shared = {plan.name: plan.shared_with for plan in tensors if plan.shared_with is not None}
    write_index(target, files, shared, [plan.name for plan in tensors])


def write_index(
    folder: Path,
    modules: Mapping[str, Sequence[str]],
    shared: Mapping[str, str],
    order: Sequence[str],
) -> None:
    """Write ``index.json``, whose fields the module's docstring describes."""
    files = {file_name(module): list(keys) for module, keys in modules.items()}
    fields = {"files": files, "shared": dict(shared), "order": list(order)}
    folder_index.write(folder, NAME, fields)


def module_of(key: str) -> str:
    """Return the layer or submodule of a key: "trf_blocks.3", "tok_emb"."""
    numbered = _NUMBERED.match(key)
    return numbered[1] if numbered else key.partition(".")[0]


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index, in which every key is in exactly one file.

    Raises:
        CheckpointError: the index is missing or damaged, or a file is missing or outside the folder.
    """
    fields = {"files": dict, "shared": dict, "order": list}
    index = folder_index.read(folder, NAME, fields)
    owners: dict[str, str] = {}
    for name, keys in index["files"].items():
        folder_index.check_name(folder, NAME, name, "a module")
        if not _are_keys(keys):
            raise _damaged(folder, f"the keys of file {shown(name)} are not a list of strings")
        for key in keys:
            if owners.setdefault(key, name) != name or keys.count(key) > 1:
                raise _damaged(folder, f"{shown(key)} occurs twice")
    order = index["order"]
    if not _are_keys(order) or len(order) != len(owners) or set(order) != set(owners):
        raise _damaged(
            folder, "'order' must name each tensor of 'files' exactly once, and no other"
        )
    for key, first in index["shared"].items():
        if key not in owners or not isinstance(first, str) or owners.get(first) != owners[key]:
            raise _damaged(folder, f"{shown(key)} is tied to {shown(first)} but is in another file")
    return index


def _are_keys(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(key, str) for key in value)


def _damaged(folder: Path, what: str) -> CheckpointError:
    return folder_index.damaged(folder, NAME, what)
