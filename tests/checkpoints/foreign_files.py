"""Sound files of other kinds, which are named for what they are, and files whose bytes prove a fault."""

import bz2
import gzip
import io
import lzma
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy
import torch
from layouts import Layout, Made, Maker, refused
from small import WEIGHTS, folder_of, llama, saved, state

GROUP: Final = "Files of other kinds"

_INTO_TORCH: Final = r"\nload it into a PyTorch model with the library that it comes from, and save"
_COMPILED: Final = r"\ngive the weights from which it was made"
_COPY_AGAIN: Final = r"\ncopy or download the file again"

_POINTER: Final = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
_PAGE: Final = b"<!DOCTYPE html>\n<html><body>Sign in</body></html>"
_SOME: Final = bytes(range(60))


def _written(file: Path, content: bytes) -> Made:
    file.write_bytes(content)
    return Made(file, {})


def _bytes(name: str, content: bytes) -> Maker:
    return lambda folder: _written(folder / name, content)


def _saved() -> bytes:
    """Return a sound file of torch.save."""
    file = io.BytesIO()
    torch.save(state(), file)
    return file.getvalue()


def _packed(name: str, pack: Callable[[bytes], bytes]) -> Maker:
    return lambda folder: _written(folder / name, pack(_saved()))


def _zipped(records: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return file.getvalue()


def _compressed(whole: bytes) -> bytes:
    """Pack a file of torch.save again, as zip programs do."""
    with zipfile.ZipFile(io.BytesIO(whole)) as file:
        return _zipped({one.filename: file.read(one) for one in file.infolist()})


def _tarred(members: dict[str, bytes]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return whole.getvalue()


def _torch_0_1() -> bytes:
    """By hand: no torch of today writes it."""
    system = {"protocol_version": 1000, "little_endian": True}
    members = {"sys_info": system, "pickle": {}, "tensors": 0, "storages": 0}
    return _tarred({name: pickle.dumps(value, 2) for name, value in members.items()})


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 8))


def _by(name: str, write: Callable[[Path], object]) -> Maker:
    def make(folder: Path) -> Made:
        write(folder / name)
        return Made(folder / name, {})

    return make


def _script(file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(_model().eval(), torch.zeros(2, 8)), file)


def _exported(file: Path) -> None:
    torch.export.save(torch.export.export(_model().eval(), (torch.zeros(2, 8),)), file)


def _arrays(file: Path) -> None:
    arrays = {name: one.numpy() for name, one in state().items()}
    numpy.savez(file, **arrays)  # type: ignore[arg-type]


def _folder(name: str, content: bytes) -> Maker:
    """Return the maker of a Hugging Face folder with another file in place of one of its own."""

    def make(folder: Path) -> Made:
        folder_of(llama)(folder)
        _written(folder / name, content)
        return Made(folder, {}, is_folder=True)

    return make


def _of_tensorflow(folder: Path) -> Made:
    (folder / "model.ckpt.data-00000-of-00001").write_bytes(torch.randn(8).numpy().tobytes())
    index = bytes(64) + struct.pack("<Q", 0xDB4775248B80FB57)  # a table of LevelDB
    return _written(folder / "model.ckpt.index", index)


def _cut(make: Maker, left_bytes: int) -> Maker:
    def cut(folder: Path) -> Made:
        file = make(folder).path
        return _written(file, file.read_bytes()[:-left_bytes])

    return cut


_FILES: Final[dict[str, tuple[Maker, str]]] = {
    "a TorchScript program": (_by("model.pt", _script), r"a TorchScript program, not only weights\n.*write its weights: python -c .*torch.jit.load"),
    "an exported program (.pt2)": (_by("model.pt2", _exported), r"an exported program \(torch.export\), not only weights\n.*write its weights: python -c"),
    "a whole pickled module": (_by("model.pt", lambda file: torch.save(_model(), file)), r"a whole pickled module .* was NOT executed\n.*torch.save\(STATE_DICT"),
    "the tar format of torch 0.1": (lambda folder: _written(folder / "model.tar", _torch_0_1()), r"in the tar format of torch 0.1\n.*save it again"),
    "a pickle of pickle.dump": (
        _bytes("model.pkl", pickle.dumps({"weight": [1.0, 2.0]})),
        r"a pickle that torch.save did not write, and was NOT executed\nif you trust the file, load",
    ),
    "a checkpoint in a zip archive": (
        _packed("model.zip", lambda saved: _zipped({"model.pt": saved}, zipfile.ZIP_STORED)),
        r"a zip archive of other files: model.pt\nunpack it, and give the checkpoint in it: unzip ",
    ),
    "a checkpoint that a zip program compressed": (_packed("model.pt", _compressed), r"is compressed or encrypted\nsave it again: python -c .*torch.load"),
    "a checkpoint in a tar archive": (_packed("model.tar", lambda saved: _tarred({"model.pt": saved})), r"a tar archive\nunpack it, and give the checkpoint in it: tar xf "),
    "a checkpoint in gzip": (_packed("model.pt.gz", gzip.compress), r"compressed with gzip\nunpack it: gzip -dc \S+model.pt.gz > \S+model.pt$"),
    "a checkpoint in bzip2": (_packed("model.pt.bz2", bz2.compress), r"compressed with bzip2\nunpack it: bzip2 -dc "),
    "a checkpoint in xz": (_packed("model.pt.xz", lzma.compress), r"compressed with xz\nunpack it: xz -dc "),
    "a checkpoint in zstd": (_bytes("model.pt.zst", b"\x28\xb5\x2f\xfd" + _SOME), r"compressed with zstd\nunpack it: zstd -dc "),
    "a 7z archive": (_bytes("model.7z", b"7z\xbc\xaf\x27\x1c" + _SOME), r"a 7z archive\nunpack it, and give the checkpoint in it: 7z x "),
    "an encrypted file": (
        _bytes("model.pt.age", b"age-encryption.org/v1\n-> X25519 " + bytes(range(128, 200))),
        r"encrypted with age\ndecrypt it: age -d -o ",
    ),
    "arrays of NumPy (.npz)": (_by("model.npz", _arrays), r"arrays of NumPy \(.npz\)\nwrite them as tensors: python -c .*numpy.load"),
    "one array of NumPy (.npy)": (_by("weight.npy", lambda file: numpy.save(file, torch.randn(8, 8).numpy())), r"a NumPy array .*\ngive it a tensor name: torch.save"),
    "HDF5, as of Keras": (_bytes("model.h5", b"\x89HDF\r\n\x1a\n" + _SOME), rf"an HDF5 file, as Keras and TensorFlow write them{_INTO_TORCH}"),
    "HDF5 that is called pytorch_model.bin": (
        _bytes("pytorch_model.bin", b"\x89HDF\r\n\x1a\n" + _SOME),
        rf"an HDF5 file, as Keras and TensorFlow write them{_INTO_TORCH}",
    ),
    "a model of Keras 3": (_bytes("model.keras", _zipped(dict.fromkeys(("config.json", "model.weights.h5"), b"{}"))), rf"a Keras model{_INTO_TORCH}"),
    "a checkpoint of TensorFlow": (_of_tensorflow, rf"a TensorFlow checkpoint .*{_INTO_TORCH}"),
    "msgpack, as of flax": (
        _bytes("model.msgpack", b"\x81\xa6params\x81\xa5Dense\x81\xa6kernel\xc7\x10\x01" + bytes(16)),
        rf"a msgpack file, as flax writes them{_INTO_TORCH}",
    ),
    "an ONNX model": (_bytes("model.onnx", b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\xff\x01" + _SOME), rf"an ONNX model{_COMPILED}"),
    "a TensorFlow Lite model": (_bytes("model.tflite", b"\x1c\0\0\0TFL3" + _SOME), rf"a TensorFlow Lite model{_COMPILED}"),
    "a GGML file from before GGUF": (_bytes("model.bin", b"tjgg\3\0\0\0" + _SOME), rf"a file of llama.cpp from before GGUF{_COMPILED}"),
    "a file of distcp without its folder": (
        _packed("__0_0.distcp", lambda saved: saved),
        r"a data file of torch.distributed.checkpoint\ngive its folder: ",
    ),
    "an unknown kind of file": (
        _bytes("model.bin", bytes(range(200, 256)) * 20),
        r"weighin does not know this kind of file; .* c8 c9 ca cb cc cd ce cf\nload it with the program",
    ),
    "an unknown file that is called model.safetensors": (
        _bytes("model.safetensors", bytes(range(200, 256)) * 20),
        r"weighin does not know this kind of file; .* c8 c9 ca cb cc cd ce cf\nload it with the program",
    ),
    "a text in place of the file": (
        _bytes("model.pt", b"Entry not found"),
        r"a text file, not a checkpoint; it begins with 'Entry not found'\n.*an answer of a web server",
    ),
    "a web page in place of the file": (_bytes("model.safetensors", _PAGE), r"an HTML page, not a checkpoint\ndownload the checkpoint again"),
    "a pointer of git-lfs": (
        _bytes("model.safetensors", _POINTER),
        r"a git-lfs pointer .*not the checkpoint\nfetch the checkpoint: git lfs pull --include",
    ),
    "a folder whose weights are a pointer of git-lfs": (
        _folder(WEIGHTS, _POINTER), r"model.safetensors: a git-lfs pointer .*\nfetch the checkpoint: git lfs pull --include",
    ),
    "a file of zeros": (_bytes("model.safetensors", bytes(4096)), r"begins with zeros, .* not written yet\nwait until its program has written it"),
    "an empty file": (_bytes("model.pt", b""), rf"empty file{_COPY_AGAIN}"),
    "a file of torch.save that ends early": (_cut(saved(state), 600), rf"truncated: the zip archive has no end record{_COPY_AGAIN}"),
    "a file of torch.save before 1.6 that ends early": (
        _cut(saved(state, _use_new_zipfile_serialization=False), 100), rf"truncated: storage .* ends at byte .*{_COPY_AGAIN}",
    ),
    "a file of safetensors that ends early": (_cut(saved(state, WEIGHTS), 100), rf"truncated: tensor .* ends at byte .*{_COPY_AGAIN}"),
    "a file of safetensors that ends in its header": (
        _cut(saved(state, WEIGHTS), 4 * (16 * 8 + 2 * 32 * 8 + 32) + 50),
        rf"truncated: the header ends at byte .*{_COPY_AGAIN}",
    ),
}  # fmt: skip


LAYOUTS: Final = [
    *(Layout(name, GROUP, make, refused(words)) for name, (make, words) in _FILES.items()),
    Layout(
        "a folder whose config.json is a web page", GROUP, _folder("config.json", _PAGE),
        refused(r"config.json: an HTML page, not a checkpoint\ndownload the checkpoint again"),
    ),
]  # fmt: skip
