"""dcp: torch's own loader reads what we write, we read what torch writes, and run none of it."""

import os
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
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from harness.checkpoint import layouts
from harness.checkpoint.layouts import dcp
from harness.checkpoint.layouts.base import TensorPlan
from harness.checkpoint.piecewise import pieces_of
from harness.checkpoint.reading import read_pieces
from harness.errors import CheckpointError


class Command:
    """Would end the tests if pickle itself read it."""

    def __reduce__(self):
        return (os.system, (f"kill {os.getpid()}",))


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
def ours(tmp_path, state) -> Path:
    tensors = [
        TensorPlan(name, tuple(one.shape), one.dtype, "b" if name == "tied" else None)
        for name, one in state.items()
    ]
    dcp.write(tmp_path / "ours", tensors, lambda name: pieces_of(state[name]))
    return tmp_path / "ours"


def check_equal(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(state)
    for name, one in state.items():
        assert torch.equal(found[name], one), name


def test_torch_loads_what_we_write(ours, state) -> None:
    found = {name: torch.zeros_like(one) for name, one in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(found, storage_reader=FileSystemReader(ours), no_dist=True)
    check_equal(found, state)
    assert sorted(file.name for file in ours.iterdir()) == [".metadata", "__0_0.distcp"]


def test_tied_keys_are_stored_once_and_values_are_aligned(ours) -> None:
    places = {one.name: one for one in dcp.read(ours)}
    assert places["tied"].offset == places["b"].offset
    assert all(one.offset % 64 == 0 for one in places.values())


@pytest.mark.parametrize("single_file", [True, False])
def test_we_read_what_torch_writes(tmp_path, state, single_file: bool) -> None:
    folder = tmp_path / "theirs"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            state,
            storage_writer=FileSystemWriter(folder, single_file_per_rank=single_file),
            no_dist=True,
        )
    assert layouts.detect(folder).NAME == "dcp"
    found = {}
    for one in dcp.read(folder):
        pieces = [piece.clone() for piece in read_pieces(one)]
        value = torch.cat(pieces) if pieces else torch.empty(0, dtype=one.dtype)
        found[one.name] = value.reshape(one.shape)
    check_equal(found, state)
    assert {one.file for one in dcp.read(folder)} <= set(dcp.files(folder))


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
    ("harm", "message"),
    [
        (
            lambda m: place(m, relative_path="../x"),
            "the file of 'b' lies outside the folder: '../x'",
        ),
        (
            lambda m: place(m, relative_path="/etc/passwd"),
            "the file of 'b' lies outside the folder: ",
        ),
        (lambda m: place(m, relative_path="no"), "no: cannot be read: No such file or directory"),
        (lambda m: place(m, relative_path="x" * 10_000), "cannot be read: File name too long"),
        (lambda m: place(m, relative_path=3), "damaged: the shape or place of 'b'"),
        (lambda m: place(m, offset=-1), "damaged: the shape or place of 'b'"),
        (lambda m: place(m, offset=2**70), "damaged: the shape or place of 'b'"),
        (lambda m: place(m, offset=2**62), "truncated: 'b' ends at byte"),
        (lambda m: place(m, offset=1), "__0_0.distcp: "),
        (lambda m: place(m, length=0), "__0_0.distcp: "),
        (lambda m: place(m, transform_descriptors=["zip"]), "'b' was transformed (compressed)"),
        (lambda m: m.storage_data.clear(), "damaged: 'b' has no dtype or no place"),
        (lambda m: m.state_dict_metadata.clear(), "damaged: names no tensors or no places"),
        (split, "'b' is split over several pieces"),
        (
            lambda m: m.state_dict_metadata.update(b=BytesStorageMetadata()),
            "not a flat state dict of tensors: 'b' is something else",
        ),
        (
            lambda m: m.state_dict_metadata.update({3: m.state_dict_metadata["b"]}),
            "damaged: a key that is no text: 3",
        ),
        (
            lambda m: vars(m.state_dict_metadata["b"]).update(size=torch.Size([7, 10])),
            "'b' is (10, 7) of torch.float32 there, but (7, 10) of torch.float32 in .metadata",
        ),
        (
            lambda m: vars(m).update(planner_data=Command()),
            "holds more than tensors, and was NOT executed: it refers to posix.system",
        ),
    ],
)
def test_wrong_metadata_is_named_and_never_run(ours, harm, message: str) -> None:
    change(ours, harm)
    with pytest.raises(CheckpointError) as caught:
        dcp.read(ours)
    assert message in caught.value.message
    assert str(ours) in caught.value.message


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
def test_what_is_no_metadata_is_refused_in_little_memory(ours, text: bytes) -> None:
    (ours / ".metadata").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"\.metadata: (damaged|no) metadata"):
        dcp.read(ours)


def test_a_truncated_file_of_data_is_named(ours) -> None:
    file = ours / dcp.DATA_NAME
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: truncated: 'scalar' ends at byte"):
        dcp.read(ours)
