"""Files of torch.save: both ways with torch itself; a crafted one is named, and nothing in it is executed."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harms import complaint, legacy
from snapshots import Compare, answered
from state_files import write_state

from weighin.stream import foreign, pickles, torch_files

torch.manual_seed(0)
EMBEDDING = torch.randn(100, 7)
STATE = {
    "embedding": EMBEDDING,
    "mask": torch.tensor([True, False, True]),
    "half": torch.randn(33).to(torch.bfloat16),
    "empty": torch.empty(0, 4),
    "steps": torch.tensor(3),
    "head": EMBEDDING,
}


def save(value: object, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("ours", [True, False])
def test_slices_lead_to_the_values(tmp_path: Path, ours: bool) -> None:
    path = tmp_path / "model.pth"
    state = STATE if ours else STATE | {"view": EMBEDDING.t()[2:5]}
    write_state(path, "pt_legacy", state) if ours else save(state, path)
    data = path.read_bytes()
    places = {place.name: place for place in torch_files.read(path)}
    assert list(places) == list(state)
    assert places["head"].storage_offset == places["embedding"].storage_offset
    for name, tensor in state.items():
        place = places[name]
        assert (place.shape, place.stride) == (tensor.shape, tensor.stride())
        assert place.contiguous == tensor.is_contiguous()
        if place.contiguous:
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert data[place.offset : place.offset + place.nbytes] == raw


OTHER_LENGTH = "damaged: the storage of 'w' has {} bytes, but its record in the file has"


def message_of(path: Path) -> str:
    return complaint(torch_files.read, path).message.removeprefix(f"{path}: ")


def pickled(*instructions: bytes) -> bytes:
    return b"\x80\x02" + b"".join(instructions) + b"."


FLOATS = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\2NtQ"


PLACE = b"K\0K\2\x85K\1\x85"  # the offset, shape and stride


CRAFTED = Path(__file__).with_name("snapshots") / "crafted_pickles.txt"
"""Add a line ``$ INSTRUCTIONS``, and ``pytest --rewrite`` writes what is said of their pickle."""
WORDS = {b"{floats}": FLOATS, b"{place}": PLACE, b"{long}": b"x" * 2000}


def test_a_crafted_pickle_is_named(tmp_path: Path, same: Compare) -> None:
    def answer(question: str) -> str:
        instructions = question.encode().decode("unicode_escape").encode("latin1")
        for word, meaning in WORDS.items():
            instructions = instructions.replace(word, meaning)
        error = complaint(pickles.load, tmp_path / "x", io.BytesIO(pickled(instructions)))
        return str(error).replace(str(tmp_path / "x"), "FILE")

    same(CRAFTED.name, answered(CRAFTED, answer))


HOOKS = b"ccollections\nOrderedDict\n)RK\1K\2s"
INT32 = b"ctorch\nint32\n"


@pytest.mark.parametrize(
    ("function", "more", "dtype"),
    [
        (b"tensor_v2", b"\x89" + HOOKS, "float32"),
        (b"tensor_v2", INT32 + HOOKS, "float32"),
        (b"tensor_v3", b"\x89" + HOOKS + INT32, "int32"),
        (b"tensor_v3", INT32 + HOOKS + INT32 + b"}", "int32"),
    ],
)
def test_only_the_place_of_an_argument_says_what_it_is(
    tmp_path: Path, function: bytes, more: bytes, dtype: str
) -> None:
    call = b"ctorch._utils\n_rebuild_" + function + b"\n(" + FLOATS + PLACE + more + b"tR"
    found = pickles.load(tmp_path / "x", io.BytesIO(pickled(call))).value
    assert (found.dtype_name, found.shape) == (dtype, (2,))


def test_a_pickle_that_grows_without_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "_MOST_OBJECTS", 1000)
    monkeypatch.setattr(pickles, "_MOST_INSTRUCTIONS", 3000)
    text = b"\x80\x02X" + struct.pack("<I", 2**25) + bytes(2**25)
    for data, limit in (
        (pickled(b"]" * 2000), "more than 1,000 objects"),
        (pickled(b"(" * 2000), "more than 1,000 objects"),
        (pickled(b"N" + b"\x94" * 2000), "more than 1,000 objects"),
        (pickled(b"N" * 4000), "more than 3,000 instructions"),
        (text, "longer than 33,554,432 bytes"),
        (pickled(b"ctorch\n" + b"x" * 2**25), "longer than 33,554,432 bytes"),
    ):
        error = complaint(pickles.load, tmp_path / "x", io.BytesIO(data))
        assert error.message == f"{tmp_path / 'x'}: the pickle cannot be read: {limit}"
        assert error.repair.startswith("if you trust the file, load it with torch.load(")
    far = pickled(b"]r" + struct.pack("<I", 2**31))  # no memory for all the places before it
    assert pickles.load(tmp_path / "x", io.BytesIO(far)).value == []


def test_no_byte_after_a_pickle_is_read(tmp_path: Path) -> None:
    class File(io.BytesIO):
        furthest = 0

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            self.furthest = max(self.furthest, self.tell())
            return data

    data = pickle.dumps(bytes(100_000), protocol=2)
    file = File(data + bytes(2**22))
    assert len(pickles.load(tmp_path / "x", file).value.contents[0][0]) == 100_000
    assert file.furthest == file.tell() == len(data)


def test_one_list_is_not_copied_by_every_call_that_names_it(tmp_path: Path) -> None:
    pairs = b"".join(b"M" + struct.pack("<H", number) + b"N\x86" for number in range(300))
    ordered = b"ccollections\nOrderedDict\nq\1"
    data = pickled(b"](" + pairs + b"eq\0", ordered, b"h\1h\0\x85R" * 3, b"\x87")
    first, *others = pickles.load(tmp_path / "x", io.BytesIO(data)).value
    assert (len(first), others) == (300, [{}, {}])


@pytest.mark.parametrize("keys", [(), ("0", "0"), ("0", "1"), ("1",)])
def test_a_list_of_other_storages_is_refused(tmp_path: Path, keys: tuple[str, ...]) -> None:
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + FLOATS + PLACE + b"\x89}tR"
    head = legacy(pickled(b"}X\1\0\0\0w" + call + b"s"), keys)
    (path := tmp_path / "model.pth").write_bytes(head + struct.pack("<q", 2) + bytes(8))
    assert message_of(path) == f"{OTHER_LENGTH.format(8)} 0"


# Zip archives


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(1000)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def rewritten(path: Path, changes: dict[str, Callable[[bytes], bytes]]) -> Path:
    """Write the archive again, with the content of these records changed."""
    other = path.with_name("other.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as file:
        for record in source.infolist():
            change = changes.get(record.filename, bytes)
            file.writestr(record.filename, change(source.read(record)))
    return other


@pytest.mark.parametrize("name", ["model/data/0", "model/DATA/0"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_with_one_name_for_torch_are_refused(path: Path, name: str) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"other")
    assert message_of(path) == (
        f"damaged: torch.load cannot tell record {name!r} from record 'model/data/0'"
    )
    reader = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record("data/0") == reader.get_record("DATA/0")


@pytest.mark.parametrize("length", [3960, 4040])
def test_a_storage_of_another_length_than_its_record_is_refused_as_by_torch(
    path: Path, length: int
) -> None:
    other = rewritten(path, {"model/data/0": lambda data: (data + bytes(40))[:length]})
    assert message_of(other) == f"{OTHER_LENGTH.format('4,000')} {length:,}"
    with pytest.raises(RuntimeError, match="record size"):
        torch.load(other, weights_only=True)


def test_an_archive_of_a_big_endian_machine_is_refused(path: Path) -> None:
    other = rewritten(path, {"model/byteorder": lambda _: b"big"})
    assert message_of(other).startswith("written on a big-endian machine")


def test_an_error_without_a_number_of_the_kernel_is_told_in_its_own_words(path: Path) -> None:
    with pytest.raises(OSError, match="begins before byte 0") as raised:
        torch_files._Window(path, -1, 0, 10).seek(-11, io.SEEK_END)
    assert (
        foreign.unreadable(path, raised.value).message == f"{path}: cannot be read: {raised.value}"
    )


def test_one_of_more_than_4_gib_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    blanks = {name: torch.empty(2**30 + 1, dtype=torch.float32) for name in "abc"}
    with torch.serialization.skip_data():
        torch.save(blanks, path)
    theirs: Any = torch._C.PyTorchFileReader(str(path))
    places = torch_files.read(path)
    assert [place.name for place in places] == list("abc")
    for key, place in enumerate(places):
        assert place.offset == theirs.get_record_offset(f"data/{key}")
        assert place.storage_bytes == 4 * (2**30 + 1)
