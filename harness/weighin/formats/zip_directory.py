"""Find the records of a zip archive that ``torch.save`` wrote, with the standard library alone.

This module does not use Python's ``zipfile``, because a crafted archive can make ``zipfile`` read a
directory of any size into memory. The module does not use torch's reader, because weighin's own
process must not import torch. The records of an accepted archive are not compressed, lie within the
file, do not overlap, and have unique names. ``recognise`` names the kind of an archive that
another program wrote.
"""

import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import DEFAULT_BUFFER_SIZE, RawIOBase
from itertools import islice
from pathlib import Path
from typing import IO, Final

from weighin.errors import CheckpointError
from weighin.formats.parallel_headers import is_late, read_headers
from weighin.formats.recognise import by_records, is_legacy, is_zip, resaving
from weighin.formats.unknown_file import AGAIN, RESAVE, SHARDS, check_present, shown, unknown

MOST_DIRECTORY_BYTES: Final = 32 * 1024**2
MOST_RECORDS: Final = 250_000

# _END: magic number, disks, entries, size and offset of the directory, length of the comment.
_END: Final = struct.Struct("<4s4H2LH")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64: Final = struct.Struct("<4sLQL")
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_LONGEST_COMMENT: Final = 65_535
_ENCRYPTED: Final = 1
_MOST_AHEAD_BYTES: Final = 1024**2  # of the pickle's record, which the kernel reads ahead


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record of an archive: the offset of its first byte in the file, and its size in bytes."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the directory, with the offset of the record's local header."""

    name: str
    flags: int
    method: int
    packed: int
    size: int
    local_at: int


class Archive:
    """The checked records of one archive; keep ``file`` open as long as you read records."""

    def __init__(self, path: Path, file: IO[bytes] | RawIOBase) -> None:
        """Read the archive's directory from ``file``; errors name the file ``path``.

        Raises:
            CheckpointError: the archive is damaged, too large, encrypted, compressed or not torch's.
        """
        self._path, self._file = path, file
        self._size = file.seek(0, os.SEEK_END)
        start = time.monotonic()
        at, length = self._directory()
        late = is_late(start)
        self.records: dict[str, ZipRecord] = {}
        folded: dict[bytes, str] = {}
        entries = list(islice(self._entries(self._read(at, length)), MOST_RECORDS + 1))
        if recognised := by_records(path, [entry.name for entry in entries]):
            what, repair = recognised
            raise CheckpointError(f"{path}: {what}", repair)
        self._headers = self._announce(entries, late)
        for entry in entries:
            name = entry.name
            if entry.flags & _ENCRYPTED:
                raise CheckpointError(
                    f"{path}: record {shown(name)} is encrypted",
                    "unpack the archive with its password, and pack the files again without a"
                    " password: zip -0 -r",
                )
            if entry.method or entry.packed != entry.size:
                raise CheckpointError(f"{path}: record {shown(name)} is compressed", resaving(path))
            if name in self.records:
                raise self._damaged(f"record {shown(name)} occurs twice")
            plain = name.encode(
                "utf-8", "surrogateescape"
            ).lower()  # torch.load ignores ASCII's case
            if (other := folded.setdefault(plain, name)) != name:
                raise self._damaged(
                    f"the names of the records {shown(other)} and {shown(name)} differ only in case,"
                    " and torch.load reads one of them for both"
                )
            if len(self.records) == MOST_RECORDS:
                raise self._beyond(f"has more than {MOST_RECORDS:,} records")
            self.records[name] = self._record(name, entry.local_at, entry.size, at)
        self._check_apart()

    def read(self, name: str, at_most: int) -> bytes:
        """Return the bytes of a record.

        Raises:
            CheckpointError: the record is missing, or longer than ``at_most`` bytes.
        """
        record = self.records.get(name)
        if record is None:
            raise self._damaged(f"record {shown(name)} is missing")
        if record.size > at_most:
            raise self._beyond(
                f"record {shown(name)} has {record.size:,} bytes, more than the {at_most:,}"
            )
        return self._read(record.start, record.size)

    def _directory(self) -> tuple[int, int]:
        tail_at = max(0, self._size - _END.size - _LONGEST_COMMENT)
        tail = self._read(tail_at, self._size - tail_at)
        end_at = tail.rfind(b"PK\5\6")
        if end_at < 0 or len(tail) - end_at < _END.size:
            raise CheckpointError(
                f"{self._path}: truncated: the zip archive has no end record", AGAIN
            )
        *_, length, at, _comment = _END.unpack_from(tail, end_at)
        limit = tail_at + end_at
        if end_at >= _LOCATOR64.size and tail[end_at - _LOCATOR64.size :].startswith(b"PK\6\7"):
            limit = _LOCATOR64.unpack_from(tail, end_at - _LOCATOR64.size)[2]
            magic, *_, length, at = _END64.unpack(self._read(limit, _END64.size))
            if magic != b"PK\6\6":
                raise self._damaged(f"byte {limit:,} is not the end record of the zip directory")
        if length > MOST_DIRECTORY_BYTES:
            raise self._beyond(
                f"the directory has {length:,} bytes, more than the {MOST_DIRECTORY_BYTES:,}"
            )
        if at + length > limit:
            raise self._damaged(f"the directory at byte {at:,} lies outside the archive")
        return at, length

    def _entries(self, directory: bytes) -> Iterator[_Entry]:
        at = 0
        while at < len(directory):
            if len(directory) - at < _ENTRY.size:
                raise self._damaged("the directory ends in the middle of an entry")
            fields = _ENTRY.unpack_from(directory, at)
            flags, method, packed, size = fields[3], fields[4], fields[8], fields[9]
            name_bytes, extra_bytes, comment_bytes, local_at = *fields[10:13], fields[16]
            at += _ENTRY.size
            name = directory[at : at + name_bytes].decode("utf-8", "surrogateescape")
            extra = directory[at + name_bytes : at + name_bytes + extra_bytes]
            at += name_bytes + extra_bytes + comment_bytes
            if fields[0] != b"PK\1\2" or at > len(directory):
                raise self._damaged("the directory has an invalid entry")
            size, packed, local_at = self._wide(name, extra, [size, packed, local_at])
            yield _Entry(name, flags, method, packed, size, local_at)

    def _wide(self, name: str, extra: bytes, values: list[int]) -> list[int]:
        """Return ``values``, with 64-bit numbers from the extra field in place of 0xFFFFFFFF."""
        wanted = [place for place, value in enumerate(values) if value == 0xFFFFFFFF]
        at = 0
        while wanted and at + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, at)
            if kind == 1 and 8 * len(wanted) <= min(length, len(extra) - at - 4):
                wide = struct.unpack_from(f"<{len(wanted)}Q", extra, at + 4)
                for place, value in zip(wanted, wide, strict=True):
                    values[place] = value
                return values
            at += 4 + length
        if wanted:
            raise self._damaged(f"record {shown(name)} has no 64-bit size")
        return values

    def _announce(self, entries: Sequence[_Entry], late: bool) -> dict[int, bytes]:
        """Ask the kernel to read the archive's local headers ahead. If ``late`` (the disk answers
        slowly), read all of them at the same time.

        Return the bytes of each header that was read, by the header's offset; {} unless ``late``.
        """
        try:
            descriptor = self._file.fileno()
        except OSError:
            return {}  # an archive inside another file has few records
        entries = [one for one in entries if one.local_at < self._size]
        if hasattr(os, "posix_fadvise"):
            for one in entries:
                if not (late and "/data/" in one.name):  # a tensor's elements
                    size = DEFAULT_BUFFER_SIZE + (min(one.size, _MOST_AHEAD_BYTES) if late else 0)
                    os.posix_fadvise(descriptor, one.local_at, size, os.POSIX_FADV_WILLNEED)
        if not late:
            return {}
        return read_headers(self._path, [one.local_at for one in entries], _LOCAL.size)

    def _record(self, name: str, local_at: int, size: int, directory_at: int) -> ZipRecord:
        if local_at + _LOCAL.size <= directory_at:
            text = self._headers.get(local_at, b"")
            if len(text) < _LOCAL.size:
                text = self._read(local_at, _LOCAL.size)
            header = _LOCAL.unpack(text)
            start = local_at + _LOCAL.size + header[9] + header[10]
            if header[0] == b"PK\3\4" and start + size <= directory_at:
                return ZipRecord(start, size)
        raise self._damaged(f"record {shown(name)} at byte {local_at:,} lies outside the archive")

    def _check_apart(self) -> None:
        end, before = 0, ""
        for name, record in sorted(self.records.items(), key=lambda item: item[1].start):
            if record.start < end:
                raise self._damaged(f"record {shown(name)} overlaps record {shown(before)}")
            end, before = record.start + record.size, name

    def _read(self, at: int, size: int) -> bytes:
        if at + size > self._size:
            raise self._damaged(f"truncated: it ends at byte {self._size:,}, not {at + size:,}")
        self._file.seek(at)
        data = self._file.read(size) or b""
        if len(data) != size:
            raise CheckpointError(
                f"{self._path}: another program truncated the file while weighin read it", AGAIN
            )
        return data

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: damaged: {what}", RESAVE)

    def _beyond(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what} that weighin reads", SHARDS)


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
