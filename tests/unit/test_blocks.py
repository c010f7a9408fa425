"""dcp: torch's own loader reads what we write, we read what torch writes, and run none of it.

What several ranks saved in blocks becomes the right tensor, in place, in little memory.
"""

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from harms import complaint
from model_differences import differences
from state_files import assert_same, read_state, write_state
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from weighin.stream import filling, formats
from weighin.stream.bytes import PIECE_BYTES, Readers, allocate
from weighin.stream.load_streaming import Granularity, load_streaming
from weighin.stream.pretrained_library import Selection
from weighin.stream.slices import Checkpoint, Slice
from weighin.units import MIB

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:.*TypedStorage")

Blocks = list[tuple[tuple[int, ...], torch.Tensor]]
Cut = Callable[[torch.Tensor], Blocks]
Harm = Callable[[Any], object]
PEAK_SETUP = """
import torch
from weighin.stream.load_streaming import load_streaming
model = lambda: torch.nn.Linear(4096, 8192, bias=False)
"""
PEAK_LOAD = "load_streaming(model, sys.argv[1], dtype=getattr(torch, sys.argv[2]))"
STATE = {
    "b": torch.randn(10, 7, generator=torch.Generator().manual_seed(0)),
    "a.half": torch.arange(33.0).to(torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3),
}
STATE["tied"] = STATE["b"]


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    write_state(tmp_path / "ours", "dcp", STATE)
    return tmp_path / "ours"


def read_by_torch(folder: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(one) for name, one in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(found, storage_reader=FileSystemReader(folder))
    return found


def test_torch_loads_what_we_write_aligned_and_each_tied_tensor_once(ours: Path) -> None:
    assert_same(read_by_torch(ours, STATE), STATE)
    assert sorted(file.name for file in ours.iterdir()) == [".metadata", "__0_0.distcp"]
    places = {one.name: one for one in formats.read(ours)}
    assert places["tied"].offset == places["b"].offset
    assert all(one.offset % 64 == 0 for one in places.values())


@pytest.mark.parametrize("single_file", [True, False])
def test_we_read_what_torch_writes(tmp_path: Path, single_file: bool) -> None:
    folder = tmp_path / "theirs"
    save(STATE, storage_writer=FileSystemWriter(folder, single_file_per_rank=single_file))
    assert formats.detect(folder) == "dcp"
    assert_same(read_state(folder), STATE)
    assert {one.file for one in formats.read(folder)} <= set(formats.files(folder))


def tiles(*counts: int) -> Cut:
    """Return what cuts a tensor into so many blocks along each dimension, uneven ones at its end."""

    def cut(tensor: torch.Tensor) -> Blocks:
        found = []
        steps = [-(-size // count) for size, count in zip(tensor.shape, counts, strict=False)]
        ranges = [range(0, size, step) for size, step in zip(tensor.shape, steps, strict=False)]
        for start in product(*ranges):
            place = tuple(slice(at, at + step) for at, step in zip(start, steps, strict=True))
            whole = start + (0,) * (tensor.ndim - len(start))
            found.append((whole, tensor[place].contiguous()))
        return found

    return cut


def turned(tensor: torch.Tensor) -> Blocks:
    """Cut as ``tiles(2, 2)``, each block with its last dimension outermost in the file."""
    return [
        (start, block.transpose(0, -1).contiguous().transpose(0, -1))
        for start, block in tiles(2, 2)(tensor)
    ]


def changed(folder: Path, harm: Harm) -> None:
    """Change what .metadata says."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    harm(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def write(folder: Path, state: dict[str, torch.Tensor], cut: Cut) -> Path:
    """Write a checkpoint as several ranks would: each block of each tensor at a place of its own."""
    cuts = {name: cut(tensor) for name, tensor in state.items() if tensor.ndim > 1}
    stored = {name: tensor for name, tensor in state.items() if name not in cuts}
    for name, found in cuts.items():
        stored |= {f"{name}#{number}": block for number, (_, block) in enumerate(found)}
    save(stored, storage_writer=FileSystemWriter(folder))

    def join(metadata: Any) -> None:
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        at = {index.fqn: index for index in places}
        for name, found in cuts.items():
            chunks = []
            for number, (start, block) in enumerate(found):
                described = tensors.pop(f"{name}#{number}")
                place = places.pop(at[f"{name}#{number}"])
                places[MetadataIndex(name, torch.Size(start), number)] = place
                chunks.append(ChunkStorageMetadata(torch.Size(start), block.shape))
            described.size, described.chunks = state[name].shape, chunks
            tensors[name] = described

    changed(folder, join)
    return folder


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(13, 10)
        self.stacked = torch.nn.Parameter(torch.randn(4, 6, 10))
        self.register_buffer("steps", torch.arange(35).reshape(5, 7))


CUTS: dict[str, tuple[Cut, Granularity, torch.dtype | None]] = {
    "rows": (tiles(3), "all", None),
    "columns": (tiles(1, 4), "all", None),
    "turned": (turned, "all", None),
    "cubes": (lambda one: tiles(*(2,) * one.ndim)(one), "tensor", torch.float32),
    "tiles in bfloat16": (tiles(2, 3), "module", torch.bfloat16),
}


@pytest.mark.parametrize("most", [PIECE_BYTES, 96, 8])
@pytest.mark.parametrize("name", CUTS)
def test_blocks_become_the_tensor_that_they_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    (cut, granularity, dtype), right = CUTS[name], Model()
    path = write(tmp_path / "split", right.state_dict(), cut)
    assert_same(read_by_torch(path, right.state_dict()), right.state_dict())
    assert all(len(one.parts) > 1 for one in formats.read(path) if len(one.shape) > 1)
    monkeypatch.setattr(filling, "_readers", lambda *_: Readers(2, most, late=True))
    found = load_streaming(Model, path, granularity=granularity, dtype=dtype)
    assert differences(found, right.to(dtype) if dtype else right) == []


def test_names_of_the_same_blocks_stay_tied(tmp_path: Path) -> None:
    weight = torch.arange(35.0).reshape(5, 7)
    path = write(tmp_path / "split", {"0.weight": weight}, tiles(1, 2))

    def tie(metadata: Any) -> None:
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        tensors["1.weight"] = tensors["0.weight"]
        for index, place in [*places.items()]:
            places[MetadataIndex("1.weight", index.offset, index.index)] = place

    changed(path, tie)
    model = torch.nn.Sequential(*(torch.nn.Linear(7, 5, bias=False) for _ in "ab"))
    model[1].weight = model[0].weight
    load_streaming(model, path)
    assert model[1].weight is model[0].weight
    assert torch.equal(model.get_parameter("0.weight"), weight)


def test_blocks_with_gaps_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.arange(16.0).numpy().tofile(tmp_path / "data")
    where = Slice("weight", (4, 2), (4, 1), "float32", tmp_path / "data", 0, 0, 64)
    parts = (replace(where, start=(0, 0)), replace(where, start=(0, 2), offset=8))
    whole = replace(where, shape=(4, 4), stride=(4, 1), parts=parts)
    monkeypatch.setattr(formats, "read", lambda *_: Checkpoint([whole]))
    model = load_streaming(torch.nn.Linear(4, 4, bias=False), tmp_path)
    assert torch.equal(model.get_parameter("weight"), torch.arange(16.0).view(4, 4))


@pytest.mark.parametrize(
    ("cut", "dtype", "mib"),
    [(tiles(3), "float32", 128), (tiles(1, 3), "float32", 128), (tiles(1, 3), "bfloat16", 64)],
    ids=["rows", "columns", "columns in bfloat16"],
)
def test_blocks_take_no_more_memory_than_the_model(
    tmp_path: Path, cut: Cut, dtype: str, mib: int, torch_fork_server: ForkServer
) -> None:
    path = write(tmp_path / "split", {"weight": torch.zeros(8192, 4096)}, cut)  # 128 MiB
    peak = torch_fork_server.peak_of(PEAK_SETUP, PEAK_LOAD, path, dtype)
    assert 0 < peak < mib * 1.01 * MIB + 16 * MIB


@pytest.mark.parametrize(("offset", "lead"), [(0, 0), (4096 + 72, 64), (8192, 0), (74, 64)])
def test_memory_begins_in_its_page_as_its_stretch_in_the_file(offset: int, lead: int) -> None:
    """A disk writes into it without a buffer then, but where torch would not let a tensor begin."""
    memory = allocate(MIB, torch.float32, torch.device("cpu"), offset)
    assert memory.data_ptr() % (2 * MIB) == lead
    assert memory.fill_(1).sum() == MIB


# Metadata that lie


def test_a_path_in_the_metadata_that_takes_for_ever_to_print_is_not_printed(ours: Path) -> None:
    nested: object = "a"
    for _ in range(100):
        nested = (nested, nested)
    changed(ours, lambda metadata: setattr(metadata, "planner_data", {"b": (nested, "b")}))
    assert len(formats.read(ours)) == 5


def test_the_advice_names_the_outer_key_of_a_list(ours: Path) -> None:
    def harm(metadata: Any) -> None:
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        tensors["models.1.w"] = tensors.pop("b")
        (index,) = [one for one in places if one.fqn == "b"]
        places[MetadataIndex("models.1.w", index.offset, index.index)] = places.pop(index)
        tensors["step"] = BytesStorageMetadata()
        metadata.planner_data = {"models.1.w": ("models", 1, "w")}

    changed(ours, harm)
    assert complaint(formats.read, ours).repair.startswith(
        "select the weights: --key models (280 B); "
    )
    assert [one.name for one in formats.read(ours, Selection("models.1"))] == ["w"]


GRID = torch.arange(70.0).reshape(10, 7)


def three(_: torch.Tensor) -> Blocks:
    """Halve the rows, and cut the lower half in two."""
    parts = ((0, 0), GRID[:5]), ((5, 0), GRID[5:, :3]), ((5, 3), GRID[5:, 3:])
    return [(start, part.contiguous()) for start, part in parts]


def last_block(start: tuple[int, ...] = (), shape: tuple[int, ...] = (5, 4)) -> Harm:
    """Return what says of the last block that it is elsewhere, or not there."""

    def harm(metadata: Any) -> None:
        chunks, places = metadata.state_dict_metadata["b"].chunks, metadata.storage_data
        (index,) = [one for one in places if one.offset == torch.Size([5, 3])]
        place, _ = places.pop(index), chunks.pop()
        if start:
            places[MetadataIndex("b", torch.Size(start), 2)] = place
            chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(shape)))

    return harm


def no_list(chunks: object) -> Harm:
    return lambda metadata: vars(metadata.state_dict_metadata["b"]).update(chunks=chunks)


UNTILED: dict[str, tuple[Harm, str]] = {
    "gone": (last_block(), "the parts of 'b' do not fill (10, 7)"),
    "above": (last_block((4, 3)), "the parts of 'b' at (0, 0) and (4, 3) overlap"),
    "left": (last_block((5, 2)), "the parts of 'b' at (5, 0) and (5, 2) overlap"),
    "right": (last_block((5, 4)), "the part of 'b' at (5, 4) is outside the shape (10, 7)"),
    "narrow": (last_block((5, 3), (5, 3)), "the parts of 'b' do not fill (10, 7)"),
    "flat": (last_block((5,), (20,)), "the part of 'b' at (5,) is outside the shape (10, 7)"),
    "far away": (last_block((2**62, 3)), "is outside the shape (10, 7)"),
    "negative": (last_block((-1, 3)), "do not describe 'b' as a tensor"),
    **{
        f"no list: {one}": (no_list(one), "the parts of 'b' do not fill") for one in (5, True, None)
    },
}


@pytest.mark.parametrize("name", UNTILED)
def test_blocks_that_do_not_tile_their_tensor_are_refused(tmp_path: Path, name: str) -> None:
    path, (harm, words) = write(tmp_path / "split", {"b": GRID}, three), UNTILED[name]
    assert torch.equal(read_state(path)["b"], GRID)
    changed(path, harm)
    message = complaint(formats.read, path).message
    assert message.startswith(str(path / ".metadata"))
    assert words in message


def test_blocks_that_claim_more_elements_than_they_store_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "split", {"b": GRID}, tiles(2))
    file = path / "__0_0.distcp"
    torch.save(torch.ones(1).expand(5, 7), file)

    def point_at_it(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, file.stat().st_size

    changed(path, point_at_it)
    assert complaint(formats.read, path).message == f"{file}: damaged: elements of 'b' overlap"
