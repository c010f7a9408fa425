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
from harms import complaint
from state_files import assert_same, read_state

from weighin.stream import formats
from weighin.units import MIB

STATE = {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(3)}


def saved() -> bytes:
    file = io.BytesIO()
    torch.save(STATE, file)
    return file.getvalue()


def linear() -> torch.nn.Module:
    model = torch.nn.Linear(4, 3)
    model.load_state_dict(STATE)
    return model.eval()


def zipped(records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as target:
        for name, content in records.items():
            target.writestr(name, content)
    return file.getvalue()


def script(path: Path) -> None:
    torch.jit.save(torch.jit.trace(linear(), torch.zeros(2, 4)), path)


def exported(path: Path) -> None:
    torch.export.save(torch.export.export(linear(), (torch.zeros(2, 4),)), path)


def arrays(path: Path) -> None:
    with path.open("wb") as file:
        numpy.savez(file, **{name: one.numpy() for name, one in STATE.items()})  # type: ignore[arg-type]


def repacked(path: Path) -> None:
    source = zipfile.ZipFile(io.BytesIO(saved()))
    records = {one.filename: source.read(one) for one in source.infolist()}
    path.write_bytes(zipped(records, zipfile.ZIP_DEFLATED))


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
    command = complaint(formats.read, tmp_path / name).repair.partition(": ")[2]
    command = re.sub("^python ", f"{shlex.quote(sys.executable)} -W ignore ", command)
    subprocess.run(command, shell=True, check=True, timeout=120)
    found = read_state(tmp_path / result)
    assert_same(dict(sorted(found.items())), dict(sorted(STATE.items())))


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
        (b'{"error": "Repository not found"}', "a text file, not a checkpoint; it begins with '{\"error"),
        (b"PK of the table: none", "a text file, not a checkpoint; it begins with 'PK of"),
        (b"GGUF is a format", "a text file, not a checkpoint; it begins with 'GGUF is"),
        ("ä".encode() * 300, "a text file, not a checkpoint; it begins with 'ää"),
        (b"Salted__" + bytes(range(200)), "encrypted with openssl"),
        (b"\x7fELF" + bytes(range(200)), "a compiled program or library"),
        (b"PK\5\6" + bytes(18), "a zip archive"),
        (("m/archive_format", "m/data/aotinductor/model/a.so"), "a compiled model (AOTInductor)"),
        (("m/.data/extern_modules", "m/model.pkl"), "a package of code and weights (torch.package)"),
        (("serialized_exported_program.json", "version"), "an exported program (torch.export)"),
        (("m/bytecode.pkl", "m/data.pkl"), "a TorchScript program, not only weights"),
        (("m/version", "m/.data/serialization_id"), "a file of torch.save without data.pkl"),
        (("a", "b", "c", "d", "e/"), "a zip archive of other files: a, b, c and 1 more"),
    ],
    ids=[
        "pickle 0", "pickle 2", "JSON", "PK", "GGUF", "text", "encrypted", "program", "zip", "AOTInductor",
        "torch.package", "torch.export", "TorchScript", "no data.pkl", "other files",
    ],
)  # fmt: skip
def test_a_file_is_named_by_its_first_bytes_or_records(
    tmp_path: Path, content: bytes | tuple[str, ...], words: str
) -> None:
    path = tmp_path / "model.bin"
    names = content if isinstance(content, tuple) else ()
    path.write_bytes(content if isinstance(content, bytes) else zipped(dict.fromkeys(names, b"")))
    error = complaint(formats.read, path)
    assert error.message.startswith(f"{path}: {words}")
    assert error.repair
    assert names or "download" not in error.repair


def test_folders_of_long_names_in_a_zip_archive_take_little(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(zipped({f"{number}{'x' * 60_000}/": b"" for number in range(10)}))
    tracemalloc.start()
    assert complaint(formats.read, path).message == f"{path}: a zip archive"
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10 * MIB


def test_an_encrypted_record_is_named(tmp_path: Path) -> None:
    data, path = bytearray(saved()), tmp_path / "model.pt"
    data[data.find(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    assert " is compressed or encrypted" in complaint(formats.read, path).message


def test_a_directory_before_the_start_of_the_archive_is_damage(tmp_path: Path) -> None:
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 500, 0, 0)
    (path := tmp_path / "model.bin").write_bytes(b"PK\3\4" + bytes(60) + end)
    assert ": damaged: " in complaint(formats.read, path).message
