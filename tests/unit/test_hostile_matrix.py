"""Each kind of harm, in each layout where it can occur, through each door of the library.

Reading, streaming and converting end in one CheckpointError that names the file and the place; nothing
is executed, nothing outside of the checkpoint is opened, and nothing is written.
"""

import io
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from harness.checkpoint import converting, layouts
from harness.checkpoint.layouts.base import TensorPlan
from harness.checkpoint.streaming import load_streaming
from harness.errors import CheckpointError

PLANS = [
    TensorPlan("a.weight", (3, 2), torch.float32),
    TensorPlan("a.weighu", (3, 2), torch.float32),  # becomes the first one's name
    TensorPlan("b.bias", (5,), torch.bfloat16),
]
DATA = {  # the file in which a.weight lies, and the one that says so
    "pt": ("", None),
    "pt_legacy": ("", None),
    "safetensors": ("", None),
    "per_param": ("a.weight.pt", "index.json"),
    "per_module": ("a.pt", "index.json"),
    "sharded": ("model-00001-of-00001.safetensors", "model.safetensors.index.json"),
    "sharded_pt": ("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"),
    "dcp": ("__0_0.distcp", ".metadata"),
}
ZIPPED = ("pt", "per_param", "per_module", "sharded_pt", "dcp")
PICKLED = (*ZIPPED, "pt_legacy")
HEADED = ("safetensors", "sharded")
INDEXED = ("per_param", "per_module", "sharded", "sharded_pt", "dcp")
JSON = INDEXED[:-1]
KEYED = ("pt", "pt_legacy", "safetensors", "per_module", "sharded", "sharded_pt")
MAGIC = 0x1950A86A20F9469CFC6C
ODD_NAMES = {
    "climbing": "../../outside/x",
    "absolute": "ABSOLUTE",
    "empty": "",
    "long": "x" * 10_000,
}


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


Said = tuple[Path, str]
Harm = Callable[[Given], Said]
CASES: list[Any] = []


def case(*names: str) -> Callable[[Harm], Harm]:
    """Try a harm in these layouts; it returns the file and the words that the error must have."""

    def register(harm: Harm) -> Harm:
        CASES.extend(pytest.param(name, harm, id=f"{harm.__name__}-{name}") for name in names)
        return harm

    return register


def change(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))


# Corrupt


@case(*layouts.NAMES)
def noise_in_the_data(given: Given) -> Said:
    given.data.write_bytes(bytes(range(256)) * 8)
    return given.data, ""


@case(*INDEXED)
def noise_in_the_index(given: Given) -> Said:
    given.index.write_bytes(bytes(range(256)) * 8)
    return given.index, "damaged"


@case(*PICKLED)
def a_corrupt_pickle(given: Given) -> Said:
    change(given.data, b"X\7\0\0\0storage", b"\xff\7\0\0\0storage")
    return given.data, "cannot be read at byte "


@case(*HEADED)
def a_corrupt_header(given: Given) -> Said:
    change(given.data, b'"a.weight":{', b'"a.weight":(')
    return given.data, "the header is not the JSON of tensors at byte "


# Truncated and missing


@case(*layouts.NAMES)
def half_of_the_data(given: Given) -> Said:
    os.truncate(given.data, given.data.stat().st_size // 2)
    return given.data, "cannot be read at byte " if given.layout == "pt_legacy" else "truncated"


@case(*layouts.NAMES)
def data_without_the_last_byte(given: Given) -> Said:
    os.truncate(given.data, given.data.stat().st_size - 1)
    return given.data, "truncated"


@case(*INDEXED)
def half_of_the_index(given: Given) -> Said:
    os.truncate(given.index, given.index.stat().st_size // 2)
    return given.index, "damaged"


@case(*layouts.NAMES)
def no_data(given: Given) -> Said:
    given.data.unlink()
    if given.layout in JSON:
        return given.index, f"{given.data.name!r} of "
    return given.data, "No such file" if given.layout == "dcp" else "no such file"


@case(*layouts.NAMES)
def a_pipe_in_place_of_the_data(given: Given) -> Said:
    given.data.unlink()
    os.mkfifo(given.data)  # opening it would wait for ever
    return (given.index, "is missing") if given.layout in JSON else (given.data, "not a file")


@case(*INDEXED)
def no_index(given: Given) -> Said:
    given.index.unlink()
    return given.path, "a folder in which no checkpoint is known"


# Overlapping, negative and enormous offsets and headers


def first_archive(data: bytes) -> tuple[int, dict[str, int]]:
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
    return given.data, "data/0' lies over record "


@case(*ZIPPED)
def a_record_at_an_enormous_offset(given: Given) -> Said:
    data = bytearray(given.data.read_bytes())
    struct.pack_into("<L", data, first_archive(data)[1]["data/0"] + 42, 2**32 - 2)
    given.data.write_bytes(data)
    return given.data, "data/0' at byte 4,294,967,294 lies outside the archive"


@case(*ZIPPED)
def an_enormous_directory(given: Given) -> Said:
    data = bytearray(given.data.read_bytes())
    struct.pack_into("<Q", data, first_archive(data)[0] - 36, 2**60)
    given.data.write_bytes(data)
    return given.data, "a directory of 1,152,921,504,606,846,976 bytes"


def entry(given: Given, name: str, **fields: object) -> None:
    data = given.data.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[name] |= fields
    text = json.dumps(header).encode()
    given.data.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@case(*HEADED)
def overlapping_offsets(given: Given) -> Said:
    entry(given, "a.weighu", data_offsets=[4, 28])
    return given.data, "tensor 'a.weighu' at byte "


@case(*HEADED)
def negative_offsets(given: Given) -> Said:
    entry(given, "a.weight", data_offsets=[-24, 0])
    return given.data, "tensor 'a.weight': [-24, 0] are not offsets"


@case(*HEADED)
def an_enormous_offset(given: Given) -> Said:
    entry(given, "b.bias", data_offsets=[2**62, 2**62 + 10])
    return given.data, "'b.bias' at byte 4,611,686,018,427,"


@case(*HEADED)
def an_enormous_shape(given: Given) -> Said:
    entry(given, "a.weight", shape=[2**40, 2**40])
    return given.data, "tensor 'a.weight': F32 of shape [1099511627776, 1099511627776] takes "


@case(*HEADED)
def an_enormous_header(given: Given) -> Said:
    given.data.write_bytes(struct.pack("<Q", 2**63) + given.data.read_bytes()[8:])
    return given.data, "announce a header of 9,223,372,036,854,775,808 bytes"


@case("pt_legacy")
def overlapping_storages(given: Given) -> Said:
    keys = pickle.dumps([str(n) for n in range(len(PLANS))], 2)
    change(given.data, keys, keys.replace(b"X\1\0\0\0001", b"X\1\0\0\0000"))
    return given.data, "the list of its storages is not that of its tensors"


@case("dcp")
def overlapping_blocks(given: Given) -> Said:
    metadata: Metadata = pickle.loads(given.index.read_bytes())
    one: Any = metadata.state_dict_metadata["a.weight"]
    one.size = torch.Size([5, 2])
    starts = torch.Size([0, 0]), torch.Size([2, 0])
    one.chunks = [ChunkStorageMetadata(start, torch.Size([3, 2])) for start in starts]
    (at,) = [index for index in metadata.storage_data if index.fqn == "a.weighu"]
    metadata.storage_data[MetadataIndex("a.weight", starts[1], 1)] = metadata.storage_data[at]
    given.index.write_bytes(pickle.dumps(metadata))
    return given.index, "the parts of 'a.weight' at (0, 0) and (2, 0) overlap"


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
        fields = storage, self.offset, self.shape, self.stride, False, OrderedDict()
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


def put_pickle(given: Given, text: bytes) -> None:
    if given.layout == "pt_legacy":
        head = b"".join(pickle.dumps(one, 2) for one in (MAGIC, 1001, {"little_endian": True}))
        given.data.write_bytes(
            head + text + pickle.dumps(["0"], 2) + struct.pack("<q", 6) + bytes(24)
        )
        return
    records = {"data.pkl": text, "byteorder": b"little", "data/0": bytes(24)}
    put_archive(given, records, zipfile.ZIP_STORED)


def put_archive(given: Given, records: dict[str, bytes], method: int) -> None:
    with zipfile.ZipFile(given.data, "w", method) as file:
        for name, record in records.items():
            file.writestr(f"m/{name}", record)
    if given.layout == "dcp":
        place(given, offset=0, length=given.data.stat().st_size)


def place(given: Given, **changes: object) -> None:
    """Change where .metadata says that a.weight lies."""
    metadata: Metadata = pickle.loads(given.index.read_bytes())
    (info,) = [one for index, one in metadata.storage_data.items() if index.fqn == "a.weight"]
    vars(info).update(changes)
    given.index.write_bytes(pickle.dumps(metadata))


@case(*PICKLED)
def a_negative_offset_in_the_pickle(given: Given) -> Said:
    put(given, Tensor(offset=-1))
    return given.data, "a tensor in storage '0' has no shape that can be"


@case(*PICKLED)
def a_negative_size(given: Given) -> Said:
    put(given, Tensor(shape=(-3, -2)))
    return given.data, "a tensor in storage '0' has no shape that can be"


@case(*PICKLED)
def a_negative_stride(given: Given) -> Said:
    put(given, Tensor(offset=5, stride=(-2, -1)))
    return given.data, "a tensor in storage '0' has no shape that can be"


@case(*PICKLED)
def an_enormous_offset_in_the_pickle(given: Given) -> Said:
    put(given, Tensor(offset=2**60))
    return given.data, "a tensor ends at byte 4,611,686,018,427,387,928 of storage '0'"


@case(*PICKLED)
def an_enormous_size(given: Given) -> Said:
    put(given, Tensor(shape=(2**40, 2**40)))
    return given.data, "a tensor in storage '0' has no shape that can be"


@case(*PICKLED)
def an_enormous_stride(given: Given) -> Said:
    put(given, Tensor(stride=(2**62, 1)))
    return given.data, "a tensor ends at byte "


@case(*PICKLED)
def an_enormous_storage(given: Given) -> Said:
    put(given, Tensor(numel=2**40))
    said = {"pt_legacy": "truncated: storage '0' ends at byte 4,398,046,511,"}
    return given.data, said.get(given.layout, "of 'a.weight' has 4,398,046,511,104 bytes")


@case(*PICKLED)
def an_enormous_text_in_the_pickle(given: Given) -> Said:
    put_pickle(given, b"\x80\x02X" + struct.pack("<I", 2**31 - 1) + b"a.")
    return given.data, "longer than 33,554,432 bytes"


@case("dcp")
def a_negative_place(given: Given) -> Said:
    place(given, offset=-1)
    return given.index, "the shape or place of 'a.weight'"


@case("dcp")
def an_enormous_place(given: Given) -> Said:
    place(given, offset=2**62)
    return given.data, "truncated: 'a.weight' ends at byte 4,611,686,018,427,"


@case("dcp")
def an_enormous_text_in_the_metadata(given: Given) -> Said:
    given.index.write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x")
    return given.index, "damaged metadata"


@case(*JSON)
def an_enormous_index(given: Given) -> Said:
    os.truncate(given.index, 2**40)  # a hole: nobody may read it
    return given.index, "1,099,511,627,776 bytes are too many for an index"


# Names of files, keys


def named(given: Given, name: str) -> str:
    """Let the index call the file of a.weight so; return that name."""
    name = name.replace("ABSOLUTE", str(given.outside))
    if given.layout == "dcp":
        place(given, relative_path=name)
        return name
    index = json.loads(given.index.read_text())
    if given.layout == "per_module":
        index["files"][name] = index["files"].pop(given.data.name)
    else:
        field = "tensors" if given.layout == "per_param" else "weight_map"
        index[field]["a.weight"] = name
    given.index.write_text(json.dumps(index))
    return name


def file_called(kind: str) -> Harm:
    def harm(given: Given) -> Said:
        name = named(given, ODD_NAMES[kind])
        if kind in ("climbing", "absolute"):
            return given.index, f"lies outside the folder: {name!r}"
        if given.layout == "dcp":
            return given.path, {"empty": "not a file", "long": "File name too long"}[kind]
        if given.layout.startswith("sharded") and not name:
            return given.index, "lies outside the folder: ''"
        return given.index, "is missing"

    harm.__name__ = f"a_file_with_a_name_that_is_{kind}"
    return harm


for _kind in ODD_NAMES:
    case(*INDEXED)(file_called(_kind))


@case(*INDEXED)
def a_key_twice_in_the_index(given: Given) -> Said:
    change(given.index, b"a.weighu", b"a.weight")
    return given.index, "'a.weight' occurs twice"


@case(*KEYED)
def a_key_twice_in_the_data(given: Given) -> Said:
    change(given.data, b"a.weighu", b"a.weight")
    return given.data, "'a.weight' occurs twice"


@case("sharded", "sharded_pt")
def a_key_in_two_shards(given: Given) -> Said:
    other = given.data.with_name("z" + given.data.suffix)
    shutil.copy(given.data, other)
    change(
        given.index, b'"b.bias": "' + given.data.name.encode(), b'"b.bias": "' + other.name.encode()
    )
    return given.data, "'b.bias' is here, by the index in "


# Bombs and code


@case(*ZIPPED)
def a_zip_bomb(given: Given) -> Said:
    put_archive(given, {"data.pkl": bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
    assert given.data.stat().st_size < 100_000
    return given.data, "record 'm/data.pkl' is compressed"


class Command:
    """Leaves a proof where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.proof}",)


@case(*PICKLED)
def a_pickle_with_code(given: Given) -> Said:
    put(given, Command(given.proof))
    return given.data, "and was NOT executed: it refers to posix.system"


@case(*HEADED)
def a_pickle_with_code_called_safetensors(given: Given) -> Said:
    given.data.write_bytes(pickle.dumps(Command(given.proof)))
    return given.data, "not a safetensors file, or damaged"


@case("dcp")
def metadata_with_code(given: Given) -> Said:
    metadata = pickle.loads(given.index.read_bytes())
    metadata.planner_data = Command(given.proof)
    given.index.write_bytes(pickle.dumps(metadata))
    return given.index, "and was NOT executed: it refers to posix.system"


# The doors


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    values = {plan.name: torch.ones(plan.shape, dtype=plan.dtype) for plan in PLANS}
    for name in layouts.NAMES:
        layout = layouts.named(name)
        layout.write(folder / f"{name}{layout.SUFFIX}", PLANS, lambda key: [values[key]])
    return folder


_opened: list[str] | None = None


@pytest.fixture(scope="module")
def audited() -> None:
    """Let every opening of a file be written down while ``_opened`` is a list."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _opened is not None:
            _opened.append("" if isinstance(arguments[0], int) else os.fsdecode(arguments[0]))

    sys.addaudithook(audit)


@pytest.fixture
def opened(audited: None) -> Iterator[list[str]]:
    global _opened  # noqa: PLW0603 (a hook stays for ever, and asks for it)
    _opened = []
    yield _opened
    _opened = None


@pytest.fixture
def give(tmp_path: Path, sound: Path) -> Callable[[str], Given]:
    def given(layout: str) -> Given:
        source = sound / f"{layout}{layouts.named(layout).SUFFIX}"
        path = tmp_path / "given" / source.name
        path.parent.mkdir()
        outside = tmp_path / "outside" / "x"
        outside.parent.mkdir()
        one = Given(layout, path, outside, tmp_path / "EXECUTED")
        shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
        shutil.copy(one.data, outside)
        return one

    return given


def test_the_matrix_has_every_layout() -> None:
    assert set(DATA) == set(layouts.NAMES)


@pytest.mark.parametrize(("layout", "harm"), CASES)
def test_harm_is_named_and_does_none(
    layout: str,
    harm: Harm,
    give: Callable[[str], Given],
    opened: list[str],
    tmp_path: Path,
) -> None:
    given = give(layout)
    assert [place.name for place in layouts.read(given.path)[1]] == [one.name for one in PLANS]
    assert str(given.data) in opened
    file, words = harm(given)
    before = sorted(tmp_path.rglob("*"))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3)})
    weight = model.get_parameter("a.weight").detach().clone()
    order = converting.Order("per_param", None, 2**40, 2**40, verify=True)
    doors: list[Callable[[], object]] = [
        lambda: layouts.read(given.path),
        lambda: load_streaming(model, given.path),
        lambda: converting.convert(given.path, tmp_path / "new", order),
    ]
    del opened[:]
    threads = torch.get_num_threads()
    for door in doors:
        with pytest.raises(CheckpointError) as caught:
            door()
        message = caught.value.message
        assert message.startswith(str(file))
        assert words in message
        assert len(message) < 1000
        assert caught.value.repair
    torch.set_num_threads(threads)
    assert torch.equal(model.get_parameter("a.weight"), weight)
    assert sorted(tmp_path.rglob("*")) == before
    assert not given.proof.exists()
    inside = [Path(os.path.normpath(one)) for one in opened if str(tmp_path) in one]
    assert all(tmp_path / "given" in one.parents for one in inside)


KEYS = {"climbing": "../../x", "absolute": "/etc/passwd", "empty": "", "long": "x" * 10_000}


@pytest.mark.parametrize("layout", layouts.NAMES)
@pytest.mark.parametrize("kind", KEYS)
def test_a_key_is_a_name_and_never_a_path(tmp_path: Path, layout: str, kind: str) -> None:
    key, path = KEYS[kind], tmp_path / "in" / f"m{layouts.named(layout).SUFFIX}"
    path.parent.mkdir()
    plans = [TensorPlan(key, (3,), torch.float32), TensorPlan("b", (2,), torch.float32)]
    layouts.named(layout).write(path, plans, lambda name: [torch.full((3 - (name == "b"),), 5.0)])
    assert [one.name for one in layouts.read(path)[1]] == [key, "b"]
    with pytest.raises(CheckpointError) as caught:
        load_streaming(torch.nn.Linear(1, 1), path)
    assert caught.value.message.startswith(f"{path}: does not fit this model, keys: ")
    assert key[:100] in caught.value.message
    assert len(caught.value.message) < 1000
    threads = torch.get_num_threads()
    for fmt in ("per_param", "per_module", "sharded"):
        order = converting.Order(fmt, None, 2**40, 2**40, verify=True)
        converting.convert(path, tmp_path / fmt, order)
        assert [one.name for one in layouts.read(tmp_path / fmt)[1]] == [key, "b"]
        assert all(one.parent == tmp_path / fmt for one in (tmp_path / fmt).rglob("*"))
    torch.set_num_threads(threads)
    assert {one.name for one in tmp_path.iterdir()} == {"in", "per_param", "per_module", "sharded"}
