"""Read and write a folder with one ``.pt`` file for each tensor or each module, and an index of keys.

``index.json`` of the format ``per_param``, and of ``per_module``::

    {"format": "per_param", "version": 1,
     "tensors": {"tok_emb.weight": "tok_emb.weight.pt", ...},
     "shared": {"head.weight": "tok_emb.weight"}}

    {"format": "per_module", "version": 1,
     "files": {"trf_blocks.0.pt": ["trf_blocks.0.norm1.scale", ...], ...},
     "shared": {"head.weight": "tok_emb.weight"},
     "order": ["tok_emb.weight", "trf_blocks.0.norm1.scale", ...]}

A file of ``per_param`` is one tensor, a file of ``per_module`` a flat state dict. The module of a key is
the key up to its first number, such as ``trf_blocks.3``, or else the key's first part. ``shared`` maps a
tied key to the first key of the same tensor; both are in one file. ``tensors`` and ``order`` are in the
state dict's order.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.files import write_text
from weighin.formats.base import Pieces, Plans, Progress, Slices, TensorPlan, TensorSlice
from weighin.formats.foreign import is_file, read_object
from weighin.formats.parallel_headers import map_files
from weighin.stream.torch_files import PT, read_one
from weighin.text import shown

INDEX_NAME: Final = "index.json"

_VERSION: Final = 1
_NUMBERED: Final = re.compile(r"(.*?\.\d+)\..")
_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_.\-]")
_LONGEST_NAME: Final = 200  # file systems allow 255 bytes
_HEAD_BYTES: Final = 4096


def file_name(key: str) -> str:
    """Return the name of a key's file: the key and ".pt", if the key is a safe file name.

    Unsafe bytes and a leading dot are percent-encoded; a hash replaces the end of a long name.
    Different keys get different names, and no name leads out of the folder.
    """
    name = _UNSAFE.sub(
        lambda match: f"%{match[0][0]:02X}".encode(), key.encode("utf-8", "surrogatepass")
    )
    text = name.decode()
    if text.startswith("."):
        text = f"%2E{text[1:]}"
    if len(text) > _LONGEST_NAME:
        # No escape contains "%-", so that a hashed name never equals another key's name.
        text = f"{text[:150]}%-{sha256(name).hexdigest()[:32]}"
    return f"{text or '%'}.pt"


def module_of(key: str) -> str:
    """Return the layer or submodule of a key: "trf_blocks.3", "tok_emb"."""
    numbered = _NUMBERED.match(key)
    return numbered[1] if numbered else key.partition(".")[0]


class PerKey:
    """A format with a file for each group of keys; ``group`` returns the name of a key's group."""

    SUFFIX = ""

    def __init__(self, name: str, fields: Mapping[str, type], group: Callable[[str], str]) -> None:
        self.NAME = name
        self._fields, self._group = fields, group
        self._repair = (
            f"convert the checkpoint again: weighin convert CHECKPOINT OUT --format {name}"
        )

    def matches(self, path: Path) -> bool:
        """Tell whether the folder has an index of this format, or for per_param any index."""
        if self is PER_PARAM:
            return (path / INDEX_NAME).is_file()
        try:
            with (path / INDEX_NAME).open("rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError:
            return False
        return re.search(rf'"format"\s*:\s*"{self.NAME}"'.encode(), head) is not None

    def files(self, path: Path) -> list[Path]:
        return sorted([path / INDEX_NAME, *(path / name for name in self.read_index(path)[0])])

    def read(self, path: Path) -> Slices:
        """Return the file and offset of each tensor, in the state dict's order.

        Raises:
            CheckpointError: the index is damaged, or a file is missing or damaged, or has other keys
                than the index lists for it.
        """
        files, shared, order = self.read_index(path)
        found: dict[str, TensorSlice] = {}
        read = self._read_tensor if self is PER_PARAM else self._read_state
        for state in map_files(lambda item: read(path / item[0], item[1]), [*files.items()]):
            found |= state
        for key, first in shared.items():
            one, other = found[key], found[first]
            if (one.file, one.offset, one.shape) != (other.file, other.offset, other.shape):
                raise self._damaged(
                    path, f"{shown(key)} is tied to {shown(first)} but stored elsewhere"
                )
        return Slices(found[key] for key in order)

    @staticmethod
    def _read_tensor(file: Path, keys: list[str]) -> dict[str, TensorSlice]:
        one = read_one(file, keys[0])
        return {key: replace(one, name=key) for key in keys}

    def _read_state(self, file: Path, keys: list[str]) -> dict[str, TensorSlice]:
        state = {where.name: where for where in PT.read(file)}
        if list(state) != keys:
            odd = next(iter(set(state) ^ set(keys)), keys[0])
            raise CheckpointError(
                f"{file}: its keys differ from those that {INDEX_NAME} lists, such as {shown(odd)}",
                self._repair,
            )
        return state

    def read_index(self, folder: Path) -> tuple[dict[str, list[str]], dict[str, str], list[str]]:
        """Return the keys in each file, the first key of each tied key, and all keys in order.

        Raises:
            CheckpointError: the index is missing or damaged, or a file is missing or outside the folder.
        """
        path = folder / INDEX_NAME
        index = read_object(path, self._repair)
        if index.get("format") != self.NAME:
            raise self._damaged(folder, f"not an index of the format {self.NAME}")
        if index.get("version") != _VERSION:
            version = index.get("version")
            what = f"index of version {version!r}, but this weighin reads {_VERSION}"
            raise self._damaged(folder, what)
        if not all(isinstance(index.get(name), kind) for name, kind in self._fields.items()):
            names = " or no ".join(repr(name) for name in self._fields)
            raise self._damaged(folder, f"damaged: no {names}")
        shared = index["shared"]
        if self is PER_PARAM:
            files, order = self._files_of(folder, index["tensors"], shared), [*index["tensors"]]
        else:
            files, order = index["files"], index["order"]
        homes: dict[str, str] = {}
        for name, keys in files.items():
            if not _are_keys(keys):
                what = f"the keys of file {shown(name)} are not a list of strings"
                raise self._damaged(folder, what)
            self._check_file(folder, name, keys[0])
            for key in keys:
                if key in homes:
                    raise self._damaged(folder, f"{shown(key)} occurs twice")
                homes[key] = name
        if not _are_keys(order) or len(order) != len(homes) or set(order) != set(homes):
            raise self._damaged(
                folder, "'order' must name each tensor of 'files' exactly once, and no other"
            )
        for key, first in shared.items():
            if key not in homes or not isinstance(first, str) or homes.get(first) != homes[key]:
                what = f"{shown(key)} is tied to {shown(first)} but is in another file"
                raise self._damaged(folder, what)
        return files, shared, order

    def _files_of(
        self, folder: Path, tensors: Mapping[str, Any], shared: Mapping[str, Any]
    ) -> dict[str, list[str]]:
        if not tensors:
            raise self._damaged(folder, "lists no tensors")
        files: dict[str, list[str]] = {}
        for key, name in tensors.items():
            self._check_file(folder, name, key)
            keys = files.setdefault(name, [])
            if keys and shared.get(key) != keys[0]:
                what = f"{shown(keys[0])} and {shown(key)} are not tied but share {shown(name)}"
                raise self._damaged(folder, what)
            keys.append(key)
        return files

    def _check_file(self, folder: Path, name: object, key: str) -> None:
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            what = f"the file that holds {shown(key)} lies outside the folder: {shown(name)}"
            raise self._damaged(folder, what)
        if not is_file(folder / name):
            what = f"the file {shown(name)}, which holds {shown(key)}, is missing"
            raise self._damaged(folder, what)

    def _damaged(self, folder: Path, what: str) -> CheckpointError:
        return CheckpointError(f"{folder / INDEX_NAME}: {what}", self._repair)

    def write(
        self, target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None
    ) -> None:
        from weighin.formats.zip_writer import (
            placeholder,
            placeholders,
            run_parallel,
            write_pt,
            write_tensor,
        )

        def write_one(plan: TensorPlan) -> None:
            file = target / file_name(plan.name)
            write_tensor(file, placeholder(plan.shape, plan.dtype), pieces(plan.name), progress)

        groups: dict[str, list[TensorPlan]] = {}
        for plan in tensors:
            groups.setdefault(self._group(plan.shared_with or plan.name), []).append(plan)
        target.mkdir()
        if self is PER_PARAM:
            run_parallel(partial(write_one, plans[0]) for plans in groups.values())
        else:
            for name, plans in groups.items():
                write_pt(target / file_name(name), placeholders(plans), pieces, progress)
        shared = {plan.name: plan.shared_with for plan in tensors if plan.shared_with is not None}
        self.write_index(target, [plan.name for plan in tensors], shared)

    def write_index(self, folder: Path, keys: Iterable[str], shared: Mapping[str, str]) -> None:
        """Write ``index.json``. Call this last: readers take a folder with an index as complete."""
        homes = {key: file_name(self._group(shared.get(key, key))) for key in keys}
        files: dict[str, list[str]] = {}
        for key, name in homes.items():
            files.setdefault(name, []).append(key)
        fields = {"tensors": homes, "files": files, "shared": dict(shared), "order": list(homes)}
        index = {"format": self.NAME, "version": _VERSION}
        index |= {name: fields[name] for name in self._fields}
        write_text(folder / INDEX_NAME, json.dumps(index, indent=1))


def _are_keys(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(key, str) for key in value)


PER_PARAM: Final = PerKey("per_param", {"tensors": dict, "shared": dict}, lambda key: key)
PER_MODULE: Final = PerKey("per_module", {"files": dict, "shared": dict, "order": list}, module_of)
