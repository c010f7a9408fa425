"""Read the files of ``torch.save``: zip archives, and the format of torch before 1.6.

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
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from weighin.errors import CheckpointError
from weighin.stream import pickles
from weighin.stream.foreign import (
    AGAIN,
    RESAVE,
    SHARDS,
    check_present,
    damaged,
    is_legacy,
    is_zip,
    map_late,
    other_zip,
    resaving,
    truncated,
    unknown,
    unreadable,
)
from weighin.stream.pickles import Opaque, type_name
from weighin.stream.slices import Checkpoint, Slice
from weighin.stream.state_dicts import no_tensor, state_dict
from weighin.text import shown

MAGIC: Final = 0x1950A86A20F9469CFC6C
VERSION: Final = 1001

_MOST_DIRECTORY_BYTES: Final = 8 * 1024**2  # of a zip file: the directory of 100,000 tensors
_LOCAL_BYTES: Final = 30  # of a record's own header, before its name

Record = tuple[int, int]
"""The offset of a record's first byte in the file, and the record's size in bytes."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The pickled value of a file, as records, and the place of each storage by the storage's key.

    ``refused`` is the first name in the pickle that torch.load(weights_only=True) refuses; or "".
    ``damage`` tells why no storage has a place; or "".
    """

    path: Path
    value: Any
    refused: str
    places: dict[str, Record]
    damage: str = ""

    def slice(self, name: str, tensor: Slice) -> Slice:
        """Return where a tensor of the pickle lies, under the name ``name``."""
        if self.damage:
            raise damaged(self.path, self.damage)
        start, size = self.places.get(tensor.name, (0, 0))
        if tensor.storage_bytes != size:  # torch.load refuses a longer record, too
            what = f"has {tensor.storage_bytes:,} bytes, but its record in the file has {size:,}"
            raise damaged(self.path, f"the storage of {shown(name)} {what}")
        offset, dtype = start + tensor.offset, tensor.dtype_name
        return Slice(name, tensor.shape, tensor.stride, dtype, self.path, offset, start, size)

    def checkpoint(self, key: str) -> Checkpoint:
        """Return the state dict at ``key`` in nested dicts, or the whole value for the key ""."""
        tensors, values, metadata = state_dict(self.path, self.value, key)
        found = Checkpoint(self.slice(name, tensor) for name, tensor in tensors.items())
        found.files, found.values, found.metadata = (self.path,), values, metadata
        found.refused = self.refused
        return found


def read(path: Path, key: str = "") -> Checkpoint:
    """Return the state dict in a file of ``torch.save``; for GPT-2 XL, this takes 0.03 s.

    Raises:
        CheckpointError: the file is damaged or of another kind, or has no flat state dict at ``key``.
    """
    found = open_file(path).checkpoint(key)
    found.format = "pt_legacy" if is_legacy(check_present(path)) else "pt"
    return found


def read_one(path: Path, name: str, base: int = 0, length: int | None = None) -> Slice:
    """Return the only tensor in a file, or in the archive of ``length`` bytes that begins at the byte
    ``base`` of a file, under the name ``name``.
    """
    file = open_file(path, base, length)
    value = file.value
    if isinstance(value, Slice):
        return file.slice(name, value)
    if isinstance(value, Opaque) and (value.is_tensor or value.is_foreign):
        raise no_tensor(path, name, value)
    raise CheckpointError(f"{path}: holds a {type_name(value)}, not a tensor", RESAVE)


def open_file(path: Path, base: int = 0, length: int | None = None) -> TorchFile:
    """Return the pickled value of a file of ``torch.save``, or of the archive of ``length`` bytes that
    begins at the byte ``base`` of a file, and its storages' places.
    """
    head = check_present(path) if length is None else b"PK"
    if not is_legacy(head) and not is_zip(head):
        raise unknown(path, head)
    try:
        with path.open("rb") as file:
            if is_legacy(head):
                return _open_legacy(path, file)
            size = os.fstat(file.fileno()).st_size if length is None else length
            return _open_archive(_Window(path, file.fileno(), base, size))
    except OSError as error:
        raise unreadable(path, error) from error


class _Window:
    """``length`` bytes of an open file from the byte ``base`` on, as ``zipfile`` reads them.

    A crafted archive cannot have it read any number of bytes.
    """

    def __init__(self, path: Path, descriptor: int, base: int, length: int) -> None:
        self.path, self.descriptor, self.base, self.length = path, descriptor, base, length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        at += {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if at < 0:
            raise OSError("the directory lies outside the archive")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.length - self._at)
        data = self.bytes_at(self._at, left if size < 0 else min(size, left), _MOST_DIRECTORY_BYTES)
        self._at += len(data)
        return data

    def bytes_at(self, at: int, size: int, most: int) -> bytes:
        if size > most:
            what = f"the directory or pickle has {size:,} bytes, more than the {most:,} that weighin reads"
            raise CheckpointError(f"{self.path}: {what}", SHARDS)
        inside = max(0, min(size, self.length - at)) if at >= 0 else 0
        return os.pread(self.descriptor, inside, self.base + at) if inside else b""


def _open_archive(window: _Window) -> TorchFile:
    path, records = window.path, _records(window)
    texts = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(texts) != 1:
        what = f"the archive holds {len(texts)} files data.pkl, but a checkpoint of torch has one"
        raise CheckpointError(f"{path}: {what}", RESAVE)
    root = texts[0].removesuffix("data.pkl")
    order = records.get(f"{root}byteorder")
    if order and window.bytes_at(*order, pickles.MOST_BYTES) != b"little":
        raise _big_endian(path)
    start, size = records[texts[0]]
    text = io.BytesIO(window.bytes_at(start, size, pickles.MOST_BYTES))
    pickled = pickles.load(path, text, start)
    places = {
        name.removeprefix(f"{root}data/"): (window.base + at, size)
        for name, (at, size) in records.items()
        if name.startswith(f"{root}data/")
    }
    return TorchFile(path, pickled.value, pickled.refused, places)


def _records(window: _Window) -> dict[str, Record]:
    """Return the records of a zip archive, which lie apart in the file and have different names."""
    path = window.path
    try:
        archive = zipfile.ZipFile(window)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:  # fmt: skip
        if "not a zip file" in str(error):
            what = "truncated: the zip archive has no end record"
            raise CheckpointError(f"{path}: {what}", AGAIN) from None
        raise damaged(path, f"{error}") from None
    infos, end = archive.infolist(), archive.start_dir
    if other := other_zip(path, [info.filename for info in infos]):
        raise other
    for at in (info.header_offset for info in infos if 0 <= info.header_offset < end):
        # The disk may read all headers at the same time.
        size = io.DEFAULT_BUFFER_SIZE
        os.posix_fadvise(window.descriptor, window.base + at, size, os.POSIX_FADV_WILLNEED)

    def header(info: zipfile.ZipInfo) -> bytes:
        return window.bytes_at(info.header_offset, _LOCAL_BYTES, _LOCAL_BYTES)

    records: dict[str, Record] = {}
    folded: dict[bytes, str] = {}
    for info, head in zip(infos, map_late(header, infos), strict=True):
        name, shows = info.filename, f"record {shown(info.filename)}"
        if info.flag_bits & 1:
            way = "unpack it with its password, and pack the files again without one: zip -0 -r"
            raise CheckpointError(f"{path}: {shows} is encrypted", way)
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise CheckpointError(f"{path}: {shows} is compressed", resaving(path))
        # Only ASCII's case, as torch.load ignores it.
        lower = name.encode("utf-8", "surrogatepass").lower()
        if (other_name := folded.setdefault(lower, name)) != name or name in records:
            what = f"{shows} and record {shown(other_name)} have one name for torch.load"
            raise damaged(path, what)
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        at = info.header_offset + _LOCAL_BYTES + lengths
        records[name] = at, info.file_size
        if not head.startswith(b"PK\3\4") or at + info.file_size > end:
            what = f"{shows} at byte {info.header_offset:,} lies outside the archive"
            raise damaged(path, what)
    at, before = 0, ""
    for name, (begin, size) in sorted(records.items(), key=lambda item: item[1][0]):
        if begin < at:
            raise damaged(path, f"record {shown(name)} overlaps record {shown(before)}")
        at, before = begin + size, name
    if min((info.header_offset for info in infos), default=0):
        raise damaged(path, "something lies before the archive, where torch.load would read it")
    return records


def _open_legacy(path: Path, file: BinaryIO) -> TorchFile:
    magic, version, system = (pickles.load(path, file).value for _ in range(3))
    if (magic, version) != (MAGIC, VERSION):
        what = f"of another version than {VERSION}, which this weighin reads"
        raise CheckpointError(f"{path}: {what}", resaving(path))
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise _big_endian(path)
    pickled = pickles.load(path, file)
    keys, storages = pickles.load(path, file).value, pickled.storages
    file_bytes, at = os.fstat(file.fileno()).st_size, file.tell()
    if not isinstance(keys, list) or {*map(type_name, keys)} - {"str"}:
        raise damaged(path, "its list of storages is not a list of strings")
    if sorted(keys) != sorted(storages):
        # An object that torch does not load is named before this damage: its first tensor is refused.
        what = "its list of storages does not match its tensors"
        return TorchFile(path, pickled.value, pickled.refused, {}, what)
    places: dict[str, Record] = {}
    for key in keys:
        name, end = f"storage {shown(key)}", at + 8 + storages[key].nbytes
        if end > file_bytes:
            raise truncated(path, name, end, file_bytes)
        numel = int.from_bytes(os.pread(file.fileno(), 8, at), "little")
        if numel != storages[key].numel:
            what = f"has {numel:,} elements, but its tensors need {storages[key].numel:,}"
            raise damaged(path, f"{name} at byte {at:,} {what}")
        places[key] = at + 8, end - at - 8
        at = end
    return TorchFile(path, pickled.value, pickled.refused, places)


def _big_endian(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: the file was written on a big-endian machine, and weighin does not read this order"
        " of bytes",
        resaving(path),
    )
