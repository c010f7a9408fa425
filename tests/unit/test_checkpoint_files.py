"""Formats, manifests and offsets; and one line for whatever is not a checkpoint."""

from pathlib import Path
from typing import Any

import torch
from harms import complaint

from weighin.checkpoint.manifest import Manifest, TensorEntry, read_manifest
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
    assert "holds a list, not a tensor" in complaint(read_one, tmp_path / "l.pt", "l").message
