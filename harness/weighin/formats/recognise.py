"""Recognise the kind of a file that weighin does not read, such as a Keras model or an archive.

Each kind has a name and a repair: advice how to make a checkpoint from a file of this kind.
"""

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence, Set
from pathlib import Path
from shlex import quote
from typing import Final

from weighin.text import few, one_line

Recognised = tuple[str, str] | None
"""The kind of a file, and the repair: the step from this file to a checkpoint."""

_SHOWN: Final = 60  # the characters of a text file that an error shows
MOST_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors format

_INTO_TORCH: Final = (
    "load it into a PyTorch model with the library that it comes from, and save that model:"
    " torch.save(model.state_dict(), ...)"
)
_COMPILED: Final = "give the weights that it was made from"
_MAGIC: Final = (
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras and TensorFlow write them", _INTO_TORCH),
    (
        0,
        b"\x93NUMPY",
        "one NumPy array (.npy), without a tensor's name",
        "name it: torch.save({NAME: torch.from_numpy(numpy.load(FILE))}, ...)",
    ),
    *(
        (0, magic, "a file of llama.cpp from before GGUF", _COMPILED)
        for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")
    ),
    (4, b"TFL3", "a TensorFlow Lite model", _COMPILED),
    (4, b"ET12", "an ExecuTorch program", _COMPILED),
    (0, b"ftrt", "a TensorRT engine", _COMPILED),
    (0, b"\x7fELF", "a compiled program or library", _COMPILED),
    (0, b"\x12\x01\0\0\0\0\0\0", "parameters of MXNet", _INTO_TORCH),
)
_PACKED: Final = (
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"BZh", "bzip2", ".bz2"),
    (b"\xfd7zXZ\0", "xz", ".xz"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
    (b"\x04\x22\x4d\x18", "lz4", ".lz4"),
)
_ARCHIVES: Final = (
    (b"7z\xbc\xaf\x27\x1c", "7z", "7z x"),
    (b"Rar!\x1a\x07", "rar", "unrar x"),
)
_ENCRYPTED: Final = (
    (b"age-encryption.org/", "age", "age -d -o {out} {file}"),
    (b"Salted__", "openssl", "openssl enc -d -CIPHER -in {file} -out {out}"),
    (b"-----BEGIN PGP MESSAGE-----", "GnuPG", "gpg -o {out} -d {file}"),
)
_OF_SCRIPTS: Final = {"constants.pkl", "bytecode.pkl"}
_OF_EXPORTS: Final = {"models/model.json", "serialized_exported_program.json"}
_SCRIPTED_WEIGHTS: Final = "torch.jit.load(p, 'cpu').state_dict()"
_EXPORTED_WEIGHTS: Final = "dict(torch.export.load(p).state_dict)"
_NUMPY_WEIGHTS: Final = "{k: torch.from_numpy(v) for k, v in numpy.load(p).items()}"
_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
_TORCH_01: Final = ("sys_info", "pickle", "tensors", "storages")  # names in its tar archive
_OF_TENSORFLOW: Final = re.compile(r".*\.(index|meta|data-\d{5}-of-\d{5})")
_OLD_PICKLE: Final = re.compile(rb"\([dl]p\d+\n|c[\w.]+\n\w+\n(?:p\d+\n|q)|[}\]]q\0")
"""Matches the beginning of a dict, a list or an object in the pickle protocols 0 and 1."""

_MSGPACK_MAP: Final = re.compile(
    rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.)[\w./]", re.DOTALL
)
_ONNX: Final = re.compile(rb"\x08[\x03-\x1f][\x12\x1a\x22\x2a\x32\x3a\x42]")
_SAVED_MODEL: Final = b"\x08\x01\x12"


def by_content(path: Path, head: bytes) -> Recognised:
    """Return a file's kind by its first bytes (``head``); None for a checkpoint or if unknown."""
    if is_safetensors(head) or is_legacy(
        head
    ):  # the first bytes of safetensors can equal any magic number
        return None
    if path.suffix == ".distcp":
        return "a data file of torch.distributed.checkpoint", f"give its folder: {path.parent}"
    for at, magic, what, way in _MAGIC:
        if head[at:].startswith(magic):
            return what, way
    if not head.strip(b"\0"):
        return (
            "begins with zeros, as a file whose bytes are not written yet",
            "wait until the program that writes it has ended; if none does, a copy was not finished:"
            " make it again",
        )
    return (
        _wrapped(path, head)
        or _of_tensorflow(path, head)
        or _serialised(head)
        or _text(head)
    )  # fmt: skip


def is_safetensors(head: bytes) -> bool:
    """Tell whether a file begins like a safetensors file: 8 bytes with a length, then "{"."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MOST_HEADER_BYTES


def is_zip(head: bytes) -> bool:
    return head.startswith(b"PK") and not is_safetensors(head)


def is_legacy(head: bytes) -> bool:
    """Tell whether a file begins like a file of torch before 1.6: with a pickled magic number."""
    return _LEGACY_MAGIC in head[:32]


def _wrapped(path: Path, head: bytes) -> Recognised:
    file = quote(str(path))
    for magic, name, suffix in _PACKED:
        if head.startswith(magic):
            inner = path.with_suffix("") if path.suffix == suffix else f"{path}.unpacked"
            return f"compressed with {name}", f"unpack it: {name} -dc {file} > {quote(str(inner))}"
    for magic, name, command in _ENCRYPTED:
        if head.startswith(magic):
            out = quote(f"{path}.decrypted")
            return f"encrypted with {name}", f"decrypt it: {command.format(file=file, out=out)}"
    for magic, name, command in _ARCHIVES:
        if head.startswith(magic):
            return _archive(name, f"{command} {file}")
    if head[257:262] != b"ustar":
        return None
    if head[:100].rstrip(b"\0").decode("latin-1").removeprefix("./") in _TORCH_01:
        return (
            "in the tar format of torch 0.1",
            "if you trust the file, " + resaving(path, weights_only=False),
        )
    return _archive("tar", f"tar xf {file}")


def _archive(name: str, command: str, content: str = "") -> Recognised:
    return f"a {name} archive{content}", f"unpack it, and give the checkpoint in it: {command}"


def _of_tensorflow(path: Path, head: bytes) -> Recognised:
    if head.startswith(_SAVED_MODEL) or _OF_TENSORFLOW.fullmatch(path.name):
        return "a part of a TensorFlow checkpoint or SavedModel", _INTO_TORCH
    return None


def _serialised(head: bytes) -> Recognised:
    is_pickle = head[:1] == b"\x80" and head[1:2] in {b"\2", b"\3", b"\4", b"\5"}
    if is_pickle or _OLD_PICKLE.match(head):
        return (
            "a pickle that torch.save did not write, and was NOT executed",
            "if you trust the file, load it with the program that wrote it, and save its tensors:"
            " torch.save({NAME: TENSOR, ...}, ...)",
        )
    if _ONNX.match(head):
        return "an ONNX model", _COMPILED
    if _MSGPACK_MAP.match(head):
        return "a msgpack file, as flax writes them", _INTO_TORCH
    return None


def _text(head: bytes) -> Recognised:
    try:
        text = getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return None
    if any(letter < " " and letter not in "\t\n\r\f" for letter in text):
        return None
    return (
        f"a text file, not a checkpoint; it begins with {one_line(text, _SHOWN)!r}",
        "give the checkpoint itself; if the text is an answer of a web server, ask it for the file again",
    )


def by_records(path: Path, names: Sequence[str]) -> Recognised:
    """Return the kind of a zip archive by the names in the archive; None if ``torch.save`` may have
    written the archive.
    """
    inner = {name.partition("/")[2] for name in names}
    is_script = not _OF_SCRIPTS.isdisjoint(inner)
    if "data.pkl" in inner and not is_script:
        return None
    if is_script:
        return (
            "a TorchScript program, not only weights",
            f"if you trust it, write its weights: {_line(_SCRIPTED_WEIGHTS, path)}",
        )
    if not _OF_EXPORTS.isdisjoint({*inner, *names}):
        return (
            "an exported program (torch.export), not only weights",
            f"if you trust it, write its weights: {_line(_EXPORTED_WEIGHTS, path)}",
        )
    return _of_other_program(path, names, inner)


def _of_other_program(path: Path, names: Sequence[str], inner: Set[str]) -> Recognised:
    if "archive_format" in inner:
        return "a compiled model (AOTInductor)", _COMPILED
    if ".data/extern_modules" in inner:
        return (
            "a package of code and weights (torch.package)",
            "if you trust its code, load the model with torch.package.PackageImporter, and save its"
            " weights: torch.save(model.state_dict(), ...)",
        )
    if names and all(name.endswith(".npy") for name in names):
        return (
            "arrays of NumPy (.npz)",
            f"write them as tensors: {_line(_NUMPY_WEIGHTS, path, 'numpy, ')}",
        )
    if ".data/serialization_id" in inner:
        return (
            "a file of torch.save without data.pkl, as when torch.save is interrupted",
            "save it again",
        )
    if "model.weights.h5" in names:
        return "a Keras model", _INTO_TORCH
    files = [name for name in names if not name.endswith("/")]
    content = f" of other files: {one_line(few(files))}" if files else ""
    return _archive("zip", f"unzip {quote(str(path))}", content)


def resaving(path: Path, *, weights_only: bool = True) -> str:
    """Return the repair (advice) to load a file with torch.load, and to save the weights again."""
    return f"save it again: {_line(f'torch.load(p, weights_only={weights_only})', path)}"


def _line(value: str, path: Path, modules: str = "") -> str:
    """Return a command that saves the value of a Python expression, in which ``p`` is the path."""
    code = f"import sys, {modules}torch; p = sys.argv[1]; torch.save({value}, p + '.new')"
    return f'python -c "{code}" {quote(str(path))}'
