"""Our safetensors files and the reference library's are the same to both; damage is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from harms import complaint
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from state_files import write_state

from weighin.checkpoint.convert import Conversion
from weighin.errors import CheckpointError, ConfigError
from weighin.stream import formats, safetensors_files
from weighin.stream.slices import TensorPlan
from weighin.stream.write import write as write_file

torch.manual_seed(0)
STATE = {
    "embedding": torch.randn(100, 7),
    "mask": torch.tensor([[True, False, True]]),
    "half": torch.randn(33).to(torch.bfloat16),
    "empty": torch.empty(0, 4),
    "steps": torch.tensor(3),
    "eighth": torch.randn(5).to(torch.float8_e4m3fn),
    "wave": torch.randn(2, 2, dtype=torch.complex64),
}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_reference_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_state(path, "safetensors", STATE)
    found = load_file(path)
    assert set(found) == set(STATE)
    for name, tensor in STATE.items():
        assert found[name].dtype is tensor.dtype
        assert bytes_of(found[name]) == bytes_of(tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_metadata_may_be_null_as_for_the_reference_library(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, path := tmp_path / "model.safetensors", {"x": "y"})
    path.write_bytes(path.read_bytes().replace(b'{"x":"y"}', b"null     "))
    with safe_open(path, "pt") as file:
        assert file.metadata() is None
    assert [one.name for one in safetensors_files.read(path)] == ["a"]


def test_we_read_what_the_reference_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(STATE, path)
    places = safetensors_files.read(path)
    assert {place.name for place in places} == set(STATE)
    for place in places:
        one, content = STATE[place.name], path.read_bytes()
        assert (place.shape, place.stride, place.dtype) == (one.shape, one.stride(), one.dtype)
        assert content[place.offset : place.offset + place.nbytes] == bytes_of(one)


def test_ties_survive_after_the_other_names_and_the_data_are_aligned(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tied = {"head": STATE["embedding"], "last": STATE["wave"]}
    write_state(
        path,
        "safetensors",
        {"embedding": STATE["embedding"], "head": STATE["embedding"]} | STATE | tied,
    )
    places = {place.name: place for place in safetensors_files.read(path)}
    assert list(places) == [*STATE, "head", "last"]
    assert places["head"].storage_offset == places["embedding"].storage_offset
    assert places["head"].contiguous
    assert all(place.offset % place.dtype.itemsize == 0 for place in places.values())
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == 0
    assert set(load_file(path)) == set(STATE)


def tied_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def test_the_ties_of_save_model_are_read_and_load_model_reads_ours(tmp_path: Path) -> None:
    theirs, ours, model = tmp_path / "a.safetensors", tmp_path / "b.safetensors", tied_model()
    save_model(model, str(theirs), metadata={"format": "pt"})
    places = {place.name: place for place in safetensors_files.read(theirs)}
    assert set(places) == set(model.state_dict())
    assert places["1.weight"].offset == places["0.weight"].offset
    write_state(ours, "safetensors", model.state_dict())
    other = tied_model()
    load_model(other, ours)
    assert torch.equal(other.get_parameter("1.weight"), model.get_parameter("0.weight"))


@pytest.mark.parametrize("numel", [9, 11])
def test_pieces_of_another_length_are_refused(tmp_path: Path, numel: int) -> None:
    plan = TensorPlan("w", (10,), torch.float32)
    with pytest.raises(ValueError, match="for a tensor whose size"):
        write_file("safetensors", tmp_path / "m", [plan], lambda _: [torch.zeros(numel)])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (TensorPlan("w", (1,), torch.complex128), "tensor 'w': safetensors has no dtype torch.complex128"),
        (TensorPlan("__metadata__", (1,), torch.float32), "a tensor has the name '__metadata__', which is reserved in the header"),
        (TensorPlan("format", (1,), torch.float32, "w"), "a tensor has the name 'format', which is reserved in the header"),
    ],
)  # fmt: skip
def test_what_the_format_cannot_hold_is_refused_before_a_byte(
    tmp_path: Path, plan: TensorPlan, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        write_file("safetensors", tmp_path / "m.safetensors", [plan], lambda _: [])
    assert caught.value.message == message
    assert list(tmp_path.iterdir()) == []


def entry(begin: int, end: int, shape: object = None, dtype: object = "F32") -> dict[str, object]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def damaged(path: Path, header: object, data_bytes: int = 8) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))


LONG = "x" * 10_000
LACKS = "needs a text as dtype, and lists as shape and data_offsets"
DEEP = b'{"a":{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}}"
TWICE = b'{"a":' + json.dumps(entry(0, 8)).encode() + b',"a":{}}'


def impossible(shape: object, begin: int, end: int, dtype: str = "F32", name: str = "'a'") -> str:
    return f"damaged: tensor {name}: {dtype} of shape {shape} at the offsets [{begin}, {end}] is impossible"


# harms.py has further lies of headers, which all three doors refuse.
@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(0, 8, [-2])}, impossible([-2], 0, 8)),
        ({"a": entry(0, 8, [3])}, impossible([3], 0, 8)),
        ({"a": entry(0, 8, [4, 4, 0], "F4")}, impossible([4, 4, 0], 0, 8, "F4")),
        ({"a": entry(0, 8, dtype=[])}, f"damaged: tensor 'a' {LACKS}"),
        ({"a": None}, f"damaged: tensor 'a' {LACKS}"),
        ({"a": 1}, f"damaged: tensor 'a' {LACKS}"),
        ({"a": {"b": {}}}, f"damaged: tensor 'a' {LACKS}"),
        ({"a": entry(0, 4), "b": entry(5, 9)}, "damaged: tensor 'b' at byte 135 leaves a gap after tensor 'a'"),
        ({"a": entry(4, 8)}, "damaged: tensor 'a' at byte 73 leaves a gap after the header"),
        ({"a": entry(0, 16)}, "truncated: tensor 'a' ends at byte 86, but the file ends at byte 78"),
        ({"a": entry(0, 4, [1])}, "damaged: 4 bytes after tensor 'a' belong to no tensor"),
        ({"a": entry(0, 8, [True, 2])}, impossible([True, 2], 0, 8)),
        ({"a": entry(0, 8, [1] * 65)}, impossible(f"{str([1] * 65)[:100]}...", 0, 8)),
        ({"a": entry(8, 0, [2])}, impossible([2], 8, 0)),
        ({"a": entry(0, 2**64, [2])}, impossible([2], 0, 2**64)),
        ({"a": entry(0, 0, [0, 2**62, 4])}, impossible([0, 2**62, 4], 0, 0)),
        ({"a": entry(0, 8, [3], "F4")}, impossible([3], 0, 8, "F4")),
        ({"a": entry(0, 0, [0, 3], "F4")}, impossible([0, 3], 0, 0, "F4")),
        ({"a": entry(0, 8, dtype="F6_E2M3")}, "tensor 'a' has the dtype 'F6_E2M3'; torch does not have this dtype"),
        ({"a": entry(0, 8, dtype="F32X")}, "tensor 'a' has the dtype 'F32X'; weighin does not know this dtype"),
        ({"a": {}}, f"damaged: tensor 'a' {LACKS}"),
        ({LONG: entry(0, 8, [3])}, impossible([3], 0, 8, name=f"'{LONG[:100]}'... (10,000 characters)")),
        ({"__metadata__": {"a": 1}}, "damaged: __metadata__: 'a' is not a string"),
        (TWICE, "damaged: the header is not JSON: 'a' occurs twice"),
        (b'{"a":{"dtype":"F32","dtype":"F32"}}', "damaged: the header is not JSON: 'dtype' occurs twice"),
        (DEEP, "damaged: the header is not JSON: it is nested too deeply"),
        (b"{} x", "damaged: the header is not JSON: Extra data: line 1 column 4 (char 3)"),
        ((b"\x02\0\0",), "truncated: 3 bytes, but a safetensors file has 10 or more"),
        ((b"\x64" + bytes(7) + b"{}",), "truncated: the header ends at byte 108, but the file ends at byte 10"),
        ((b"",), "empty file"),
    ],
)  # fmt: skip
def test_a_damaged_header_or_length_is_named_with_its_place(
    tmp_path: Path, header: Any, message: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header[0]) if isinstance(header, tuple) else damaged(path, header)
    error = complaint(safetensors_files.read, path)
    assert error.message == f"{path}: {message}"
    assert ("download" in error.repair) == message.startswith(("truncated", "empty"))


@pytest.mark.parametrize(
    "header",
    ['{"a":[' + "[]," * 700_000, '{"a":[' + "1," * 2_000_001, "{" + '"":1 ' * 2_000_001],
    ids=["brackets", "commas", "colons"],
)
def test_a_header_of_endless_entries_is_given_up(tmp_path: Path, header: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(CheckpointError, match="its header lists more than weighin reads in one"):
        safetensors_files.read(path)


def test_a_sparse_file_of_100_gib_is_read_at_once(tmp_path: Path) -> None:
    path, size = tmp_path / "huge.safetensors", 100 * 1024**3
    damaged(path, {"a": entry(0, size)}, 0)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size)
    assert safetensors_files.read(path)[0].nbytes == size


@pytest.mark.parametrize(
    ("name", "begin"),
    [("shard-00001-model-00001-of-00001.safetensors", 0), ("shard-00001-model-00001-of-00001.safetensors", 4),
     ("model-00001-of-00001.safetensors", 10), ("renamed.safetensors", 12)],
)  # fmt: skip
def test_a_part_of_a_tensor_is_neither_read_nor_converted(
    tmp_path: Path, name: str, begin: int
) -> None:
    """As torch's HuggingFaceStorageWriter writes the rows of a rank from ``begin`` on."""
    info = json.dumps({"weight": {"saved_offsets": [begin, 0]}})
    metadata = {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"}
    save_file({"weight": torch.ones(4, 10)}, file := tmp_path / name, metadata)
    for act in (lambda: formats.read(file), Conversion(file, tmp_path / "made.pt").write):
        assert refused(act).startswith(f"{file}: a shard of torch's distributed checkpoint (")
    assert [one.name for one in tmp_path.iterdir()] == [name]
