"""Formats, manifests and offsets; and one line for whatever is not a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from weighin.checkpoint.manifest import Manifest, TensorEntry, read_manifest
from weighin.errors import CheckpointError
from weighin.stream import formats
from weighin.stream.torch_files import read_one


def entry(name: str, shape: tuple[int, ...], dtype: str, **options: Any) -> TensorEntry:
    numel = torch.Size(shape).numel()
    fields: dict[str, Any] = {"kind": "parameter", "shared_with": None}
    fields |= {"checksums": dict.fromkeys(("float32", "bfloat16"), "00")} | options
    return TensorEntry(name, shape, dtype, numel * getattr(torch, dtype).itemsize, **fields)


MANIFEST = Manifest(
    "tiny",
    "package:build",
    "seed 0",
    (
        entry("b", (3, 5), "float32"),
        entry("a", (2,), "float32", kind="persistent_buffer"),
        entry("tied", (3, 5), "float32", shared_with="b"),
        entry("steps", (), "int64", kind="persistent_buffer", checksums={"int64": "11"}),
        entry("table", (4,), "float32", kind="non_persistent_buffer"),
    ),
)


def test_a_manifest_survives_the_disk_and_counts_tied_tensors_once(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path / "manifest.json")
    assert read_manifest(tmp_path / "manifest.json") == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert MANIFEST.model_bytes() == 60 + 8 + 8 + 16
    assert MANIFEST.model_bytes("bfloat16") == 30 + 4 + 8 + 8


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "damaged manifest: JSONDecodeError"),
        ('{"schema": 2}', "another version of weighin wrote this manifest"),
        ('{"schema": 1, "tensors": [{}]}', "damaged manifest: "),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(path)
    assert caught.value.message.startswith(f"{path}: {problem}")


def test_offsets_lead_to_the_values(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    state = {
        "weight": base[:12].view(3, 4),
        "view": base[12:],
        "transposed": torch.arange(6).view(2, 3).t(),
        "tied": base[:12].view(3, 4),
        "empty": torch.empty(0),
    }
    path = tmp_path / "model.pt"
    torch.save(state, path)
    data = path.read_bytes()
    places = {place.name: place for place in formats.read(path)}
    assert list(places) == list(state)
    assert places["tied"].offset == places["weight"].offset
    assert (
        places["tied"].storage_offset
        == places["weight"].storage_offset
        == places["view"].storage_offset
    )
    assert places["view"].storage_bytes == 96
    for name, place in places.items():
        assert place.contiguous == state[name].is_contiguous()
        if place.contiguous:
            raw = data[place.offset : place.offset + state[name].nbytes]
            assert raw == state[name].numpy().tobytes()
    assert (places["transposed"].shape, places["transposed"].stride) == ((3, 2), (1, 3))


def test_a_file_of_one_tensor(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "w.pt")
    assert read_one(tmp_path / "w.pt", "w").shape == (3,)
    torch.save(torch.ones(3), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert read_one(tmp_path / "w.pth", "w").shape == (3,)
    torch.save([1], tmp_path / "l.pt")
    with pytest.raises(CheckpointError, match="holds a list, not a tensor"):
        read_one(tmp_path / "l.pt", "l")
