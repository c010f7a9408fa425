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
from harms import complaint
from safetensors.torch import load_file
from snapshots import Compare
from state_files import read_state

from weighin import install
from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.reader import read_pieces
from weighin.errors import CheckpointError, ConfigError
from weighin.stream import formats
from weighin.stream import gguf_files as layout
from weighin.stream.model import load_streaming

gguf = pytest.importorskip("gguf", reason=install.command("gguf"))
np = pytest.importorskip("numpy")

DECODED = [
    kind
    for kind in gguf.GGMLQuantizationType
    if kind.name not in layout.UNDECODED | layout._DTYPES.keys()
]


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


def codes(kind: Any, rows: int = 33, blocks: int = 3) -> Any:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return np.random.default_rng(kind).integers(0, 256, (rows, blocks * size), np.uint8)


def small(path: Path) -> Path:
    f32 = gguf.GGMLQuantizationType.F32
    q8 = gguf.GGMLQuantizationType.Q8_0
    return write(path, {"weight": (codes(q8, 4, 2), q8), "bias": (np.ones(4, np.float32), f32)})


def test_the_types_have_the_sizes_of_the_package() -> None:
    assert {kind: (name, block, size) for kind, (name, block, size) in layout.TYPES.items()} == {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType
    }
    for name in layout.UNDECODED:
        with pytest.raises(NotImplementedError):
            kind = gguf.GGMLQuantizationType[name]
            gguf.quants.dequantize(codes(kind), kind)


@pytest.mark.parametrize("kind", DECODED, ids=lambda kind: kind.name)
def test_every_type_is_dequantised_as_the_package_does(tmp_path: Path, kind: Any) -> None:
    path = write(tmp_path / "m.gguf", {"weight": (codes(kind), kind)})
    with np.errstate(all="ignore"):
        right = torch.from_numpy(gguf.quants.dequantize(codes(kind), kind))
    found = read_state(path)["weight"]
    assert found.shape == right.shape
    assert torch.equal(found.view(torch.int32), right.contiguous().view(torch.int32))


@pytest.mark.parametrize(("name", "count"), [("Q4_0", 300), ("Q4_K", 36)])
def test_a_tensor_of_several_pieces_is_dequantised_as_a_whole(
    tmp_path: Path, name: str, count: int
) -> None:
    """6 million elements are two pieces, the second with a shorter row; a piece holds no whole Q4_K."""
    kind = gguf.GGMLQuantizationType[name]
    blocks = codes(kind, 700, count)
    path = write(tmp_path / "m.gguf", {"weight": (blocks, kind)})
    with np.errstate(all="ignore"):
        right = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert torch.equal(read_state(path)["weight"].view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize("pieces", [read_pieces, layout.rows], ids=["pieces", "one wide row"])
def test_few_elements_are_dequantised_at_once_and_none_is_copied_again(
    pieces: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package takes 20 bytes for each element, and to join small pieces takes ten times as long."""
    kind, steps = gguf.GGMLQuantizationType.Q8_0, list[int]()
    path = write(tmp_path / "m.gguf", {"weight": (codes(kind, 1, 200_000), kind)})
    dequantize = gguf.quants.dequantize

    def noting(data: Any, kind: Any) -> Any:
        steps.append(data.size // 34 * 32)
        return dequantize(data, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", noting)
    monkeypatch.setattr(torch, "cat", None)
    (where,) = formats.read(path)
    assert sum(piece.numel() for piece in pieces(where)) == sum(steps) == 6_400_000
    assert max(steps) == 64 * 1024


def test_inspect_names_types_and_both_sizes_without_torch_and_the_package(
    tmp_path: Path, same: Compare
) -> None:
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


def test_convert_writes_the_values_and_keeps_float_types(tmp_path: Path) -> None:
    kinds = gguf.GGMLQuantizationType
    half = np.arange(64, dtype=np.float16).reshape(2, 32)
    quantised, brain = codes(kinds.Q5_1), codes(kinds.BF16, 2, 32)
    tensors = {"q": (quantised, kinds.Q5_1), "half": (half, None), "brain": (brain, kinds.BF16)}
    path = write(tmp_path / "m.gguf", tensors)
    for name, dtype in (("", torch.float32), ("float16", torch.float16)):
        target = tmp_path / f"{dtype}.safetensors"
        Conversion(path, target, dtype=name, verify=True).write()
        found = load_file(target)
        with np.errstate(all="ignore"):
            values = torch.from_numpy(gguf.quants.dequantize(quantised, kinds.Q5_1).copy())
        assert torch.equal(found["q"].nan_to_num(), values.to(dtype).nan_to_num())
        assert found["q"].dtype == dtype
        assert torch.equal(found["half"], torch.from_numpy(half))
        right = torch.from_numpy(brain.copy()).view(torch.bfloat16)
        right = right.to(torch.float16) if name else right
        assert torch.equal(found["brain"].view(torch.int16), right.view(torch.int16))


def test_the_parts_of_a_model_are_one_checkpoint(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors = {f"t{number}": (codes(kind, number + 1), kind) for number in range(5)}
    write(tmp_path / "m.gguf", tensors, split_max_tensors=2)
    first = tmp_path / "m-00001-of-00003.gguf"
    for path in (first, first.with_name("m-00003-of-00003.gguf"), tmp_path):
        assert [one.name for one in formats.read(path)] == list(tensors)
        assert len(formats.files(path)) == 3
    (tmp_path / "m-00002-of-00003.gguf").rename(tmp_path / "other")
    assert "but the part m-00002-of-00003.gguf is missing" in complaint(formats.read, first).message
    alone = first.rename(tmp_path / "alone.gguf")
    said = complaint(formats.read, alone).message
    assert "one of 3 parts of a model, but the file's name does not say" in said


@pytest.mark.parametrize("shape", [[8, 4, 2, 2], [8, 4, 2, 3], [-8, 4, -2, 2]])
def test_a_tensor_has_the_shape_that_comfyui_had_flattened(
    tmp_path: Path, shape: list[int]
) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    lists = {"comfy.gguf.orig_shape.w": shape}
    path = write(tmp_path / "m.gguf", {"w": (codes(kind, 1, 4), kind)}, "flux", lists)
    if shape != [8, 4, 2, 2]:
        assert "'w' has the shape" in complaint(formats.read, path).message
        return
    right = torch.from_numpy(gguf.quants.dequantize(codes(kind, 1, 4), kind))
    assert torch.equal(read_state(path)["w"], right.reshape(shape))


def test_a_projector_beside_a_model_is_no_second_model(tmp_path: Path) -> None:
    own = small(tmp_path / "m-Q8_0.gguf")
    other = small(tmp_path / "mmproj-m-f16.gguf")
    assert formats.files(tmp_path) == [own]
    own.unlink()
    assert formats.files(tmp_path) == [other]


def test_a_folder_with_other_weights_is_not_read_as_gguf(tmp_path: Path) -> None:
    small(tmp_path / "m.gguf")
    assert formats.detect(tmp_path) == "gguf"
    (tmp_path / "config.json").write_text("{}")
    assert formats.detect(tmp_path) == "gguf"
    torch.save({"weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert formats.detect(tmp_path) == "pt"


def test_a_cut_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = small(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole) - 16):  # the last 16 bytes are padding
        cut.write_bytes(whole[:length])
        said = complaint(formats.read, cut).message
        assert re.search(r"truncated|damaged|empty|a text file", said)


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
    path = small(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + version + whole[8:])
    assert words in complaint(formats.read, path).message


def test_the_loader_reads_plain_tensors_and_refuses_codes(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = write(tmp_path / "m.gguf", {"weight": (weight, None), "bias": (weight[0, :2], None)})
    model: Any = load_streaming(lambda: torch.nn.Linear(3, 2), path)
    assert torch.equal(model.weight, torch.from_numpy(weight))
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors = {"weight": (codes(kind, 2, 1), kind), "bias": (weight[0, :2], None)}
    path = write(tmp_path / "q.gguf", tensors)
    assert str(complaint(load_streaming, lambda: torch.nn.Linear(32, 2), path)) == (
        f"{path}: weight is quantised to Q8_0, which load_streaming does not dequantise\n"
        f"first write the dequantised values into a folder, and load that folder: weighin convert {path} FOLDER --keys model"
    )


def test_without_the_package_the_command_to_install_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError) as caught:
        read_state(path)
    assert caught.value.message.startswith(
        "reading 'weight', which is quantised to Q8_0, needs the Python package gguf: "
    )
    assert caught.value.repair == install.command("gguf")


def test_gguf_is_read_and_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads the format gguf, but does not write it"):
        formats.suffix_of("gguf")
