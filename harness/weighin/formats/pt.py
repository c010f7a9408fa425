"""Read and write the zip file of ``torch.save(model.state_dict(), path)``, used since torch 1.6.

Reading uses neither torch nor Python's pickle: ``zip_directory`` finds the records in the file, and
``state_pickle`` reads the description of the tensors from one record.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from weighin.errors import CheckpointError
from weighin.formats import pickle_machine, state_pickle
from weighin.formats.base import Pieces, Plans, Progress, Slices, TensorSlice
from weighin.formats.recognise import is_zip, resaving
from weighin.formats.state_dicts import holds_more, state_dict, unread
from weighin.formats.state_pickle import Pickled
from weighin.formats.tensor_refs import Opaque, OtherTensor, TensorRef, type_name
from weighin.formats.unknown_file import RESAVE, first_bytes, shown, unreadable
from weighin.formats.zip_directory import Archive, ZipRecord, check_file

NAME = "pt"
SUFFIX = ".pt"

_PICKLE: Final = "/data.pkl"
_BYTE_ORDER: Final = "/byteorder"


def matches(path: Path) -> bool:
    return is_zip(first_bytes(path))


def files(path: Path) -> list[Path]:
    return [path]


def read(path: Path, key: str = "") -> Slices:
    """Return the offset of each tensor of a flat state dict. For GPT-2 XL, ``read`` takes 0.03 s.

    ``key`` selects a state dict in nested dicts, as ``Selection.key`` does.

    Raises:
        CheckpointError: the file is not a zip that ``torch.save`` wrote or not a flat dict of
            tensors, a record is compressed, or a tensor extends beyond its record.
    """
    pickled, records = _read_file(path)
    state = state_dict(path, pickled.value, key)
    return state.located(lambda name, one: _slice(path, name, one, records), pickled.refused)


def read_one(path: Path, name: str, archive: io.RawIOBase | None = None) -> TensorSlice:
    """Return a file's only tensor with its offset; give the tensor the name ``name``.

    If the file is no zip archive itself, ``archive`` is a zip archive inside the file. Offsets then
    count from the archive's start.

    Raises:
        CheckpointError: as for ``read``, or the file holds anything but one tensor.
    """
    pickled, records = _read_file(path) if archive is None else _read_value(path, archive)
    value = pickled.value
    if not isinstance(value, TensorRef):
        if isinstance(value, OtherTensor):
            raise unread(path, shown(name), value)
        if isinstance(value, Opaque) and value.is_foreign:
            raise holds_more(path, "it", value)
        raise CheckpointError(f"{path}: holds a {type_name(value)}, not a tensor", RESAVE)
    return _slice(path, name, value, records)


def read_value(path: Path) -> tuple[Any, Callable[[str, TensorRef], TensorSlice]]:
    """Return a file's pickled value as records of ``tensor_refs``, and a function that locates a
    tensor.

    The returned function takes a name for a tensor and the tensor's record, and returns the
    tensor's place in the file.

    Raises:
        CheckpointError: the file is not a zip that ``torch.save`` wrote, or is damaged.
    """
    pickled, records = _read_file(path)
    return pickled.value, lambda name, tensor: _slice(path, name, tensor, records)


def write(target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None) -> None:
    """Write the file that ``torch.save`` would write; tied tensors share a storage in the file."""
    from weighin.formats.zip_writer import placeholders, write_pt

    write_pt(target, placeholders(tensors), pieces, progress)


def _read_file(path: Path) -> tuple[Pickled, dict[str, ZipRecord]]:
    check_file(path)
    try:
        with path.open("rb") as file:
            return _read_value(path, file)
    except OSError as error:
        raise unreadable(path, error) from error


def _read_value(path: Path, file: IO[bytes] | io.RawIOBase) -> tuple[Pickled, dict[str, ZipRecord]]:
    """Return the pickled value, and a dict from each storage's key to its record in the archive."""
    archive = Archive(path, file)
    pickles = [name for name in archive.records if name.endswith(_PICKLE) and name.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointError(
            f"{path}: the archive contains several files data.pkl, but a"
            " checkpoint of torch has one",
            RESAVE,
        )
    root = pickles[0].removesuffix(_PICKLE)
    if f"{root}{_BYTE_ORDER}" in archive.records:
        order = archive.read(f"{root}{_BYTE_ORDER}", 16)
        if order != b"little":
            raise CheckpointError(
                f"{path}: the file was written on a big-endian machine, and"
                " weighin does not read this order of bytes",
                resaving(path),
            )
    text = archive.read(pickles[0], pickle_machine.MOST_BYTES)
    pickled = state_pickle.load(path, io.BytesIO(text), archive.records[pickles[0]].start)
    prefix = f"{root}/data/"
    return pickled, {
        name.removeprefix(prefix): record
        for name, record in archive.records.items()
        if name.startswith(prefix)
    }


def _slice(path: Path, name: str, tensor: TensorRef, records: dict[str, ZipRecord]) -> TensorSlice:
    storage = tensor.storage
    record = records.get(storage.key, ZipRecord(0, 0))
    if storage.nbytes > record.size:
        raise CheckpointError(
            f"{path}: damaged: the storage of {shown(name)} has {storage.nbytes:,} bytes, "
            f"but its record in the file has {record.size:,}",
            RESAVE,
        )
    return tensor.located(name, path, record.start)
