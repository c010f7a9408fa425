"""Zip archives whose directories lie, or whose records are compressed."""

import struct
import zipfile

from harms.given import ZIPPED, Given, Said, case
from harms.pickles import put_archive


def first_archive(data: bytes | bytearray) -> tuple[int, dict[str, int]]:
    """Return where the end of the first archive's directory lies, and its entries by their names."""
    end, at, found = data.find(b"PK\5\6"), data.find(b"PK\1\2"), {}
    while data[at : at + 4] == b"PK\1\2":
        lengths = struct.unpack_from("<3H", data, at + 28)
        found[data[at + 46 : at + 46 + lengths[0]].decode().partition("/")[2]] = at
        at += 46 + sum(lengths)
    return end, found


@case(*ZIPPED)
def overlapping_records(given: Given) -> Said:
    data = bytearray(given.data.read_bytes())
    _, entries = first_archive(data)
    (at,) = struct.unpack_from("<L", data, entries["data.pkl"] + 42)
    struct.pack_into("<L", data, entries["data/0"] + 42, at)
    given.data.write_bytes(data)
    return given.data, "overlaps another, or lies outside the archive"


@case(*ZIPPED)
def a_record_at_an_enormous_offset(given: Given) -> Said:
    data = bytearray(given.data.read_bytes())
    struct.pack_into("<L", data, first_archive(data)[1]["data/0"] + 42, 2**32 - 2)
    given.data.write_bytes(data)
    return given.data, "data/0' at byte 4,294,967,294 overlaps another, or lies outside the archive"


@case(*ZIPPED)
def an_enormous_directory(given: Given) -> Said:
    data = bytearray(given.data.read_bytes())
    struct.pack_into("<Q", data, first_archive(data)[0] - 36, 2**60)
    given.data.write_bytes(data)
    return given.data, "Bad offset for central directory"


@case(*ZIPPED)
def a_zip_bomb(given: Given) -> Said:
    put_archive(given, {"data.pkl": bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
    assert given.data.stat().st_size < 100_000
    return given.data, "record 'm/data.pkl' is compressed"
