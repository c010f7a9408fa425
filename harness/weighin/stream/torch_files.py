"""Read and write the files of ``torch.save``: zip archives, and the format of torch before 1.6.

A zip archive has the pickled state dict in the record ``data.pkl``, and a record for each storage.
The older format is, as torch.save(..., _use_new_zipfile_serialization=False) still writes it::

    pickle   0x1950a86a20f9469cfc6c, the magic number
    pickle   1001, the version
    pickle   {"little_endian": True, ...}
    pickle   the state dict; each tensor refers to its storage by a key
    pickle   [key, ...], the order of the storages
    then for each storage: 8 bytes with its number of elements, and its bytes
"""

import io
import os
import pickle
import struct
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from weighin.errors import CheckpointError, ConfigError, FormatLimit
from weighin.formats.base import Pieces, Plans, Progress, Slices, TensorPlan, TensorSlice
from weighin.formats.foreign import (
    AGAIN,
    RESAVE,
    SHARDS,
    by_records,
    check_present,
    first_bytes,
    is_legacy,
    is_zip,
    resaving,
    unknown,
    unreadable,
)
from weighin.formats.parallel_headers import is_late, read_headers
from weighin.stream import pickles
from weighin.stream.pickles import Opaque, OtherTensor, Tensor, type_name
from weighin.stream.state_dicts import holds_more, state_dict, unread
from weighin.text import shown

MOST_DIRECTORY_BYTES: Final = 8 * 1024**2
"""The longest directory of a zip file that is read: that of 100,000 tensors."""

_MOST_TENSORS: Final = 60_000  # to write: ``pickles`` reads some 70,000

_LOCAL_BYTES: Final = 30  # of a record's own header, before its name
_MOST_AHEAD_BYTES: Final = 1024**2  # of the pickle's record, which the kernel reads ahead
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_VERSION: Final = 1001
_PICKLE_PROTOCOL: Final = 2

Metadata = Mapping[str, Mapping[str, object]] | None
Record = tuple[int, int]
"""The offset of a record's first byte in the file, and the record's size in bytes."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The pickled value of a file, as records, and the place of each storage by the storage's key."""

    path: Path
    pickled: pickles.Pickled
    places: dict[str, Record]

    @property
    def value(self) -> Any:
        return self.pickled.value

    def slice(self, name: str, tensor: Tensor) -> TensorSlice:
        """Return a tensor's place; raise CheckpointError if its storage does not fit its record."""
        start, size = self.places.get(tensor.storage.key, (0, 0))
        if tensor.storage.nbytes != size:  # torch.load refuses a longer record, too
            raise CheckpointError(
                f"{self.path}: damaged: the storage of {shown(name)} has {tensor.storage.nbytes:,}"
                f" bytes, but its record in the file has {size:,}",
                RESAVE,
            )
        return tensor.located(name, self.path, start)

    def slices(
        self, tensors: dict[str, Tensor], values: dict[str, Any], metadata: Metadata
    ) -> Slices:
        """Return the places of a state dict's tensors, with the parts that ``state_dict`` returns."""
        slices = Slices(self.slice(name, tensor) for name, tensor in tensors.items())
        slices.metadata, slices.values, slices.refused = metadata, values, self.pickled.refused
        return slices


class _Zip:
    """The format ``pt``: one file, as ``torch.save(model.state_dict(), ...)`` writes it."""

    NAME = "pt"
    SUFFIX = ".pt"

    def matches(self, path: Path) -> bool:
        return is_zip(first_bytes(path))

    def files(self, path: Path) -> list[Path]:
        return [path]

    def read(self, path: Path, key: str = "") -> Slices:
        """Return the offset of each tensor of a flat state dict. For GPT-2 XL, this takes 0.03 s.

        ``key`` selects a state dict in nested dicts, as ``Selection.key`` does.
        """
        file = open_zip(path)
        return file.slices(*state_dict(path, file.value, key))

    def write(
        self, target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None
    ) -> None:
        """Write the file that ``torch.save`` would write; tied tensors share a storage in the file.

        Raises:
            FormatLimit: there are more tensors than weighin reads in such a file.
        """
        from weighin.formats.zip_writer import placeholders, write_pt

        if len(tensors) > _MOST_TENSORS:
            raise FormatLimit(
                f"{len(tensors):,} tensors are more than the {_MOST_TENSORS:,} that weighin reads in"
                " one file of torch.save",
                "write them in safetensors: --format safetensors",
            )
        write_pt(target, placeholders(tensors), pieces, progress)


class _Legacy:
    """The format ``pt_legacy``, which torch cannot memory-map: torch.load reads the whole file."""

    NAME = "pt_legacy"
    SUFFIX = ".pth"

    def matches(self, path: Path) -> bool:
        return is_legacy(first_bytes(path))

    def files(self, path: Path) -> list[Path]:
        check_present(path)
        return [path]

    def read(self, path: Path, key: str = "") -> Slices:
        check_present(path)
        try:
            with path.open("rb") as file:
                pickled, keys = _legacy_pickles(path, file)
                state = state_dict(path, pickled.value, key)
                places = _legacy_places(path, file, pickled.storages, keys)
        except OSError as error:
            raise unreadable(path, error) from error
        return TorchFile(path, pickled, places).slices(*state)

    def write(
        self, target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None
    ) -> None:
        """Write a new file; tied tensors share a storage in the file.

        Raises:
            ConfigError: torch before 1.6 had no storage type for one of the dtypes.
        """
        from torch.storage import _dtype_to_storage_type_map

        from weighin.formats.zip_writer import write_raw

        for plan in tensors:
            if plan.dtype not in _dtype_to_storage_type_map():
                raise ConfigError(
                    f"tensor {shown(plan.name)}: torch before 1.6 had no dtype {plan.dtype}",
                    "write the format pt, which has every dtype of torch: --format pt",
                )
        head, stored = _legacy_head(tensors)
        fixed, places, at = {0: head}, [], len(head)
        for plan in stored:
            fixed[at] = prod(plan.shape).to_bytes(8, "little")
            places.append((plan, at + 8))
            at += 8 + plan.nbytes
        write_raw(target, fixed, places, pieces, progress)


PT: Final = _Zip()
PT_LEGACY: Final = _Legacy()


def read_one(path: Path, name: str, archive: io.RawIOBase | None = None) -> TensorSlice:
    """Return a file's only tensor with its offset; give the tensor the name ``name``.

    If the file is no zip archive itself, ``archive`` is a zip archive inside the file. Offsets then
    count from the archive's start.

    Raises:
        CheckpointError: as for ``open_zip``, or the file holds anything but one tensor.
    """
    file = open_zip(path) if archive is None else _zip_file(path, archive)
    value = file.value
    if isinstance(value, Tensor):
        return file.slice(name, value)
    if isinstance(value, OtherTensor):
        raise unread(path, shown(name), value)
    if isinstance(value, Opaque) and value.is_foreign:
        raise holds_more(path, "it", value)
    raise CheckpointError(f"{path}: holds a {type_name(value)}, not a tensor", RESAVE)


def check_file(path: Path) -> None:
    """Raise CheckpointError unless ``path`` is a zip file; the message names the file's kind."""
    head = check_present(path)
    if is_zip(head):
        return
    if is_legacy(head):
        raise CheckpointError(
            f"{path}: written in the format of torch before 1.6, which cannot be mapped",
            resaving(path),
        )
    raise unknown(path, head)


def open_zip(path: Path) -> TorchFile:
    """Return the pickled value of a zip file, and the places of its storages.

    Raises:
        CheckpointError: the file is not a zip that ``torch.save`` wrote, or it is damaged.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            return _zip_file(path, file)
    except OSError as error:
        raise unreadable(path, error) from error


def _zip_file(path: Path, file: IO[bytes] | io.RawIOBase) -> TorchFile:
    records = _records(path, file)
    texts = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(texts) != 1:
        raise CheckpointError(
            f"{path}: the archive contains several files data.pkl, but a checkpoint of torch has one",
            RESAVE,
        )
    root = texts[0].removesuffix("data.pkl")
    start, size = records[texts[0]]
    if size > pickles.MOST_BYTES:
        raise CheckpointError(
            f"{path}: record {shown(texts[0])} has {size:,} bytes, more than the"
            f" {pickles.MOST_BYTES:,} that weighin reads",
            SHARDS,
        )
    if (order := records.get(f"{root}byteorder")) and _bytes_at(path, file, *order) != b"little":
        raise _big_endian(path)
    text = io.BytesIO(_bytes_at(path, file, start, size))
    return TorchFile(
        path,
        pickles.load(path, text, start, chunk_bytes=size),
        {
            name.removeprefix(f"{root}data/"): record
            for name, record in records.items()
            if name.startswith(f"{root}data/")
        },
    )


def _opened(path: Path, file: IO[bytes] | io.RawIOBase) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(_Directory(path, file))
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        OverflowError,
        struct.error,
    ) as error:
        if "not a zip file" in str(error):
            raise CheckpointError(f"{path}: truncated: the zip archive has no end record", AGAIN) from None  # fmt: skip
        raise _damaged(path, f"{error}") from None
    if recognised := by_records(path, [info.filename for info in archive.infolist()]):
        what, repair = recognised
        raise CheckpointError(f"{path}: {what}", repair)
    return archive


def _records(path: Path, file: IO[bytes] | io.RawIOBase) -> dict[str, Record]:
    """Return the records of a zip archive, which lie apart in the file and have different names.

    Raises:
        CheckpointError: the archive is damaged, too large, encrypted, compressed or not torch's.
    """
    start = time.monotonic()
    archive = _opened(path, file)
    late, infos = is_late(start), archive.infolist()
    headers = _headers_ahead(path, file, infos, late)
    records: dict[str, Record] = {}
    folded: dict[bytes, str] = {}
    for info in infos:
        name = info.filename
        if info.flag_bits & 1:
            raise CheckpointError(
                f"{path}: record {shown(name)} is encrypted",
                "unpack the archive with its password, and pack the files again without a"
                " password: zip -0 -r",
            )
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise CheckpointError(f"{path}: record {shown(name)} is compressed", resaving(path))
        if name in records:
            raise _damaged(path, f"record {shown(name)} occurs twice")
        # Only ASCII's case, as torch.load ignores it.
        lower = name.encode("utf-8", "surrogatepass").lower()
        if (other := folded.setdefault(lower, name)) != name:
            raise _damaged(
                path,
                f"the names of the records {shown(other)} and {shown(name)} differ only in case,"
                " and torch.load reads one of them for both",
            )
        at, header = info.header_offset, headers.get(info.header_offset, b"")
        if len(header) < _LOCAL_BYTES and 0 <= at <= archive.start_dir - _LOCAL_BYTES:
            header = _bytes_at(path, file, at, _LOCAL_BYTES)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        records[name] = at + _LOCAL_BYTES + lengths, info.file_size
        if not header.startswith(b"PK\3\4") or sum(records[name]) > archive.start_dir:
            raise _damaged(path, f"record {shown(name)} at byte {at:,} lies outside the archive")
    end, before = 0, ""
    for name, (at, size) in sorted(records.items(), key=lambda item: item[1][0]):
        if at < end:
            raise _damaged(path, f"record {shown(name)} overlaps record {shown(before)}")
        end, before = at + size, name
    if min((info.header_offset for info in infos), default=0):
        raise _damaged(path, "something lies before the archive, where torch.load would read it")
    return records


class _Directory:
    """The file as ``zipfile`` reads it: a crafted archive cannot have it read any number of bytes."""

    def __init__(self, path: Path, file: IO[bytes] | io.RawIOBase) -> None:
        self._path, self._file = path, file
        self.tell = file.tell

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        if at < 0 and whence == os.SEEK_SET:
            raise zipfile.BadZipFile("the directory lies outside the archive")
        return self._file.seek(at, whence)

    def read(self, size: int = -1) -> bytes:
        if size > MOST_DIRECTORY_BYTES:
            raise CheckpointError(
                f"{self._path}: the directory has {size:,} bytes, more than the"
                f" {MOST_DIRECTORY_BYTES:,} that weighin reads",
                SHARDS,
            )
        return self._file.read(size) or b""


def _headers_ahead(
    path: Path, file: IO[bytes] | io.RawIOBase, infos: list[zipfile.ZipInfo], late: bool
) -> dict[int, bytes]:
    """Ask the kernel to read the records' own headers ahead. If ``late`` (the disk answers slowly),
    read all of them at the same time, and return them by their offsets.
    """
    try:
        descriptor = file.fileno()
    except OSError:
        return {}  # an archive inside another file has few records
    size = os.fstat(descriptor).st_size
    infos = [info for info in infos if 0 <= info.header_offset < size]
    for info in infos if hasattr(os, "posix_fadvise") else ():
        if not (late and "/data/" in info.filename):  # a tensor's elements
            ahead = min(info.file_size, _MOST_AHEAD_BYTES) if late else 0
            ahead += io.DEFAULT_BUFFER_SIZE
            os.posix_fadvise(descriptor, info.header_offset, ahead, os.POSIX_FADV_WILLNEED)
    places = [info.header_offset for info in infos]
    return read_headers(path, places, _LOCAL_BYTES) if late else {}


def _bytes_at(path: Path, file: IO[bytes] | io.RawIOBase, at: int, size: int) -> bytes:
    file.seek(at)
    data = file.read(size) or b""
    if len(data) != size:
        raise _damaged(path, f"truncated: it ends before byte {at + size:,}")
    return data


def _legacy_pickles(path: Path, file: BinaryIO) -> tuple[pickles.Pickled, list[str]]:
    """Return the pickled value, and the keys of the storages in the order in which they lie."""
    magic, version, system = (pickles.load(path, file).value for _ in range(3))
    if magic != _MAGIC:
        raise _damaged(path, "it does not begin with the magic number of torch before 1.6")
    if version != _VERSION:
        raise CheckpointError(
            f"{path}: format version {shown(version)}, but this weighin reads {_VERSION}",
            resaving(path),
        )
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise _big_endian(path)
    pickled = pickles.load(path, file)
    keys = pickles.load(path, file).value
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise _damaged(path, "its list of storages is not a list of strings")
    return pickled, keys


def _legacy_places(
    path: Path, file: BinaryIO, storages: dict[str, pickles.Storage], keys: list[str]
) -> dict[str, Record]:
    if len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise _damaged(path, "its list of storages does not match its tensors")
    file_bytes = os.fstat(file.fileno()).st_size
    places: dict[str, Record] = {}
    at = file.tell()
    for key in keys:
        storage = storages[key]
        word = os.pread(file.fileno(), 8, at)
        places[key] = at + 8, storage.nbytes
        if sum(places[key]) > file_bytes:
            raise CheckpointError(
                f"{path}: truncated: storage {shown(key)} ends at byte {sum(places[key]):,}, "
                f"but the file ends at byte {file_bytes:,}",
                AGAIN,
            )
        if int.from_bytes(word, "little") != storage.numel:
            raise _damaged(
                path,
                f"storage {shown(key)} at byte {at:,} has {int.from_bytes(word, 'little'):,}"
                f" elements, but its tensors need {storage.numel:,}",
            )
        at = sum(places[key])
    return places


def _legacy_head(tensors: Plans) -> tuple[bytes, list[TensorPlan]]:
    """Return the pickles of a file to write, and the tensors whose storages follow them."""
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


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}", RESAVE)


def _big_endian(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: the file was written on a big-endian machine, and weighin does not read this order"
        " of bytes",
        resaving(path),
    )
