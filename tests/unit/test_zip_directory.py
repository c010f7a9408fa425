"""A crafted zip archive is named for what it is before anything in it is believed."""

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weighin.errors import CheckpointError
from weighin.formats import pickle_machine, pt, zip_directory

AGAIN = "copy or download the file again"
Change = Callable[[bytearray, int, dict[str, int]], None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(1000)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def entries(data: bytes | bytearray) -> tuple[int, list[int]]:
    """Return where the end of the directory lies, and where its entries do."""
    end = data.rfind(b"PK\5\6")
    at, places = data.find(b"PK\1\2"), []
    while data[at : at + 4] == b"PK\1\2":
        places.append(at)
        at += 46 + sum(struct.unpack_from("<3H", data, at + 28))
    return end, places


def message_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        pt.read(path)
    return caught.value.message.removeprefix(f"{path}: ")


def put(form: str, at: int, *values: object) -> Change:
    """Return a change near the end of the directory: the one of 64 bits lies 76 bytes before."""
    return lambda data, end, _: struct.pack_into(form, data, end + at, *values)


def put_entry(name: str, form: str, at: int, *values: object) -> Change:
    return lambda data, _, places: struct.pack_into(form, data, places[name] + at, *values)


def names(data: bytes | bytearray) -> list[str]:
    _, places = entries(data)
    lengths = [struct.unpack_from("<H", data, at + 28)[0] for at in places]
    return [
        bytes(data[at + 46 : at + 46 + n]).decode() for at, n in zip(places, lengths, strict=True)
    ]


# Which others there are, and in which order, differs among versions of torch.
PICKLE, DATA, VERSION = "model/data.pkl", "model/data/0", "model/version"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("<Q", -36, 2**31), "the directory has 2,147,483,648 bytes, more than the 33,554,432 that weighin reads"),
        (put("<Q", -28, 2**31), "damaged: the directory at byte 2,147,483,648 lies outside the archive"),
        (put("<Q", -28, 0), "damaged: the directory has an invalid entry"),
        (put_entry(DATA, "<H", 10, 8), "record 'model/data/0' is compressed"),
        (put_entry(DATA, "<H", 8, 1), "record 'model/data/0' is encrypted"),
        (put_entry(DATA, "<L", 20, 5), "record 'model/data/0' is compressed"),
        (put_entry(DATA, "<2L", 20, 2**31, 2**31), "damaged: record 'model/data/0' at byte {at:,} lies outside the archive"),
        (put_entry(DATA, "<2L", 20, 2**32 - 1, 2**32 - 1), "damaged: record 'model/data/0' has no 64-bit size"),
        (put_entry(DATA, "<L", 42, 2**31), "damaged: record 'model/data/0' at byte 2,147,483,648 lies outside the archive"),
        (put_entry(DATA, "<L", 42, 1), "damaged: record 'model/data/0' at byte 1 lies outside the archive"),
        (put_entry(DATA, "<L", 42, 0), "damaged: record 'model/data/0' overlaps record 'model/data.pkl'"),
        (put_entry(DATA, "<2L", 20, 3996, 3996), "damaged: the storage of 'w' has 4,000 bytes, but its record in the file has 3,996"),
        (put_entry(DATA, "12s", 46, b"model/data/1"), "damaged: the storage of 'w' has 4,000 bytes, but its record in the file has 0"),
        (put_entry(VERSION, "13s", 46, b"model/data/9x"), ""),
        (put_entry(PICKLE, "14s", 46, b"model/data.pk_"), "a file of torch.save without data.pkl, "),
        (put_entry(PICKLE, "<2L", 20, 0, 0), "damaged: the pickle from byte {pickle:,} cannot be read at byte {pickle:,}: truncated: the file ends inside the pickle"),
    ],
)  # fmt: skip
def test_a_directory_that_lies_is_named(path: Path, change: Change, message: str) -> None:
    data = bytearray(path.read_bytes())
    end, places = entries(data)
    by_name = dict(zip(names(data), places, strict=True))
    change(data, end, by_name)
    path.write_bytes(data)
    if not message:
        assert pt.read(path)[0].name == "w"
        return
    at = struct.unpack_from("<L", data, by_name[DATA] + 42)[0]
    local = struct.unpack_from("<L", data, by_name[PICKLE] + 42)[0]
    start = local + 30 + sum(struct.unpack_from("<2H", data, local + 26))
    assert message_of(path).startswith(message.format(at=at, pickle=start))


def test_a_zip_bomb_is_not_inflated(path: Path, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("model/data.pkl", bytes(50_000_000))
    assert bomb.stat().st_size < 100_000
    assert message_of(bomb) == "record 'model/data.pkl' is compressed"


def test_a_pickle_of_endless_length_is_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle_machine, "MOST_BYTES", 10)
    assert message_of(path).startswith("record 'model/data.pkl' has ")
    assert message_of(path).endswith(" bytes, more than the 10 that weighin reads")


def test_a_record_that_occurs_twice_is_refused(path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as file:
        file.writestr("model/data/0", b"other")
    assert message_of(path) == "damaged: record 'model/data/0' occurs twice"


def test_endless_records_are_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_directory, "MOST_RECORDS", 3)
    assert message_of(path) == "has more than 3 records that weighin reads"


def test_an_archive_of_a_big_endian_machine_is_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as file:
        for record in source.infolist():
            big = record.filename.endswith("byteorder")
            file.writestr(record.filename, b"big" if big else source.read(record))
    assert message_of(other).startswith("the file was written on a big-endian machine")


def test_one_of_more_than_4_gib_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    blanks = {name: torch.empty(2**30 + 1, dtype=torch.float32) for name in "abc"}
    with torch.serialization.skip_data():
        torch.save(blanks, path)
    theirs: Any = torch._C.PyTorchFileReader(str(path))
    places = pt.read(path)
    assert [place.name for place in places] == list("abc")
    for key, place in enumerate(places):
        assert place.offset == theirs.get_record_offset(f"data/{key}")
        assert place.storage_bytes == 4 * (2**30 + 1)
