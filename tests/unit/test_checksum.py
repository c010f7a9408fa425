"""The checksum sees every change, and nothing but the bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from weighin.checkpoint.checksum import (
    PIECE_ELEMENTS,
    RunningChecksum,
    checksum,
    pieces_of,
    summing,
)
from weighin.checkpoint.manifest import Manifest, TensorEntry, read_manifest
from weighin.stream import formats
from weighin.stream.torch_files import read_one

LANES = 65_521


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50)
@given(st.integers(1, 300_000), st.data())
def test_one_changed_element_changes_it(numel: int, data: st.DataObject) -> None:
    tensor = numbers(numel)
    before = checksum(tensor)
    at = data.draw(st.integers(0, numel - 1))
    tensor[at] += 1
    assert checksum(tensor) != before
    tensor[at] -= 1


@pytest.mark.parametrize("rows", [2, LANES, 2 * LANES])
def test_two_rows_that_changed_places_change_it(rows: int) -> None:
    tensor = numbers(rows, 4)
    swapped = tensor.clone()
    swapped[[0, rows - 1]] = tensor[[rows - 1, 0]]
    assert checksum(swapped) != checksum(tensor)


def test_chunks_that_changed_places_change_it() -> None:
    tensor = numbers(3, LANES * 16)
    assert checksum(tensor[[1, 0, 2]]) != checksum(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        numbers(7, 5).t(), numbers(1000, 2100).t(), numbers(3, 4, 5).transpose(0, 1), numbers(101)[1:],
        torch.tensor(3.5), torch.tensor(True), torch.tensor([True, False, True]),
    ],
    ids=["matrix", "large", "cube", "odd address", "scalar", "flag", "flags"],
)  # fmt: skip
def test_strides_and_alignment_do_not_matter(tensor: torch.Tensor) -> None:
    assert checksum(tensor) == checksum(tensor.clone(memory_format=torch.contiguous_format))
    assert checksum(tensor) != checksum(torch.zeros_like(tensor))


def test_length_counts() -> None:
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.empty(0)) == checksum(torch.zeros(2, 0)) == "0" * 16


def test_a_known_value_so_that_manifests_stay_valid() -> None:
    assert checksum(torch.arange(1_000_000, dtype=torch.int64)) == "645f210637849032"


@pytest.mark.parametrize("numel", [0, 1, PIECE_ELEMENTS - 1, PIECE_ELEMENTS, PIECE_ELEMENTS + 3])
def test_pieces_give_the_checksum_of_the_whole(numel: int) -> None:
    for tensor in (numbers(numel), torch.zeros(numel, dtype=torch.bool).fill_(True)):
        running = RunningChecksum(tensor.nbytes)
        for piece in pieces_of(tensor):
            running.update(piece)
        assert running.hexdigest() == checksum(tensor)


def sums_of(tensor: torch.Tensor) -> dict[str, str]:
    sums: dict[str, dict[str, str]] = {}
    for _ in summing("w", pieces_of(tensor), tensor.numel(), tensor.dtype, sums):
        pass
    return sums["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_floating_tensor_has_the_checksum_of_each_cell_dtype(dtype: torch.dtype) -> None:
    tensor = numbers(33, 7).to(dtype)
    sums = sums_of(tensor)
    assert set(sums) >= {"float32", "bfloat16", "float16"}
    for name, value in sums.items():
        assert value == checksum(tensor.to(getattr(torch, name)))
    assert sums_of(tensor.t()) == sums_of(tensor.t().contiguous())


def test_other_tensors_have_only_their_own() -> None:
    tensor = torch.arange(10)
    assert sums_of(tensor) == {"int64": checksum(tensor)}
    assert sums_of(torch.zeros(0, dtype=torch.bool)) == {"bool": "0" * 16}


# Manifests, which keep checksums; and where the values of tensors lie


def entry(name: str, shape: tuple[int, ...], dtype: str, **options: Any) -> TensorEntry:
    numel = torch.Size(shape).numel()
    fields: dict[str, Any] = {"kind": "parameter", "shared_with": None}
    fields |= {"checksums": dict.fromkeys(("float32", "bfloat16"), "00")} | options
    return TensorEntry(name, shape, dtype, numel * getattr(torch, dtype).itemsize, **fields)


MANIFEST = Manifest(
    "tiny", "package:build", "seed 0",
    (
        entry("b", (3, 5), "float32"),
        entry("a", (2,), "float32", kind="persistent_buffer"),
        entry("tied", (3, 5), "float32", shared_with="b"),
        entry("steps", (), "int64", kind="persistent_buffer", checksums={"int64": "11"}),
        entry("table", (4,), "float32", kind="non_persistent_buffer"),
    ),
)  # fmt: skip


def test_a_manifest_survives_the_disk_and_counts_tied_tensors_once(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path / "manifest.json")
    assert read_manifest(tmp_path / "manifest.json") == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert MANIFEST.model_bytes() == 60 + 8 + 8 + 16
    assert MANIFEST.model_bytes("bfloat16") == 30 + 4 + 8 + 8


def test_views_of_one_storage_lead_to_it(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    torch.save({"first": base[:12].view(3, 4), "second": base[12:]}, tmp_path / "m.pt")
    first, second = formats.read(tmp_path / "m.pt")
    assert first.storage_offset == second.storage_offset == first.offset == second.offset - 48
    assert second.storage_bytes == 96


def test_a_file_of_one_tensor(tmp_path: Path) -> None:
    for name, is_zip in (("w.pt", True), ("w.pth", False)):
        torch.save(torch.ones(3), tmp_path / name, _use_new_zipfile_serialization=is_zip)
        assert read_one(tmp_path / name, "w").shape == (3,)
    torch.save([1], tmp_path / "l.pt")
    assert "holds a list, not a tensor" in refused(read_one, tmp_path / "l.pt", "l")
