"""Read a safetensors file's header: the tensors and their offsets.

::

    8 bytes   N, little-endian
    N bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest  the tensors' bytes, without gaps; data_offsets count from here

This module parses the JSON entry by entry, so that a crafted header takes no more memory than a
valid header with as many tensors.
"""

import json
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats.base import TensorSlice, row_major
from weighin.formats.bounded_json import no_duplicates
from weighin.formats.dtypes import ITEM_BYTES, LARGEST, MOST_DIMENSIONS, is_sizes
from weighin.formats.first_bytes import read_start
from weighin.formats.recognise import is_safetensors
from weighin.formats.unknown_file import (
    AGAIN,
    RESAVE,
    SHARDS,
    check_present,
    short,
    shown,
    unknown,
    unreadable,
)

METADATA: Final = "__metadata__"
_METADATA_BYTES: Final = METADATA.encode()

DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
"""Maps the format's name for each dtype to torch's name."""

NOT_IN_TORCH: Final = ("F6_E2M3", "F6_E3M2")
"""The dtypes of the format that torch lacks: numbers of 6 bits."""

PACKED: Final = {"float4_e2m1fn_x2": 2}
"""Maps a dtype of torch to the count of numbers that one element packs. In the header, the last
size of such a tensor's shape counts numbers, not elements."""

_SHARDS: Final = "DCP_SHARDING_INFO"  # torch.distributed.checkpoint.HuggingFaceStorageWriter
_LATER: Final = re.compile(r'"saved_offsets":\s*\[[^\]]*[1-9]')
_WHOLE: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")  # written by one rank for all

MOST_TENSORS: Final = 200_000  # in one file: some 100 MiB of Python objects
MOST_METADATA_BYTES: Final = 8 * 1024**2
_MOST_ENTRY_BYTES: Final = 64 * 1024
_SHORTEST: Final = 10  # bytes: the header's length, and {}

# Possessive (*+), so that a crafted header cannot make the expression store backtracking states.
_STRING: Final = rb'"(?:[^"\\]|\\.)*+"'
_ITEM: Final = re.compile(
    rb"\s*+(" + _STRING + rb")\s*+:\s*+(null|\{(?:[^{}\"]|" + _STRING + rb")*+\})\s*+([,}])",
    re.DOTALL,
)

_SIZE: Final = rb"(?:0|[1-9]\d{0,17}+)"
_USUAL: Final = re.compile(
    rb'"([^"\\\x00-\x1f\x7f-\xff]{0,1000}+)":\{"dtype":"(\w{1,20}+)","shape":\[((?:'
    + _SIZE + rb"(?:," + _SIZE + rb')*+)?+)\],"data_offsets":\[('
    + _SIZE + rb"),(" + _SIZE + rb")\]\}([,}])"
)  # fmt: skip
"""Matches a tensor's entry as most programs write it. Such an entry needs no JSON decoder."""


def read_header(path: Path) -> tuple[dict[str, TensorSlice], dict[str, str]]:
    """Return the tensors by their names, in the header's order, and the header's metadata.

    Raises:
        CheckpointError: the file is damaged (for example, tensors overlap), or a tensor has a dtype
            that torch lacks. The message names the faulty tensor or byte offset.
    """
    head = check_present(path)
    try:
        file_bytes, text = path.stat().st_size, read_start(path)[8:]
        length = _length(path, head, file_bytes)
        if len(text) < length:
            with path.open("rb") as file:
                file.seek(8)
                text = file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
    text = text[:length]
    if len(text) != length:
        raise CheckpointError(
            f"{path}: another program truncated the file while weighin read it", AGAIN
        )
    data_start = 8 + length
    tensors: dict[str, TensorSlice] = {}
    metadata: dict[str, str] = {}
    has_metadata = False
    for name, value in _items(path, text, data_start):
        if name in tensors or (has_metadata and name == METADATA):
            raise _damaged(path, f"{shown(name)} occurs twice in the header")
        if name == METADATA:
            metadata, has_metadata = _metadata(path, value), True
        elif len(tensors) == MOST_TENSORS:
            raise CheckpointError(
                f"{path}: has more than {MOST_TENSORS:,} tensors, the most that weighin reads in one file",
                SHARDS,
            )
        elif isinstance(value, TensorSlice):
            tensors[name] = value
        else:
            tensors[name] = _entry(path, name, value, data_start)
    _check_cover(path, list(tensors.values()), data_start, file_bytes)
    parts = metadata.get(_SHARDS)
    # The first rank's parts begin at 0, as whole tensors do: only the file's name tells them apart.
    if parts is not None and (_LATER.search(parts) or not _WHOLE.fullmatch(path.name)):
        raise CheckpointError(
            f"{path}: a shard of torch's distributed checkpoint ({_SHARDS} in its header), which may"
            " hold only one rank's part of each tensor",
            "join the shards of all ranks: consolidate_safetensors_files(FOLDER, OUT, {name: 1 for"
            " each tensor}) in torch.distributed.checkpoint._consolidate_hf_safetensors",
        )
    return tensors, metadata


def _length(path: Path, head: bytes, file_bytes: int) -> int:
    if file_bytes < _SHORTEST:
        raise CheckpointError(
            f"{path}: truncated: {file_bytes} bytes, but a safetensors file has {_SHORTEST} or more",
            AGAIN,
        )
    if not is_safetensors(head):
        raise unknown(path, head)
    length = int.from_bytes(head[:8], "little")
    if 8 + length > file_bytes:
        raise CheckpointError(
            f"{path}: truncated: the header ends at byte {8 + length:,}, but the file ends at byte"
            f" {file_bytes:,}",
            AGAIN,
        )
    return length


def _items(path: Path, text: bytes, data_start: int) -> Iterator[tuple[str, Any]]:
    """Yield each entry's name with a ``TensorSlice`` if ``_USUAL`` matches, else with its JSON."""
    at, last = 1, b","
    if text[1:].strip() == b"}":
        return
    while last == b",":
        usual = _USUAL.match(text, at)
        if usual and (entry := _usual_entry(path, usual, data_start)):
            yield entry.name, entry
            at, last = usual.end(), usual[6]
            continue
        item = _ITEM.match(text, at)
        if item is None:
            raise _damaged(path, f"the header is not valid JSON for tensors at byte {8 + at:,}")
        if item.end(1) - item.start(1) > _MOST_ENTRY_BYTES:
            raise _damaged(
                path, f"a name of more than {_MOST_ENTRY_BYTES:,} bytes begins at byte {8 + at:,}"
            )
        yield _loads(path, item[1], at), item[2]
        at, last = item.end(), item[3]
    if text[at:].strip():
        raise _damaged(path, f"the header has more text after its end at byte {8 + at:,}")


def _usual_entry(path: Path, found: re.Match[bytes], data_start: int) -> TensorSlice | None:
    """Return the tensor of a match of ``_USUAL``; None if ``_entry`` must check the entry."""
    name, dtype, sizes, first, last, _ = found.groups()
    kind = DTYPES.get(dtype.decode())
    shape = tuple(map(int, sizes.split(b","))) if sizes else ()
    begin, end = int(first), int(last)
    if kind is None or kind in PACKED or len(shape) > MOST_DIMENSIONS or 0 in shape:
        return None
    if prod(shape) * ITEM_BYTES[kind] != end - begin or name == _METADATA_BYTES:
        return None
    return _place(path, name.decode(), kind, shape, data_start + begin, end - begin)


def _loads(path: Path, text: bytes, at: int | str) -> Any:
    try:
        return _DECODER.decode(text.decode())
    except (ValueError, RecursionError) as error:
        where = f"at byte {8 + at:,}" if isinstance(at, int) else f"in {at}"
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise _damaged(path, f"the header is not JSON {where}: {reason}") from error


_DECODER: Final = json.JSONDecoder(object_pairs_hook=no_duplicates)


def _metadata(path: Path, text: bytes) -> dict[str, str]:
    if len(text) > MOST_METADATA_BYTES:
        raise _damaged(
            path, f"{METADATA} has {len(text):,} bytes, more than {MOST_METADATA_BYTES:,}"
        )
    metadata: dict[str, str] = _loads(path, text, METADATA) or {}  # safetensors allows null, too
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise _damaged(path, f"{METADATA}: {shown(key)} is not a string")
    return metadata


def _entry(path: Path, name: str, text: bytes, data_start: int) -> TensorSlice:
    if len(text) > _MOST_ENTRY_BYTES:
        raise _damaged(path, f"tensor {shown(name)}: its entry is too long: {len(text):,} bytes")
    fields: Any = _loads(path, text, f"tensor {shown(name)}") or {}
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has the dtype {short(dtype)}; "
            + ("torch does not have" if dtype in NOT_IN_TORCH else "weighin does not know")
            + " this dtype",
            "with the program that wrote the file, convert the tensor to a dtype of torch",
        )
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    if not is_sizes(shape):
        raise _damaged(path, f"tensor {shown(name)}: {short(shape)} is not a shape")
    if not is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"tensor {shown(name)}: {short(offsets)} is not a pair of offsets")
    kind = DTYPES[dtype]
    begin, end = offsets
    numbers = PACKED.get(kind, 1)
    needed = prod(shape) * ITEM_BYTES[kind] // numbers
    is_whole = numbers == 1 or (shape and shape[-1] % numbers == 0)
    if (
        prod(max(size, 1) for size in shape) * ITEM_BYTES[kind] > LARGEST
        or not is_whole
        or needed != end - begin
    ):
        raise _damaged(
            path,
            f"tensor {shown(name)}: {dtype} of shape {short(shape)} takes {needed:,} bytes, "
            f"but its offsets span {end - begin:,}",
        )
    shape = (*shape[:-1], *(size // numbers for size in shape[-1:]))
    return _place(path, name, kind, shape, data_start + begin, end - begin)


def _place(
    path: Path, name: str, dtype: str, shape: tuple[int, ...], begin: int, size: int
) -> TensorSlice:
    return TensorSlice(name, shape, row_major(shape), dtype, path, begin, begin, size)


def _check_cover(path: Path, tensors: list[TensorSlice], data_start: int, file_bytes: int) -> None:
    """Raise CheckpointError unless the tensors fill the file after the header without overlap."""
    at, last = data_start, None
    for one in sorted(tensors, key=lambda one: (one.offset, one.storage_bytes)):
        if one.offset != at:
            before = f"tensor {shown(last)}" if last is not None else "the header"
            fault = "overlaps" if one.offset < at else "leaves a gap after"
            raise _damaged(
                path, f"tensor {shown(one.name)} at byte {one.offset:,} {fault} {before}"
            )
        at, last = one.offset + one.storage_bytes, one.name
        if at > file_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {shown(one.name)} ends at byte {at:,}, "
                f"but the file ends at byte {file_bytes:,}",
                AGAIN,
            )
    if at != file_bytes:
        before = f"tensor {shown(last)}" if last is not None else "the header"
        raise _damaged(path, f"{file_bytes - at:,} bytes after {before} belong to no tensor")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", RESAVE)
