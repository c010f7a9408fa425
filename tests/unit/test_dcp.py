"""dcp: torch's own loader reads what we write, we read what torch writes, and run none of it."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from weighin.checkpoint.checksum import pieces_of
from weighin.checkpoint.reader import read_pieces
from weighin.errors import CheckpointError
from weighin.stream import formats
from weighin.stream.pretrained_library import Selection
from weighin.stream.slices import TensorPlan
from weighin.stream.write import write


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(10, 7)
    return {
        "b": weight,
        "a.half": torch.randn(33).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "tied": weight,
    }


@pytest.fixture
def ours(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    tensors = [
        TensorPlan(name, tuple(one.shape), one.dtype, "b" if name == "tied" else None)
        for name, one in state.items()
    ]
    write("dcp", tmp_path / "ours", tensors, lambda name: pieces_of(state[name]))
    return tmp_path / "ours"


def check_equal(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(state)
    for name, one in state.items():
        assert torch.equal(found[name], one), name


def test_torch_loads_what_we_write(ours: Path, state: dict[str, torch.Tensor]) -> None:
    found = {name: torch.zeros_like(one) for name, one in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(found, storage_reader=FileSystemReader(ours))
    check_equal(found, state)
    assert sorted(file.name for file in ours.iterdir()) == [".metadata", "__0_0.distcp"]


def test_tied_keys_are_stored_once_and_values_are_aligned(ours: Path) -> None:
    places = {one.name: one for one in formats.read(ours)}
    assert places["tied"].offset == places["b"].offset
    assert all(one.offset % 64 == 0 for one in places.values())


@pytest.mark.parametrize("single_file", [True, False])
def test_we_read_what_torch_writes(
    tmp_path: Path, state: dict[str, torch.Tensor], single_file: bool
) -> None:
    folder = tmp_path / "theirs"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            state,
            storage_writer=FileSystemWriter(folder, single_file_per_rank=single_file),
        )
    assert formats.detect(folder) == "dcp"
    found = {}
    for one in formats.read(folder):
        pieces = [piece.clone() for piece in read_pieces(one)]
        value = torch.cat(pieces) if pieces else torch.empty(0, dtype=one.dtype)
        found[one.name] = value.reshape(one.shape)
    check_equal(found, state)
    assert {one.file for one in formats.read(folder)} <= set(formats.files(folder))


def change(folder: Path, harm: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    harm(metadata)
    path.write_bytes(pickle.dumps(metadata))


def place(metadata: Metadata, **changes: object) -> None:
    (info,) = [one for index, one in metadata.storage_data.items() if index.fqn == "b"]
    vars(info).update(changes)


def split(metadata: Metadata) -> None:
    one = metadata.state_dict_metadata["b"]
    assert isinstance(one, TensorStorageMetadata)
    one.chunks.append(ChunkStorageMetadata(torch.Size([5, 0]), torch.Size([5, 7])))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"garbage",
        b"\x80\x04N.",  # None
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # a memo of 2**31 places
        b"\x80\x04ctorch\nSize\n}\x8c\x01ak\x01s\x86b.",  # attributes for a class
        b"(" * 100_000,
    ],
)
def test_what_is_no_metadata_is_refused_in_little_memory(ours: Path, text: bytes) -> None:
    (ours / ".metadata").write_bytes(text)
    with pytest.raises(
        CheckpointError,
        match=r"\.metadata: (damaged|the pickle from byte 0 cannot be read)",
    ):
        formats.read(ours)


def test_a_path_in_the_metadata_that_takes_for_ever_to_print_is_not_printed(ours: Path) -> None:
    nested: object = "a"
    for _ in range(100):
        nested = (nested, nested)

    def harm(metadata: Metadata) -> None:
        metadata.planner_data = {"b": (nested, "b")}

    change(ours, harm)
    assert len(formats.read(ours)) == 5


@pytest.mark.parametrize("chunks", [5, True, None])
def test_chunks_that_are_no_list_are_refused(ours: Path, chunks: object) -> None:
    change(ours, lambda metadata: vars(metadata.state_dict_metadata["b"]).update(chunks=chunks))
    with pytest.raises(CheckpointError, match="the parts of 'b' leave a gap"):
        formats.read(ours)


def test_the_advice_names_the_outer_key_of_a_list(ours: Path) -> None:
    def harm(metadata: Metadata) -> None:
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        tensors["models.1.w"] = tensors.pop("b")
        (index,) = [one for one in places if one.fqn == "b"]
        places[MetadataIndex("models.1.w", index.offset, index.index)] = places.pop(index)
        tensors["step"] = BytesStorageMetadata()
        metadata.planner_data = {"models.1.w": ("models", 1, "w")}

    change(ours, harm)
    with pytest.raises(CheckpointError) as caught:
        formats.read(ours)
    assert caught.value.repair.startswith("select the weights: --key models (280 B); ")
    assert [one.name for one in formats.read(ours, Selection("models.1"))] == ["w"]


GRID = torch.arange(70.0).reshape(10, 7)
TILES = {  # where each block begins: rows halved, and the lower half cut in two
    "b": ((0, 0), GRID[:5]),
    "b.1": ((5, 0), GRID[5:, :3]),
    "b.2": ((5, 3), GRID[5:, 3:]),
}


@pytest.fixture
def split_in_three(tmp_path: Path) -> Path:
    """A checkpoint of one tensor in three blocks, and one that is whole, as several ranks save it."""
    folder = tmp_path / "split"
    blocks = {name: block.contiguous() for name, (_, block) in TILES.items()}
    blocks["whole"] = torch.tensor([1, 2, 3])
    plans = [TensorPlan(name, tuple(one.shape), one.dtype) for name, one in blocks.items()]
    write("dcp", folder, plans, lambda name: pieces_of(blocks[name]))

    def join(metadata: Metadata) -> None:
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        one = tensors["b"]
        assert isinstance(one, TensorStorageMetadata)
        one.size = GRID.shape
        one.chunks = [
            ChunkStorageMetadata(torch.Size(start), block.shape) for start, block in TILES.values()
        ]
        for number, (name, (start, _)) in enumerate(TILES.items()):
            (index,) = [each for each in places if each.fqn == name]
            places[MetadataIndex("b", torch.Size(start), number)] = places.pop(index)
            if name != "b":
                del tensors[name]

    change(folder, join)
    return folder


def test_a_tensor_in_several_blocks_is_read_as_torch_reads_it(split_in_three: Path) -> None:
    theirs = {"b": torch.zeros(10, 7), "whole": torch.zeros(3, dtype=torch.int64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(theirs, storage_reader=FileSystemReader(split_in_three))
    assert torch.equal(theirs["b"], GRID)
    slices = formats.read(split_in_three)
    ours = {one.name: torch.cat(list(read_pieces(one))).reshape(one.shape) for one in slices}
    check_equal(ours, theirs)


def harmed(**changes: tuple[int, ...]) -> Callable[[Metadata], None]:
    """Change the last block."""

    def harm(metadata: Metadata) -> None:
        tensor = metadata.state_dict_metadata["b"]
        assert isinstance(tensor, TensorStorageMetadata)
        (index,) = [one for one in metadata.storage_data if one.offset == torch.Size([5, 3])]
        place = metadata.storage_data.pop(index)
        if not changes:
            tensor.chunks.pop()
            return
        start = torch.Size(changes["start"])
        metadata.storage_data[MetadataIndex("b", start, 2)] = place
        tensor.chunks[-1] = ChunkStorageMetadata(start, torch.Size(changes.get("shape", (5, 4))))

    return harm


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (harmed(), "the parts of 'b' leave a gap in (10, 7)"),
        (harmed(start=(4, 3)), "the parts of 'b' at (0, 0) and (4, 3) overlap"),
        (harmed(start=(5, 2)), "the parts of 'b' at (5, 0) and (5, 2) overlap"),
        (harmed(start=(5, 4)), "the part of 'b' at (5, 4) is outside the shape (10, 7)"),
        (harmed(start=(5, 3), shape=(5, 3)), "the parts of 'b' leave a gap in (10, 7)"),
        (harmed(start=(5,), shape=(20,)), "the part of 'b' at (5,) is outside the shape (10, 7)"),
        (harmed(start=(2**62, 3)), "is outside the shape (10, 7)"),
        (harmed(start=(-1, 3)), "'b' is not described as a tensor"),
    ],
)
def test_blocks_that_do_not_tile_their_tensor_are_refused(
    split_in_three: Path, harm: Callable[[Metadata], None], message: str
) -> None:
    change(split_in_three, harm)
    with pytest.raises(CheckpointError) as caught:
        formats.read(split_in_three)
    assert caught.value.message.startswith(str(split_in_three / ".metadata"))
    assert message in caught.value.message
