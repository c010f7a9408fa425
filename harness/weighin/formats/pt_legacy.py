"""Read and write the file format of torch before 1.6: several pickles, then the storages.

::

    pickle   0x1950a86a20f9469cfc6c, the magic number
    pickle   1001, the version
    pickle   {"little_endian": True, ...}
    pickle   the state dict; each tensor refers to its storage by a key
    pickle   [key, ...], the order of the storages
    then for each storage: 8 bytes with its number of elements, and its bytes

torch cannot memory-map such a file; torch.load reads the whole file. ``torch.save(...,
_use_new_zipfile_serialization=False)`` still writes this format.
"""

import io
import os
import pickle
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from weighin.errors import CheckpointError, ConfigError
from weighin.formats import state_pickle
from weighin.formats.base import Pieces, Plans, Progress, Slices, TensorPlan
from weighin.formats.recognise import is_legacy, resaving
from weighin.formats.state_dicts import state_dict
from weighin.formats.state_pickle import Pickled
from weighin.formats.tensor_refs import StorageRef
from weighin.formats.unknown_file import (
    AGAIN,
    RESAVE,
    check_present,
    first_bytes,
    shown,
    unreadable,
)

NAME: Final = "pt_legacy"
SUFFIX: Final = ".pth"

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_VERSION: Final = 1001
_PICKLE_PROTOCOL: Final = 2


def matches(path: Path) -> bool:
    return is_legacy(first_bytes(path))


def files(path: Path) -> list[Path]:
    check_present(path)
    return [path]


def read(path: Path, key: str = "") -> Slices:
    """Return all tensors' offsets, in the state dict's order; tied tensors share a storage.

    ``key`` selects a state dict in nested dicts, as ``Selection.key`` does.
    """
    check_present(path)
    try:
        with path.open("rb") as file:
            pickled, keys = _read_pickles(path, file)
            state = state_dict(path, pickled.value, key)
            starts = _storage_starts(path, file, pickled.storages, keys)
    except OSError as error:
        raise unreadable(path, error) from error
    return state.located(
        lambda name, one: one.located(name, path, starts[one.storage.key]), pickled.refused
    )


def _read_pickles(path: Path, file: BinaryIO) -> tuple[Pickled, list[str]]:
    magic, version, system = (state_pickle.load(path, file).value for _ in range(3))
    if magic != _MAGIC:
        raise _damaged(path, "it does not begin with the magic number of torch before 1.6")
    if version != _VERSION:
        raise CheckpointError(
            f"{path}: format version {shown(version)}, but this weighin reads {_VERSION}",
            resaving(path),
        )
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError(
            f"{path}: the file was written on a big-endian machine, and weighin"
            " does not read this order of bytes",
            resaving(path),
        )
    pickled = state_pickle.load(path, file)
    keys = state_pickle.load(path, file).value
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise _damaged(path, "its list of storages is not a list of strings")
    return pickled, keys


def _storage_starts(
    path: Path, file: BinaryIO, storages: dict[str, StorageRef], keys: list[str]
) -> dict[str, int]:
    """Return the offset of each storage; raise CheckpointError if storages do not fit the file."""
    if len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise _damaged(path, "its list of storages does not match its tensors")
    file_bytes = os.fstat(file.fileno()).st_size
    starts: dict[str, int] = {}
    at = file.tell()
    for key in keys:
        word = os.pread(file.fileno(), 8, at)
        start, storage = at + 8, storages[key]
        at = start + storage.nbytes
        if len(word) < 8 or at > file_bytes:
            raise CheckpointError(
                f"{path}: truncated: storage {shown(key)} ends at byte {at:,}, "
                f"but the file ends at byte {file_bytes:,}",
                AGAIN,
            )
        if int.from_bytes(word, "little") != storage.numel:
            raise _damaged(
                path,
                f"storage {shown(key)} at byte {start - 8:,} has {int.from_bytes(word, 'little'):,}"
                f" elements, but its tensors need {storage.numel:,}",
            )
        starts[key] = start
    return starts


def write(target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None) -> None:
    """Write a new file; tied tensors share a storage in the file.

    Raises:
        ConfigError: torch before 1.6 had no storage type for one of the dtypes.
    """
    from weighin.formats.parallel_write import write_raw

    _check_dtypes(tensors)
    head, stored = _head(tensors)
    fixed, places, at = {0: head}, [], len(head)
    for plan in stored:
        numel = prod(plan.shape)
        fixed[at] = numel.to_bytes(8, "little")
        places.append((plan, at + 8))
        at += 8 + plan.nbytes
    write_raw(target, fixed, places, pieces, progress)


def _head(tensors: Plans) -> tuple[bytes, list[TensorPlan]]:
    import torch

    from weighin.formats.zip_writer import placeholders

    head = io.BytesIO()
    system = {"protocol_version": _VERSION, "little_endian": True}
    system["type_sizes"] = {"short": 2, "int": 4, "long": 4}  # type: ignore[assignment]
    for value in (_MAGIC, _VERSION, system):
        pickle.dump(value, head, protocol=_PICKLE_PROTOCOL)
    state = placeholders(tensors)
    stored = [plan for plan in tensors if plan.shared_with is None]
    keys = {state[plan.name].untyped_storage()._cdata: str(n) for n, plan in enumerate(stored)}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, torch.storage.TypedStorage):
                return None
            kind = getattr(torch, value._pickle_storage_type())
            key, numel = keys[value._untyped_storage._cdata], value._size()
            return "storage", kind, key, "cpu", numel, None

    Pickler(head, protocol=_PICKLE_PROTOCOL).dump(state)
    pickle.dump(list(keys.values()), head, protocol=_PICKLE_PROTOCOL)
    return head.getvalue(), stored


def _check_dtypes(tensors: Plans) -> None:
    from torch.storage import _dtype_to_storage_type_map

    for plan in tensors:
        if plan.dtype not in _dtype_to_storage_type_map():
            raise ConfigError(
                f"tensor {shown(plan.name)}: torch before 1.6 had no dtype {plan.dtype}",
                "write the format pt, which has every dtype of torch: --format pt",
            )


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}", RESAVE)
