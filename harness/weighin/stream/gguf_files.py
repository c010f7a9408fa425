"""Read GGUF files, the format of llama.cpp: their tables, and the values of quantised tensors.

::

    4 bytes   GGUF
    uint32    version: 2 or 3
    uint64    number of tensors
    uint64    number of metadata
    metadata  each: key, type, value
    tensors   each: name, number of dimensions, dimensions (the fastest first), type, offset
    data      aligned to general.alignment, 32 by default

A quantised tensor is a sequence of blocks; each block has scales, and codes for 32 to 256 elements, of
which the package gguf computes the elements. The parts of a large model are read as one checkpoint.
"""

import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from weighin.errors import CheckpointError, extra
from weighin.stream import foreign
from weighin.stream.slices import LARGEST, MOST_DIMENSIONS, Checkpoint, Slice, is_sizes, row_major
from weighin.text import few, shown

if TYPE_CHECKING:
    import torch

NAME: Final = "gguf"

# By the number of a ggml type: its name, the elements in a block, and the bytes of a block.
TYPES: Final = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip
# Which the package gguf does not dequantise. Q8_1 and Q8_K are for intermediate results.
UNDECODED: Final = frozenset({"Q8_1", "Q8_K", "Q1_0"})
_DTYPES: Final = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
}  # fmt: skip
_SUFFIX: Final = ".gguf"
_MAGIC: Final = b"GGUF"
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MOST_VALUES: Final = 1_000_000  # in one file: a vocabulary has up to 800,000 texts
_COMFY: Final = "comfy.gguf.orig_shape."  # before a tensor's name: the shape in the model
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_CONVERT: Final = "convert the model to GGUF again with a current llama.cpp"


def is_file(path: Path) -> bool:
    """Tell whether a file has the suffix .gguf or begins like a GGUF file."""
    return path.is_file() and (
        path.suffix == _SUFFIX or foreign.first_bytes(path).startswith(_MAGIC)
    )


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if path.is_file())


def matches(path: Path) -> bool:
    """Tell whether a path is a GGUF file or a folder of them; raise as ``file_of`` does."""
    return bool(files_in(path) and file_of(path)) if path.is_dir() else is_file(path)


def file_of(path: Path) -> Path:
    """Return ``path`` if it is a file; else the folder's only model (mmproj is none), or its first part."""
    if not path.is_dir():
        return path
    found = files_in(path)
    own = [file for file in found if "mmproj" not in file.name.lower()]
    models = {_PART.sub(r"\1-\3", file.name): file for file in reversed(own or found)}
    if len(models) > 1:
        names = sorted(file.name for file in models.values())
        raise CheckpointError(
            f"{path}: this folder has {len(models)} GGUF models: {few(names)}",
            f"give the path of one model: {path / names[0]}",
        )
    return next(iter(models.values()))


def architecture(path: Path) -> str:
    """Return llama.cpp's name for the model's architecture, such as "qwen3"; "" if the file has none."""
    return str(read_tables(file_of(path))[0].get("general.architecture", ""))


def read(path: Path) -> Checkpoint:
    """Return the type and place of each tensor of a model, in one file or in several parts."""
    file = file_of(path)
    parts = [file]
    if match := _PART.fullmatch(file.name):
        stem, _, count = match.groups()
        names = (f"{stem}-{number:05d}-of-{count}{_SUFFIX}" for number in range(1, int(count) + 1))
        parts = [file.with_name(name) for name in names]
    places: dict[str, Slice] = {}
    for part in parts:
        if len(parts) > 1 and not part.is_file():
            raise CheckpointError(
                f"{file}: one of {len(parts)} parts of a model, of which {part.name} is missing",
                "copy or download the missing part into the folder of the others",
            )
        metadata, tensors = read_tables(part)
        of = metadata.get("split.count", 1)
        if isinstance(of, int) and of > len(parts):
            raise CheckpointError(
                f"{part}: one of {of} parts of a model, but its name does not say which part",
                f"name the parts as llama.cpp does: {part.stem}-00001-of-{of:05d}{_SUFFIX}",
            )
        for place in tensors:
            if (twice := places.setdefault(place.name, place)) is not place:
                what = f"tensor {shown(place.name)} is also in {twice.file.name!r}"
                raise CheckpointError(f"{part}: {what}", foreign.AGAIN)
    found = Checkpoint(places.values())
    found.files = tuple(parts)
    return found


def read_tables(file: Path) -> tuple[Mapping[str, Any], list[Slice]]:
    """Return the metadata of one file, without long texts and arrays, and each tensor's place."""

    def opened() -> tuple[Mapping[str, Any], list[Slice]]:
        if not foreign.check_present(file).startswith(_MAGIC):
            what = f"named like a GGUF file, but does not begin with the bytes {_MAGIC.decode()}"
            repair = "give the file the suffix of its real format"
            raise CheckpointError(f"{file}: {what}", repair)
        try:
            with file.open("rb") as stream:
                return _Tables(file, stream).read()
        except OSError as error:
            raise foreign.unreadable(file, error) from error

    return foreign.once(("gguf", file), opened)


class _Tables:
    """Reads the tables of one file from its start on, in bounded time and memory."""

    def __init__(self, file: Path, stream: IO[bytes]) -> None:
        self._file, self._stream = file, stream
        self._size = os.fstat(stream.fileno()).st_size
        self._values = 0

    def read(self) -> tuple[Mapping[str, Any], list[Slice]]:
        self._take(len(_MAGIC))
        version = self._number("I")
        if version not in (2, 3):
            what = f"GGUF version {version}; weighin reads the versions 2 and 3"
            if version & 0xFFFF == 0:
                what = "a GGUF file of a big-endian machine"
            raise self._error(what, _CONVERT)
        # Each entry takes at least so many bytes; making a tensor takes the time of five texts.
        tensors, metadata_count = self._count(24, 5), self._count(13)
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        entries = []
        for _ in range(tensors):
            name, dimensions = self._text(), min(self._number("I"), MOST_DIMENSIONS + 1)
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            entries.append((name, shape, self._number("I"), self._number("Q")))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._error("damaged: general.alignment is not a positive number")
        start = -(-self._stream.tell() // alignment) * alignment
        return metadata, [
            self._place(name, shape, metadata.get(f"{_COMFY}{name}", shape), kind, start + at)
            for name, shape, kind, at in entries
        ]

    def _place(self, name: str, shape: tuple[int, ...], own: Any, kind: int, at: int) -> Slice:
        """Return the place of a tensor; its shape in the model is ``own``, which ComfyUI flattens."""
        if kind not in TYPES:
            what = f"tensor {shown(name)} has ggml's type {kind}, which weighin does not know"
            raise self._error(what, _CONVERT)
        encoding, block, block_bytes = TYPES[kind]
        fits = is_sizes(shape) and is_sizes(own) and prod(own) == prod(shape)
        # torch multiplies the sizes of an empty tensor, too.
        fits = fits and prod(max(size, 1) for size in own) <= LARGEST // 8
        if not fits or prod(shape[-1:]) % block:
            what = f"tensor {shown(name)} of type {encoding} cannot have the shape {own}"
            raise self._error(f"damaged: {what}")
        length = prod(shape) // block * block_bytes
        if at + length > self._size:
            raise foreign.truncated(self._file, shown(name), at + length, self._size)
        dtype = _DTYPES.get(encoding, "float32")  # of dequantised elements
        place = name, own, row_major(own), dtype, self._file, at, at, length
        return Slice(*place, encoding="" if encoding in _DTYPES else encoding)

    def _value(self, kind: int) -> Any:
        """Return a number, a text, or an array as short as a shape; skip any other, and return None."""
        of = self._number("I") if kind == _ARRAY else kind
        form = _SCALARS.get(of)
        if not form and of != _STRING:  # llama.cpp does not read an array of arrays either
            raise self._error(f"damaged: a metadata value has the unknown type {of}")
        if kind != _ARRAY:
            return self._number(form) if form else self._text(or_skip=True)
        if form and (count := self._number("Q")) <= MOST_DIMENSIONS:
            self._add(count)
            return tuple(self._number(form) for _ in range(count))
        if form:
            return self._skip(count * struct.calcsize(form))
        for _ in range(self._count(8)):
            self._skip(self._number("Q"))
        return None

    def _count(self, least_bytes: int, values: int = 1) -> int:
        """Return the number of the entries that follow, if the file may hold so many."""
        count: int = self._number("Q")
        if count * least_bytes > self._size - self._stream.tell():
            raise self._error(
                f"truncated: it lists {count:,} entries, too many for its {self._size:,} bytes"
            )
        self._add(count * values)
        return count

    def _add(self, values: int) -> None:
        self._values += values
        if self._values > _MOST_VALUES:
            what = f"more than {_MOST_VALUES:,} tensors and metadata values in one file"
            raise self._error(what, foreign.SHARDS)

    def _text(self, *, or_skip: bool = False) -> Any:
        length = self._number("Q")
        if length <= 64 * 1024:
            return self._take(length).decode(errors="replace")
        if or_skip:
            return self._skip(length)
        raise self._error(f"damaged: a name has {length:,} bytes")

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self._take(struct.calcsize(form)))
        return value

    def _take(self, length: int) -> bytes:
        taken = self._stream.read(length)
        if len(taken) < length:
            raise self._error(f"truncated: the file ends at byte {self._size:,}, within its tables")
        return taken

    def _skip(self, length: int) -> None:
        self._stream.seek(min(length, self._size), os.SEEK_CUR)

    def _error(self, what: str, repair: str = foreign.AGAIN) -> CheckpointError:
        return CheckpointError(f"{self._file}: {what}", repair)


def check_decoded(places: Iterable[Slice]) -> None:
    """Raise CheckpointError if the package gguf cannot dequantise one of the tensors."""
    for where in places:
        if where.encoding in UNDECODED:
            what = f"{shown(where.name)} has the type {where.encoding}"
            raise CheckpointError(
                f"{where.file}: {what}; the package gguf does not dequantise this type",
                "quantise the model to another type with llama.cpp",
            )


def rows(where: Slice) -> "Iterator[torch.Tensor]":
    """Yield a tensor's rows in order, as float32 tensors of whole rows, some 32,768 elements each."""
    columns = where.shape[-1]
    if where.nbytes:
        # The heap keeps the memory of larger arrays after they are freed.
        for piece in decoded(where, max(1, 32 * 1024 // columns) * columns):
            yield piece.view(-1, columns)


def decoded(where: Slice, piece_elements: int) -> "Iterator[torch.Tensor]":
    """Yield the elements in order, as flat float32 tensors of at most ``piece_elements`` elements."""
    import numpy as np
    import torch

    check_decoded([where])
    block, size = 1, where.dtype.itemsize
    if where.encoding:
        with extra("gguf", f"reading {shown(where.name)}, which is quantised to {where.encoding},"):
            from gguf import GGMLQuantizationType, quants
        kind = GGMLQuantizationType[where.encoding]
        _, block, size = TYPES[kind]
    piece_bytes = piece_elements // block * size
    with where.file.open("rb") as file:
        file.seek(where.offset)
        for start in range(0, where.storage_bytes, piece_bytes):
            content = file.read(min(piece_bytes, where.storage_bytes - start))
            if len(content) < min(piece_bytes, where.storage_bytes - start):
                what = "another program truncated the file while weighin read it"
                raise CheckpointError(f"{where.file}: {what}", foreign.AGAIN)
            if not where.encoding:
                yield torch.frombuffer(bytearray(content), dtype=where.dtype).float()
                continue
            blocks = np.frombuffer(content, np.uint8).reshape(-1, size)
            values = np.empty((len(blocks), block), np.float32)
            step = 64 * 1024 // block  # the package gguf takes 20 bytes for each element
            for first in range(0, len(blocks), step):
                with np.errstate(all="ignore"):  # a scale may be infinite
                    found = quants.dequantize(blocks[first : first + step].reshape(-1), kind)
                values[first : first + step] = found.reshape(-1, block)
            yield torch.from_numpy(values.reshape(-1))
