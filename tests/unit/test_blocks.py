"""Streaming of what several ranks saved in blocks: the right tensor, in place, in little memory."""

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from weighin.errors import CheckpointError
from weighin.stream import filling, formats
from weighin.stream.bytes import PIECE_BYTES, Readers, allocate
from weighin.stream.model import Granularity, load_streaming
from weighin.stream.slices import Checkpoint, Slice
from weighin.units import MIB

Cut = Callable[[torch.Tensor], list[tuple[tuple[int, ...], torch.Tensor]]]
PEAK_SOURCE = """
import sys, threading, time, torch
from pathlib import Path
from weighin.stream.model import load_streaming

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

model = lambda: torch.nn.Linear(4096, 8192, bias=False)
start, peak, ended = anonymous(), 0, False
def watch():
    global peak
    while not ended:
        peak = max(peak, anonymous())
        time.sleep(0.001)

thread = threading.Thread(target=watch, daemon=True); thread.start()
load_streaming(model, sys.argv[1], dtype=getattr(torch, sys.argv[2]))
ended = True
thread.join()
print(max(peak, anonymous()) - start)  # the last look may precede the last pages
"""


def tiles(*counts: int) -> Cut:
    """Return what cuts a tensor into so many blocks along each dimension, uneven ones at its end."""

    def cut(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        found = []
        steps = [-(-size // count) for size, count in zip(tensor.shape, counts, strict=False)]
        ranges = [range(0, size, step) for size, step in zip(tensor.shape, steps, strict=False)]
        for start in product(*ranges):
            place = tuple(slice(at, at + step) for at, step in zip(start, steps, strict=True))
            whole = start + (0,) * (tensor.ndim - len(start))
            found.append((whole, tensor[place].contiguous()))
        return found

    return cut


def turned(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Cut as ``tiles(2, 2)``, each block with its last dimension outermost in the file."""
    return [
        (start, block.transpose(0, -1).contiguous().transpose(0, -1))
        for start, block in tiles(2, 2)(tensor)
    ]


def write(folder: Path, state: dict[str, torch.Tensor], cut: Cut) -> Path:
    """Write a checkpoint as several ranks would: each block of each tensor at a place of its own."""
    cuts = {name: cut(tensor) if tensor.ndim > 1 else [] for name, tensor in state.items()}
    stored = {name: tensor for name, tensor in state.items() if not cuts[name]}
    for name, found in cuts.items():
        stored |= {f"{name}#{number}": block for number, (_, block) in enumerate(found)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(stored, storage_writer=FileSystemWriter(folder))
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    at = {index.fqn: index for index in places}
    for name, found in cuts.items():
        chunks = []
        for number, (start, block) in enumerate(found):
            key = f"{name}#{number}"
            described = tensors.pop(key)
            places[MetadataIndex(name, torch.Size(start), number)] = places.pop(at[key])
            chunks.append(ChunkStorageMetadata(torch.Size(start), block.shape))
        if chunks:
            assert isinstance(described, TensorStorageMetadata)
            described.size, described.chunks = state[name].shape, chunks
            tensors[name] = described
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(13, 10)
        self.stacked = torch.nn.Parameter(torch.randn(4, 6, 10))
        self.register_buffer("steps", torch.arange(35).reshape(5, 7))


CUTS = {
    "rows": tiles(3),
    "columns": tiles(1, 4),
    "tiles": tiles(2, 3),
    "turned": turned,
    "cubes": lambda one: tiles(*(2,) * one.ndim)(one),
}


@pytest.mark.parametrize("most", [PIECE_BYTES, 96, 8])
@pytest.mark.parametrize("name", CUTS)
def test_blocks_become_the_tensor_that_they_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    right = Model().state_dict()
    path = write(tmp_path / "split", right, CUTS[name])
    assert all(len(one.parts) > 1 for one in formats.read(path) if len(one.shape) > 1)
    monkeypatch.setattr(filling, "_readers", lambda *_: Readers(2, most, late=True))
    found = load_streaming(Model, path).state_dict()
    for key, tensor in right.items():
        assert torch.equal(found[key], tensor), key
        assert found[key].is_contiguous()


@pytest.mark.parametrize("granularity", ["all", "module", "tensor"])
def test_blocks_are_converted_on_the_way(tmp_path: Path, granularity: Granularity) -> None:
    right = Model().state_dict()
    path = write(tmp_path / "split", right, tiles(2, 3))
    model = load_streaming(Model, path, dtype=torch.bfloat16, granularity=granularity, threads=1)
    for key, tensor in right.items():
        kind = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        assert torch.equal(model.state_dict()[key], tensor.to(kind)), key


def test_memory_that_is_there_is_filled_where_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "split", Model().state_dict(), tiles(1, 4))
    model = Model()
    with torch.no_grad():
        model.linear.weight.zero_()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    load_streaming(model, path)
    assert before == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert torch.equal(model.linear.weight, Model().linear.weight)


def test_names_of_the_same_blocks_stay_tied(tmp_path: Path) -> None:
    path = write(tmp_path / "split", {"0.weight": torch.arange(35.0).reshape(5, 7)}, tiles(1, 2))
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["1.weight"] = metadata.state_dict_metadata["0.weight"]
    for index, place in list(metadata.storage_data.items()):
        metadata.storage_data[MetadataIndex("1.weight", index.offset, index.index)] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    model = torch.nn.Sequential(*(torch.nn.Linear(7, 5, bias=False) for _ in "ab"))
    model[1].weight = model[0].weight
    load_streaming(model, path)
    assert model[1].weight is model[0].weight
    assert torch.equal(model.get_parameter("0.weight"), torch.arange(35.0).reshape(5, 7))


def test_blocks_with_gaps_become_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.arange(16.0).numpy().tofile(tmp_path / "data")
    where = Slice("weight", (4, 2), (4, 1), "float32", tmp_path / "data", 0, 0, 64)
    parts = (replace(where, start=(0, 0)), replace(where, start=(0, 2), offset=8))
    whole = replace(where, shape=(4, 4), stride=(4, 1), parts=parts)
    monkeypatch.setattr(formats, "read", lambda *_: Checkpoint([whole]))
    model = load_streaming(torch.nn.Linear(4, 4, bias=False), tmp_path)
    assert torch.equal(model.get_parameter("weight"), torch.arange(16.0).view(4, 4))


def test_a_file_of_blocks_that_ends_too_early_is_named_before_anything_is_read(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "split", Model().state_dict(), tiles(2, 2))
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    model = Model()
    before = model.linear.weight.clone()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: truncated: "):
        load_streaming(model, path)
    assert torch.equal(model.linear.weight, before)


@pytest.mark.parametrize(("dtype", "mib"), [("float32", 128), ("bfloat16", 64)])
@pytest.mark.parametrize("cut", [tiles(3), tiles(1, 3)], ids=["rows", "columns"])
def test_blocks_take_no_more_memory_than_the_model(
    tmp_path: Path, cut: Cut, dtype: str, mib: int, torch_fork_server: ForkServer
) -> None:
    state = {"weight": torch.zeros(8192, 4096)}  # 128 MiB
    path = write(tmp_path / "split", state, cut)
    done = torch_fork_server.run(PEAK_SOURCE, path, dtype)
    assert done.returncode == 0, done.stderr
    # The load also gives the kernel some MiB of the heap that the imports before it had left.
    assert (mib - 8) * MIB < int(done.stdout) < mib * 1.01 * MIB + 16 * MIB


@pytest.mark.parametrize(("offset", "lead"), [(0, 0), (4096 + 72, 64), (8192, 0), (74, 64)])
def test_memory_begins_where_its_stretch_begins_in_a_page_of_the_file(
    offset: int, lead: int
) -> None:
    """A disk writes into it without a buffer then, but where torch would not let a tensor begin."""
    memory = allocate(MIB, torch.float32, torch.device("cpu"), offset)
    assert memory.data_ptr() % (2 * MIB) == lead
    assert memory.fill_(1).sum() == MIB
