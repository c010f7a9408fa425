"""A file or folder of another kind is named for what it is, and the step that it comes with leads on."""

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
from pytest import MonkeyPatch
from snapshots import Compare
from state_files import assert_same, read_state

from weighin.stream import formats
from weighin.suite import registry
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


MAGIC = [b"\x1f\x8b", b"BZh", b"\x80\2", b"\x08\x08\x12", b"\x08\x01\x12", b"\x81\xa6", b"PK\5"]  # fmt: skip


@pytest.mark.parametrize("magic", MAGIC, ids=[one.hex() for one in MAGIC])
def test_a_length_that_equals_a_magic_number_is_a_length(tmp_path: Path, magic: bytes) -> None:
    """A safetensors file begins with the length of its header, which may be any number."""
    path, length = tmp_path / "model.bin", int.from_bytes(magic, "little")
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"weight": entry}).encode().ljust(length)
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(8))
    found = formats.read(path)
    assert (found.format, [one.name for one in found]) == ("safetensors", ["weight"])


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


CONFIG = '{"architectures": ["LlamaForCausalLM"]}'
ADAPTER = {"adapter_config.json": "{}"}
FOLDERS: dict[str, dict[str, str]] = {
    "empty": {},
    "an adapter": ADAPTER | {"adapter_model.safetensors": "", "README.md": ""},
    "an adapter beside a training run": ADAPTER | {"latest": "global_step5"},
    "an adapter whose config is 5,000 brackets": {"adapter_config.json": "[" * 5000, "config.json": CONFIG},
    "a pipeline of two models": {
        "model_index.json": "{}", "text_encoder/model.safetensors": "", "scheduler/scheduler_config.json": "{}",
        "unet/diffusion_pytorch_model.safetensors": "x",
    },
    "a pipeline whose index is 5,000 brackets": {
        "model_index.json": "[" * 5000, "unet/diffusion_pytorch_model.safetensors": "x", "unet/config.json": "{}",
    },
    "a pipeline without weights": {"model_index.json": "{}", "unet/config.json": "{}"},
    "a pipeline with modules": {"modules.json": "[]", "model_index.json": "{}"},
    "five GGUF models": {f"q{bits}.gguf": "GGUF" for bits in range(2, 7)},
    "a variant": {"config.json": CONFIG, "model.fp16.safetensors": ""},
    "a variant in shards": {
        "config.json": CONFIG, "model.safetensors.index.fp16.json": "{}",
        "model.fp16-00001-of-00002.safetensors": "", "model.fp16-00002-of-00002.safetensors": "",
    },
    "shards without their index": {"config.json": CONFIG, "model-00001-of-00002.safetensors": ""},
    "a file of another name": {"mine.pt": "", "notes.txt": ""},
    "weights of Meta": {"config.json": CONFIG, "consolidated.pth": ""},
    "weights of TensorFlow": {"config.json": CONFIG, "tf_model.h5": ""},
    "a config alone": {"config.json": CONFIG},
    "checkpoints of a run": {"checkpoint-10/model.safetensors": "", "checkpoint-20/model.safetensors": ""},
    "modules and weights without a config": {"modules.json": '[{"path": ""}]', "model.safetensors": ""},
    "modules that are 5,000 brackets": {"modules.json": "[" * 5000},
    "a run of weighin": {"plan.json": "{}", "results.jsonl": ""},
    "notes": {"notes.txt": ""},
}  # fmt: skip
BYTES = bytes(range(200))
FILES = {
    "cut.gguf": b"GGUF\3\0\0\0", "gguf.safetensors": b"GGUF\3\0\0\0", "zip.gguf": b"PK\3\4",
    "nets.py": b"def build(): ...", "dict.bin": b"}q\0U\1ak\1s.", "PK.bin": b"PK of the table: none",
    "umlauts.bin": "ä".encode() * 300, "encrypted.bin": b"Salted__" + BYTES, "program.bin": b"\x7fELF" + BYTES,
}  # fmt: skip
ARCHIVES = {
    "compiled.bin": ("m/archive_format", "m/data/aotinductor/model/a.so"),
    "package.bin": ("m/.data/extern_modules", "m/model.pkl"),
    "nothing.bin": ("m/version", "m/.data/serialization_id"),
    "five.bin": ("a", "b", "c", "d", "e/"),
}


def test_a_folder_or_a_file_says_what_it_is(
    tmp_path: Path, monkeypatch: MonkeyPatch, same: Compare
) -> None:
    said = []
    for title, files in FOLDERS.items():
        folder = tmp_path / title / "F"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        error = str(complaint(registry.model, str(folder)))
        assert str(complaint(formats.detect, folder)) == error
        said.append(f"{title}:\n{error.replace(str(folder), 'F')}\n")
    monkeypatch.chdir(tmp_path)
    archives = {name: zipped(dict.fromkeys(names, b"")) for name, names in ARCHIVES.items()}
    for name, content in (FILES | archives).items():
        Path(name).write_bytes(content)
        said.append(f"{complaint(registry.model, name)}\n")
    same("unknown_folders.txt", "\n".join(said))
