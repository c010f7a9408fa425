"""A file of another kind is named for what it is, and the step that it comes with leads on."""

import gzip
import io
import json
import re
import shlex
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from weighin.checkpoint.reader import read_pieces
from weighin.errors import CheckpointError
from weighin.stream import formats
from weighin.units import MIB

STATE = {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(3)}


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        formats.read(path)
    return caught.value


def saved() -> bytes:
    file = io.BytesIO()
    torch.save(STATE, file)
    return file.getvalue()


def linear() -> torch.nn.Module:
    model = torch.nn.Linear(4, 3)
    model.load_state_dict(STATE)
    return model.eval()


def script(path: Path) -> None:
    torch.jit.save(torch.jit.trace(linear(), torch.zeros(2, 4)), path)


def exported(path: Path) -> None:
    torch.export.save(torch.export.export(linear(), (torch.zeros(2, 4),)), path)


def arrays(path: Path) -> None:
    with path.open("wb") as file:
        arrays = {name: one.numpy() for name, one in STATE.items()}
        numpy.savez(file, **arrays)  # type: ignore[arg-type]


def repacked(path: Path) -> None:
    source = zipfile.ZipFile(io.BytesIO(saved()))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for one in source.infolist():
            target.writestr(one.filename, source.read(one))


def compressed(path: Path) -> None:
    path.write_bytes(gzip.compress(saved()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("write", "name", "result"),
    [
        (script, "it's a script.pt", "it's a script.pt.new"),
        (exported, "model.pt2", "model.pt2.new"),
        (arrays, "model.npz", "model.npz.new"),
        (arrays, "arrays.bin", "arrays.bin.new"),
        (repacked, "model.pt", "model.pt.new"),
        (compressed, "my model.pt.gz", "my model.pt"),
        (compressed, "v1.0.pt", "v1.0.pt.unpacked"),
    ],
)
def test_the_command_of_a_refusal_gives_the_same_tensors(
    tmp_path: Path, write: Callable[[Path], None], name: str, result: str
) -> None:
    write(tmp_path / name)
    command = refusal(tmp_path / name).repair.partition(": ")[2]
    python = shlex.quote(sys.executable)
    command = re.sub("^python ", f"{python} -W ignore ", command)
    subprocess.run(command, shell=True, check=True, timeout=120)
    found = {
        one.name: torch.cat(list(read_pieces(one))).reshape(one.shape)
        for one in formats.read(tmp_path / result)
    }
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[key], STATE[key]) for key in STATE)


MAGIC = (
    *(b"\x89HDF\r\n\x1a\n", b"\x93NUMPY", b"lmgg", b"fmgg", b"tjgg", b"algg", b"ftrt", b"\x7fELF"),
    *(b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18"),
    *(b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07", b"Salted__"),
    *(b"\x80\2", b"\x08\x08\x12", b"\x08\x01\x12", b"\x81\xa6", b"PK\5"),
)
LENGTHS = {int.from_bytes(magic, "little") for magic in MAGIC}


@pytest.mark.parametrize("length", sorted(one for one in LENGTHS if 200 < one < 20_000_000))
def test_a_length_that_equals_a_magic_number_is_a_length(tmp_path: Path, length: int) -> None:
    """A safetensors file begins with the length of its header, which may be any number."""
    path = tmp_path / "model.bin"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"weight": entry}).encode().ljust(length)
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(8))
    found = formats.read(path)
    assert (found.format, [one.name for one in found]) == ("safetensors", ["weight"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"(dp0\nVweight\np1\nF1.0\ns.", "a pickle that torch.save did not write"),
        (b"}q\0U\1ak\1s.", "a pickle that torch.save did not write"),
        (
            b'{"error": "Repository not found"}',
            "a text file, not a checkpoint; it begins with '{\"error",
        ),
        ("ä".encode() * 300, "a text file, not a checkpoint; it begins with 'ää"),
        (b"PK of the table: none", "a text file, not a checkpoint; it begins with 'PK of"),
        (b"GGUF is a format", "a text file, not a checkpoint; it begins with 'GGUF is"),
        (b"Salted__" + bytes(range(200)), "encrypted with openssl"),
        (b"\x7fELF" + bytes(range(200)), "a compiled program or library"),
        (b"PK\5\6" + bytes(18), "a zip archive"),
    ],
)
def test_a_file_is_named_by_its_first_bytes(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    error = refusal(path)
    assert error.message.startswith(f"{path}: {words}")
    assert error.repair
    assert "download" not in error.repair


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("m/archive_format", "m/data/aotinductor/model/a.so"), "a compiled model (AOTInductor)"),
        (
            ("m/.data/extern_modules", "m/model.pkl"),
            "a package of code and weights (torch.package)",
        ),
        (("serialized_exported_program.json", "version"), "an exported program (torch.export)"),
        (("m/bytecode.pkl", "m/data.pkl"), "a TorchScript program, not only weights"),
        (("m/version", "m/.data/serialization_id"), "a file of torch.save without data.pkl"),
        (("a", "b", "c", "d", "e/"), "a zip archive of other files: a, b, c and 1 more"),
    ],
)
def test_a_zip_archive_is_named_by_its_records(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
        for name in names:
            file.writestr(name, b"")
    error = refusal(tmp_path / "model.pt")
    assert error.message.startswith(f"{tmp_path / 'model.pt'}: {words}")
    assert error.repair


def test_folders_of_long_names_in_a_zip_archive_take_little(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
        for number in range(10):
            file.writestr(f"{number}{'x' * 60_000}/", b"")
    tracemalloc.start()
    assert refusal(tmp_path / "model.pt").message == f"{tmp_path / 'model.pt'}: a zip archive"
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10 * MIB


def test_an_encrypted_record_is_named(tmp_path: Path) -> None:
    data = bytearray(saved())
    at = data.find(b"PK\1\2")
    data[at + 8] |= 1
    (tmp_path / "model.pt").write_bytes(data)
    assert " is compressed or encrypted" in refusal(tmp_path / "model.pt").message


def test_a_directory_before_the_start_of_the_archive_is_damage(tmp_path: Path) -> None:
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 500, 0, 0)
    (tmp_path / "model.bin").write_bytes(b"PK\3\4" + bytes(60) + end)
    assert ": damaged: " in refusal(tmp_path / "model.bin").message
