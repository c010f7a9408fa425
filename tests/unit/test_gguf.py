"""GGUF files: every type as the package gguf dequantises it, and tables that nobody can trust."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from factories import refused
from pytest import MonkeyPatch
from safetensors.torch import load_file
from snapshots import Compare
from state_files import read_state

from weighin import install
from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.reader import read_pieces
from weighin.errors import CheckpointError
from weighin.stream import formats
from weighin.stream import gguf_files as layout

gguf = pytest.importorskip("gguf", reason=install.command("gguf"))
np = pytest.importorskip("numpy")

KINDS = gguf.GGMLQuantizationType
Q8 = KINDS.Q8_0
DECODED = [one for one in KINDS if one.name not in layout.UNDECODED | layout._DTYPES.keys()]


def write(
    path: Path,
    tensors: dict[str, tuple[Any, Any]],
    architecture: str = "llama",
    lists: Mapping[str, list[int]] = MappingProxyType({"llama.numbers": [1, 2, 3]}),
    **options: Any,
) -> Path:
    """Write arrays, each with its type; codes are rows of bytes."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    writer.add_name("tiny")
    writer.add_token_list(["a", "bc", ""])
    for key, numbers in lists.items():
        writer.add_array(key, numbers)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def codes(kind: Any, rows: int, blocks: int) -> Any:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return np.random.default_rng(kind).integers(0, 256, (rows, blocks * size), np.uint8)


def one(
    folder: Path, kind: Any, rows: int = 33, blocks: int = 3, *more: Any
) -> tuple[Path, torch.Tensor]:
    """Write a file of one tensor, w, of random codes; return it, and what the package makes of the codes."""
    data = codes(kind, rows, blocks)
    with np.errstate(all="ignore"):  # random codes have infinite scales
        right = torch.from_numpy(gguf.quants.dequantize(data, kind)).contiguous()
    return write(folder / "m.gguf", {"w": (data, kind)}, *more), right


def small(path: Path) -> Path:
    bias = np.ones(4, np.float32)
    return write(path, {"weight": (codes(Q8, 4, 2), Q8), "bias": (bias, KINDS.F32)})


def test_the_types_have_the_sizes_of_the_package(tmp_path: Path) -> None:
    assert {kind: (name, block, size) for kind, (name, block, size) in layout.TYPES.items()} == {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in KINDS
    }
    for name in layout.UNDECODED:
        with pytest.raises(NotImplementedError):
            one(tmp_path, KINDS[name])


# 6 million elements are two pieces, the second with a shorter row; a piece holds no whole Q4_K.
LARGE = [(KINDS.Q4_0, 700, 300), (KINDS.Q4_K, 700, 36)]


@pytest.mark.parametrize(("kind", "rows", "blocks"), [*((one, 33, 3) for one in DECODED), *LARGE])
def test_every_type_is_dequantised_as_the_package_does(
    tmp_path: Path, kind: Any, rows: int, blocks: int
) -> None:
    path, right = one(tmp_path, kind, rows, blocks)
    found = read_state(path)["w"]
    assert found.shape == right.shape
    assert torch.equal(found.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize("pieces", [read_pieces, layout.rows], ids=["pieces", "one wide row"])
def test_few_elements_are_dequantised_at_once_and_none_is_copied_again(
    pieces: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """The package takes 20 bytes for each element, and to join small pieces takes ten times as long."""
    path, _ = one(tmp_path, Q8, 1, 200_000)
    dequantize, steps = gguf.quants.dequantize, list[int]()

    def noting(data: Any, kind: Any) -> Any:
        steps.append(data.size // 34 * 32)
        return dequantize(data, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", noting)
    monkeypatch.setattr(torch, "cat", None)
    (where,) = formats.read(path)
    assert sum(piece.numel() for piece in pieces(where)) == sum(steps) == 6_400_000
    assert max(steps) == 64 * 1024


def test_inspect_needs_neither_torch_nor_the_package(tmp_path: Path, same: Compare) -> None:
    small(tmp_path / "m.gguf")
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'gguf', 'numpy')))\n"
        "sys.argv = 'weighin inspect m.gguf --json i.json'.split()\n"
        "from weighin.cli.app import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path,
        env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    written = json.loads((tmp_path / "i.json").read_text())
    assert (written["totals"]["unused_bytes"], "belong to no tensor" in ended.stdout) == (0, False)
    kept = {key: written[key] for key in ("architecture", "layout", "tensors")}
    table, _, _ = ended.stdout.partition("files: ")
    same("inspected_gguf.txt", f"{table}\n{json.dumps(kept, indent=1)}\n")


HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [(KINDS.Q5_1, "float16", HALF[0]), (KINDS.BF16, "float16", HALF[0]), (KINDS.Q5_1, "", torch.float32),
     (KINDS.F16, "", HALF[0]), (KINDS.BF16, "", HALF[1])],
)  # fmt: skip
def test_convert_writes_the_files_dtype_or_another(
    tmp_path: Path, kind: Any, name: str, dtype: torch.dtype
) -> None:
    path, right = one(tmp_path, kind)
    Conversion(path, target := tmp_path / "w.safetensors", dtype=name, verify=True).write()
    found = load_file(target)["w"]
    assert found.dtype == dtype
    assert torch.equal(found.nan_to_num(), right.to(dtype).nan_to_num())


def test_the_parts_of_a_model_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = {f"t{number}": (codes(Q8, number + 1, 3), Q8) for number in range(5)}
    write(tmp_path / "m.gguf", tensors, split_max_tensors=2)
    first, second, third = (tmp_path / f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3))
    for path in (first, third, tmp_path):
        assert [one.name for one in formats.read(path)] == list(tensors)
        assert len(formats.files(path)) == 3
    second.rename(tmp_path / "other")
    assert f"of which {second.name} is missing" in refused(formats.read, first)
    said = refused(formats.read, first.rename(tmp_path / "alone.gguf"))
    assert "one of 3 parts of a model, but its name does not say" in said


@pytest.mark.parametrize("shape", [[8, 4, 2, 2], [8, 4, 2, 3], [-8, 4, -2, 2]])
def test_a_tensor_has_its_shape_before_comfyui_flattened_it(
    tmp_path: Path, shape: list[int]
) -> None:
    path, right = one(tmp_path, Q8, 1, 4, "flux", {"comfy.gguf.orig_shape.w": shape})
    if shape == [8, 4, 2, 2]:
        assert torch.equal(read_state(path)["w"], right.reshape(shape))
    else:
        said = refused(formats.read, path)
        assert "tensor 'w' of type" in said and "cannot have the shape" in said


def test_a_projector_beside_a_model_is_no_second_model(tmp_path: Path) -> None:
    own = small(tmp_path / "m-Q8_0.gguf")
    other = small(tmp_path / "mmproj-m-f16.gguf")
    assert formats.files(tmp_path) == [own]
    own.unlink()
    assert formats.files(tmp_path) == [other]


def test_a_cut_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole, cut = small(tmp_path / "m.gguf").read_bytes(), tmp_path / "cut.gguf"
    for length in range(len(whole) - 16):  # the last 16 bytes are padding
        cut.write_bytes(whole[:length])
        assert re.search(r"truncated|damaged|empty|a text file", refused(formats.read, cut))


@pytest.mark.parametrize("value", [0, 0x7F, 0xFF])
def test_a_changed_byte_of_the_tables_is_refused_or_read(tmp_path: Path, value: int) -> None:
    whole = bytearray(small(tmp_path / "m.gguf").read_bytes())
    changed = tmp_path / "changed.gguf"
    for at in range(4, len(whole) - 304):
        changed.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
        try:
            places = formats.read(changed)
        except CheckpointError:
            continue
        assert all(one.offset + one.storage_bytes <= len(whole) for one in places)


@pytest.mark.parametrize(
    ("version", "words"),
    [(b"\1\0\0\0", "GGUF version 1; weighin reads"), (b"\0\0\0\3", "big-endian")],
    ids=["1", "big-endian"],
)
def test_another_version_is_named(tmp_path: Path, version: bytes, words: str) -> None:
    whole = (path := small(tmp_path / "m.gguf")).read_bytes()
    path.write_bytes(whole[:4] + version + whole[8:])
    assert words in refused(formats.read, path)


def test_without_the_package_its_installation_is_named(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    path = small(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    said = "reading 'weight', which is quantised to Q8_0, needs the Python package gguf: "
    message, repair = refused(read_state, path).split("\n")
    assert message.startswith(said)
    assert repair == install.command("gguf")


def test_gguf_is_read_and_not_written() -> None:
    assert "reads the format gguf, but does not write it" in refused(formats.suffix_of, "gguf")
