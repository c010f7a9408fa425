"""Each kind of harm that can be done to a checkpoint, in each layout where it can occur: the table HARMS."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from weighin.errors import CheckpointError

STATE = {
    "a.weight": torch.ones(3, 2),
    "a.weighu": torch.ones(3, 2),  # becomes the first one's name
    "b.bias": torch.ones(5, dtype=torch.bfloat16),
}
DATA = {  # the file in which a.weight lies, and the one that says so
    "pt": ("", None), "pt_legacy": ("", None), "safetensors": ("", None),
    "per_param": ("a.weight.pt", "index.json"), "per_module": ("a.pt", "index.json"),
    "sharded": ("model-00001-of-00001.safetensors", "model.safetensors.index.json"),
    "sharded_pt": ("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"),
    "dcp": ("__0_0.distcp", ".metadata"),
}  # fmt: skip
ALL = tuple(DATA)
ZIPPED = ("pt", "per_param", "per_module", "sharded_pt", "dcp")
PICKLED = (*ZIPPED, "pt_legacy")
HEADED = ("safetensors", "sharded")
SHARDS = ("sharded", "sharded_pt", "dcp")
INDEXED = ("per_param", "per_module", *SHARDS)
ALONE = ("pt", "pt_legacy", "safetensors")
JSON = INDEXED[:-1]
KEYED = (*ALONE, "per_module", "sharded", "sharded_pt")
NOISE = bytes(range(256)) * 8


@dataclass(frozen=True)
class Given:
    """A sound checkpoint to harm, beside a sound file that nobody may open."""

    layout: str
    path: Path
    outside: Path
    proof: Path

    @property
    def data(self) -> Path:
        return self.path / name if (name := DATA[self.layout][0]) else self.path

    @property
    def index(self) -> Path:
        return self.path / str(DATA[self.layout][1])


Harm = Callable[[Given], object]


def complaint(read: Callable[..., object], *arguments: Any) -> CheckpointError:
    """Return the error with which a checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        read(*arguments)
    return caught.value


def change(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))


def half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


class Command:
    """Leaves a proof where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.proof}",)


# Pickles and archives -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Storage:
    numel: int


@dataclass(frozen=True)
class Tensor:
    """What a pickle says of a tensor of 24 bytes."""

    offset: int = 0
    shape: tuple[int, ...] = (3, 2)
    stride: tuple[int, ...] = (2, 1)
    numel: int = 6

    def __reduce__(self) -> tuple[object, ...]:
        storage = Storage(self.numel)
        hooks: OrderedDict[object, object] = OrderedDict()
        fields = storage, self.offset, self.shape, self.stride, False, hooks
        return torch._utils._rebuild_tensor_v2, fields


def put(given: Given, value: object) -> None:
    """Write a file of data that pickles this in place of a.weight, or of the state dict it lies in."""
    file = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, one: object) -> object:
            if isinstance(one, Storage):
                return "storage", torch.FloatStorage, "0", "cpu", one.numel, None
            return None

    alone = given.layout in ("per_param", "dcp")
    Pickler(file, protocol=2).dump(value if alone else {"a.weight": value})
    put_pickle(given, file.getvalue())


def legacy(text: bytes, keys: tuple[str, ...] = ()) -> bytes:
    """Return the beginning of a file of torch before 1.6: its head, this pickle, and the storages' keys."""
    head = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    return b"".join(pickle.dumps(one, 2) for one in head) + text + pickle.dumps([*keys], 2)


def put_pickle(given: Given, text: bytes) -> None:
    if given.layout == "pt_legacy":
        given.data.write_bytes(legacy(text, ("0",)) + struct.pack("<q", 6) + bytes(24))
        return
    records = {"data.pkl": text, "byteorder": b"little", "data/0": bytes(24)}
    put_archive(given, records, zipfile.ZIP_STORED)


def put_archive(given: Given, records: dict[str, bytes], method: int) -> None:
    with zipfile.ZipFile(given.data, "w", method) as file:
        for name, record in records.items():
            file.writestr(f"m/{name}", record)
    if given.layout == "dcp":
        place(given, offset=0, length=given.data.stat().st_size)


def zip_bomb(given: Given) -> None:
    put_archive(given, {"data.pkl": bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
    assert given.data.stat().st_size < 100_000


def first_archive(data: bytes | bytearray) -> tuple[int, dict[str, int]]:
    """Return where the end of the first archive's directory lies, and its entries by their names."""
    end, at, found = data.find(b"PK\5\6"), data.find(b"PK\1\2"), {}
    while data[at : at + 4] == b"PK\1\2":
        lengths = struct.unpack_from("<3H", data, at + 28)
        found[data[at + 46 : at + 46 + lengths[0]].decode().partition("/")[2]] = at
        at += 46 + sum(lengths)
    return end, found


def move_record(given: Given, to: int | str) -> None:
    """Let the directory say that the values begin there, or where another record does."""
    data = bytearray(given.data.read_bytes())
    _, entries = first_archive(data)
    if isinstance(to, str):
        (to,) = struct.unpack_from("<L", data, entries[to] + 42)
    struct.pack_into("<L", data, entries["data/0"] + 42, to)
    given.data.write_bytes(data)


def enormous_directory(given: Given) -> None:
    data = bytearray(given.data.read_bytes())
    struct.pack_into("<Q", data, first_archive(data)[0] - 36, 2**60)
    given.data.write_bytes(data)


def overlapping_storages(given: Given) -> None:
    keys = pickle.dumps([str(n) for n in range(len(STATE))], 2)
    change(given.data, keys, keys.replace(b"X\1\0\0\0001", b"X\1\0\0\0000"))


# Headers, indexes and metadata --------------------------------------------------------------------


def entry(given: Given, name: str, **fields: object) -> None:
    """Change what the header of safetensors says of a tensor."""
    data = given.data.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[name] |= fields
    put_header(given, json.dumps(header).encode(), data[end:])


def put_header(given: Given, text: bytes, data: bytes = bytes(8)) -> None:
    given.data.write_bytes(len(text).to_bytes(8, "little") + text + data)


def named(given: Given, name: str) -> None:
    """Let the index call the file of a.weight so."""
    if given.layout == "dcp":
        place(given, relative_path=name)
        return
    index = json.loads(given.index.read_text())
    if given.layout == "per_module":
        index["files"][name] = index["files"].pop(given.data.name)
    else:
        index["tensors" if given.layout == "per_param" else "weight_map"]["a.weight"] = name
    given.index.write_text(json.dumps(index))


def metadata_of(given: Given, harm: Callable[[Metadata], object]) -> None:
    metadata: Metadata = pickle.loads(given.index.read_bytes())
    harm(metadata)
    given.index.write_bytes(pickle.dumps(metadata))


def place(given: Given, **changes: object) -> None:
    """Change where .metadata says that a.weight lies."""

    def harm(metadata: Metadata) -> None:
        (info,) = [one for index, one in metadata.storage_data.items() if index.fqn == "a.weight"]
        vars(info).update(changes)

    metadata_of(given, harm)


def overlapping_blocks(metadata: Metadata) -> None:
    one: Any = metadata.state_dict_metadata["a.weight"]
    one.size = torch.Size([5, 2])
    starts = torch.Size([0, 0]), torch.Size([2, 0])
    one.chunks = [ChunkStorageMetadata(start, torch.Size([3, 2])) for start in starts]
    (at,) = [index for index in metadata.storage_data if index.fqn == "a.weighu"]
    metadata.storage_data[MetadataIndex("a.weight", starts[1], 1)] = metadata.storage_data[at]


def replace(file: Path, make: Callable[[Path], object]) -> None:
    file.unlink()
    make(file)  # opening a pipe would wait for ever


# The table ----------------------------------------------------------------------------------------

IMPOSSIBLE = "a tensor in storage '0' has an impossible shape"
OUTSIDE = "overlaps another, or lies outside the archive"
OBJECT = b'{"dtype": "F32", "shape": [], "data_offsets": []}'

# What is done, in which layouts, to what, and the file and the words that the error must have.
HARMS: list[tuple[str, tuple[str, ...], Harm, str, str]] = [
    ("noise_in_the_data", ALL, lambda g: g.data.write_bytes(NOISE), "data", ""),
    ("noise_in_the_index", INDEXED, lambda g: g.index.write_bytes(NOISE), "index", "damaged"),
    ("nothing_in_the_index", INDEXED, lambda g: os.truncate(g.index, 0), "index", ""),
    ("a_corrupt_pickle", PICKLED, lambda g: change(g.data, b"X\7\0\0\0storage", b"\xff\7\0\0\0storage"), "data", "weighin does not know the instruction 0xff"),
    ("a_corrupt_header", HEADED, lambda g: change(g.data, b'"a.weight":{', b'"a.weight":('), "data", "the header is not JSON: "),
    ("half_of_the_data", ALL, lambda g: half(g.data), "data", "truncated"),
    ("data_without_the_last_byte", ALL, lambda g: os.truncate(g.data, g.data.stat().st_size - 1), "data", "truncated"),
    ("half_of_the_index", INDEXED, lambda g: half(g.index), "index", "truncated"),
    ("no_data", INDEXED, lambda g: g.data.unlink(), "index", "'{data}', which holds "),
    ("no_data", ALONE, lambda g: g.data.unlink(), "data", "no such file"),
    ("a_pipe_in_place_of_the_data", INDEXED, lambda g: replace(g.data, os.mkfifo), "index", "is missing"),
    ("a_pipe_in_place_of_the_data", ALONE, lambda g: replace(g.data, os.mkfifo), "data", "not a file"),
    ("no_index", SHARDS, lambda g: g.index.unlink(), "path", "shards without their index"),
    ("no_index", ("per_param", "per_module"), lambda g: g.index.unlink(), "path", "no config.json and no index"),
    ("overlapping_storages", ("pt_legacy",), overlapping_storages, "data", "of 'a.weight' has 24 bytes, but its record in the file has 0"),
    ("a_negative_offset_in_the_pickle", PICKLED, lambda g: put(g, Tensor(offset=-1)), "data", IMPOSSIBLE),
    ("a_negative_size", PICKLED, lambda g: put(g, Tensor(shape=(-3, -2))), "data", IMPOSSIBLE),
    ("a_negative_stride", PICKLED, lambda g: put(g, Tensor(offset=5, stride=(-2, -1))), "data", IMPOSSIBLE),
    ("an_enormous_offset_in_the_pickle", PICKLED, lambda g: put(g, Tensor(offset=2**60)), "data", IMPOSSIBLE),
    ("an_enormous_size", PICKLED, lambda g: put(g, Tensor(shape=(2**40, 2**40))), "data", IMPOSSIBLE),
    ("an_enormous_stride", PICKLED, lambda g: put(g, Tensor(stride=(2**62, 1))), "data", IMPOSSIBLE),
    ("an_enormous_storage", ZIPPED, lambda g: put(g, Tensor(numel=2**40)), "data", "of 'a.weight' has 4,398,046,511,104 bytes"),
    ("an_enormous_storage", ("pt_legacy",), lambda g: put(g, Tensor(numel=2**40)), "data", "truncated: storage '0' ends at byte 4,398,046,511,"),
    ("an_enormous_text_in_the_pickle", PICKLED, lambda g: put_pickle(g, b"\x80\x02X" + struct.pack("<I", 2**31 - 1) + b"a."), "data", "the file ends inside the pickle"),
    ("a_pickle_with_code", PICKLED, lambda g: put(g, Command(g.proof)), "data", "refers to posix.system"),
    ("overlapping_records", ZIPPED, lambda g: move_record(g, "data.pkl"), "data", OUTSIDE),
    ("a_record_at_an_enormous_offset", ZIPPED, lambda g: move_record(g, 2**32 - 2), "data", f"data/0' at byte 4,294,967,294 {OUTSIDE}"),
    ("an_enormous_directory", ZIPPED, enormous_directory, "data", "Bad offset for central directory"),
    ("a_zip_bomb", ZIPPED, zip_bomb, "data", "record 'm/data.pkl' is compressed"),
    ("overlapping_offsets", HEADED, lambda g: entry(g, "a.weighu", data_offsets=[4, 28]), "data", "tensor 'a.weighu' at byte "),
    ("negative_offsets", HEADED, lambda g: entry(g, "a.weight", data_offsets=[-24, 0]), "data", "data_offsets [-24, 0] do not fit F32 of shape [3, 2]"),
    ("an_enormous_offset", HEADED, lambda g: entry(g, "b.bias", data_offsets=[2**62, 2**62 + 10]), "data", "'b.bias' at byte 4,611,686,018,427,"),
    ("an_enormous_shape", HEADED, lambda g: entry(g, "a.weight", shape=[2**40, 2**40]), "data", " do not fit F32 of shape [1099511627776, 1099511627776]"),
    ("an_enormous_header", HEADED, lambda g: g.data.write_bytes(struct.pack("<Q", 2**63) + g.data.read_bytes()[8:]), "data", "its first bytes are 00 00 00 00 00 00 00 80"),
    ("a_pickle_with_code_called_safetensors", HEADED, lambda g: g.data.write_bytes(pickle.dumps(Command(g.proof))), "data", "a pickle that torch.save did not write, and was NOT executed"),
    ("a_header_that_is_a_list", HEADED, lambda g: put_header(g, b"[]"), "data", "weighin does not know this kind of file"),
    ("a_header_that_is_a_number", HEADED, lambda g: put_header(g, b"1"), "data", "weighin does not know this kind of file"),
    ("metadata_that_is_a_list", HEADED, lambda g: put_header(g, b'{"__metadata__": []}'), "data", "__metadata__"),
    ("metadata_that_is_a_number", HEADED, lambda g: put_header(g, b'{"__metadata__": 1}'), "data", "__metadata__"),
    ("a_header_that_is_an_entry", HEADED, lambda g: put_header(g, OBJECT), "data", "the header is not a JSON object of tensors"),
    ("a_file_with_a_name_that_is_climbing", INDEXED, lambda g: named(g, "../../outside/x"), "index", "lies outside the folder: '../../outside/x'"),
    ("a_file_with_a_name_that_is_absolute", INDEXED, lambda g: named(g, str(g.outside)), "index", "lies outside the folder: '{outside}'"),
    ("a_file_with_a_name_that_is_empty", INDEXED, lambda g: named(g, ""), "index", "lies outside the folder: ''"),
    ("a_file_with_a_name_that_is_long", INDEXED, lambda g: named(g, "x" * 10_000), "index", "is missing"),
    ("a_key_twice_in_the_index", INDEXED, lambda g: change(g.index, b"a.weighu", b"a.weight"), "index", "'a.weight' occurs twice"),
    ("a_key_twice_in_the_data", KEYED, lambda g: change(g.data, b"a.weighu", b"a.weight"), "data", "'a.weight' occurs twice"),
    ("an_enormous_index", JSON, lambda g: os.truncate(g.index, 2**40), "index", "has 1,099,511,627,776 bytes of JSON, more than weighin reads"),  # a hole

    ("overlapping_blocks", ("dcp",), lambda g: metadata_of(g, overlapping_blocks), "index", "the parts of 'a.weight' at (0, 0) and (2, 0) overlap"),
    ("a_negative_place", ("dcp",), lambda g: place(g, offset=-1), "index", "no valid place of 'a.weight'"),
    ("an_enormous_place", ("dcp",), lambda g: place(g, offset=2**62), "data", "truncated: 'a.weight' ends at byte 4,611,686,018,427,"),
    ("an_enormous_text_in_the_metadata", ("dcp",), lambda g: g.index.write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x"), "index", "the file ends inside the pickle"),
    ("metadata_with_code", ("dcp",), lambda g: metadata_of(g, lambda one: vars(one).update(planner_data=Command(g.proof))), "index", "did NOT execute it: it refers to posix.system"),
]  # fmt: skip
