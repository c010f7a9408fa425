"""Our safetensors files and the reference library's are the same to both; damage is named."""

import json
import os
from pathlib import Path

import pytest
import torch
from factories import refused
from harms import complaint
from model_differences import state_differences
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from snapshots import Compare, answered
from state_files import write_state

from weighin.checkpoint.convert import Conversion
from weighin.errors import ConfigError
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


def test_the_reference_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_state(path, "safetensors", STATE)
    assert state_differences(load_file(path), STATE) == []
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_metadata_may_be_null_as_for_the_reference_library(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, path := tmp_path / "model.safetensors", {"x": "y"})
    path.write_bytes(path.read_bytes().replace(b'{"x":"y"}', b"null     "))
    with safe_open(path, "pt") as file:
        assert file.metadata() is None
    assert [one.name for one in safetensors_files.read(path)] == ["a"]


def test_ties_survive_after_the_other_names_and_the_data_are_aligned(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    first = {"embedding": STATE["embedding"], "head": STATE["embedding"]}
    write_state(path, "safetensors", first | STATE | {"last": STATE["wave"]})
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


UNFIT = {
    "tensor 'w': safetensors cannot store torch.complex128": TensorPlan("w", (1,), torch.complex128),
    "a tensor is called '__metadata__', a name that safetensors reserves": TensorPlan("__metadata__", (1,), torch.float32),
    "a tensor is called 'format', a name that safetensors reserves": TensorPlan("format", (1,), torch.float32, "w"),
}  # fmt: skip


@pytest.mark.parametrize("message", UNFIT)
def test_what_the_format_cannot_hold_is_refused_before_a_byte(tmp_path: Path, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write_file("safetensors", tmp_path / "m.safetensors", [UNFIT[message]], lambda _: [])
    assert caught.value.message == message
    assert list(tmp_path.iterdir()) == []


HEADERS = Path(__file__).with_name("snapshots") / "damaged_headers.txt"
"""Add a line ``$ HEADER``, of a file with 8 bytes of data, or ``$ bytes HEX``; ``pytest --rewrite`` writes what
is said of it. harms.py has further lies of headers, which all three doors refuse."""
WORDS = {
    "{deep}": "[" * 20_000 + "]" * 20_000,
    "{long}": "x" * 10_000,
    "{65 times 1}": str([1] * 65),
}


def written(path: Path, header: str, data_bytes: int = 8) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(data_bytes))
    return path


def test_a_damaged_header_or_length_is_named_with_its_place(tmp_path: Path, same: Compare) -> None:
    path = tmp_path / "model.safetensors"

    def answer(question: str) -> str:
        for word, meaning in WORDS.items():
            question = question.replace(word, meaning)
        if question.startswith("bytes"):
            path.write_bytes(bytes.fromhex(question.removeprefix("bytes")))
        else:
            written(path, question)
        return str(complaint(safetensors_files.read, path)).replace(str(path), "FILE")

    same(HEADERS.name, answered(HEADERS, answer))


@pytest.mark.parametrize(
    "header",
    ['{"a":[' + "[]," * 700_000, '{"a":[' + "1," * 2_000_001, "{" + '"":1 ' * 2_000_001],
    ids=["brackets", "commas", "colons"],
)
def test_a_header_of_endless_entries_is_given_up(tmp_path: Path, header: str) -> None:
    path = written(tmp_path / "model.safetensors", header, 0)
    said = "its header lists more tensors or metadata than weighin reads in one"
    assert said in complaint(safetensors_files.read, path).message


def test_a_sparse_file_of_100_gib_is_read_at_once(tmp_path: Path) -> None:
    size = 100 * 1024**3
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    path = written(tmp_path / "huge.safetensors", json.dumps({"a": entry}), 0)
    os.truncate(path, path.stat().st_size + size)
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
