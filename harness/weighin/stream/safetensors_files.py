"""Read a safetensors file: a JSON header and the tensors' bytes, with nothing to execute.

::

    8 bytes   N, little-endian
    N bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest  the tensors' bytes, without gaps; data_offsets count from here

The format has no shared tensors. The further names of a tied tensor are in ``__metadata__`` as {name:
first name}, as Hugging Face's ``save_model`` writes them; other programs see only the first names.
"""

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.stream import foreign
from weighin.stream.slices import ITEM_BYTES, LARGEST, Checkpoint, Slice, is_sizes, row_major
from weighin.text import short, shown

DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
"""Maps the format's name for each dtype to torch's name."""

PACKED: Final = {"float4_e2m1fn_x2": 2}
"""Maps a dtype of torch to the count of numbers that one element packs. In the header, the last
size of such a tensor's shape counts numbers, not elements."""

METADATA: Final = "__metadata__"
FORMAT: Final = "format"  # {"format": "pt"} names the writing library; it is not a tied name

_PARTS: Final = "DCP_SHARDING_INFO"  # torch.distributed.checkpoint.HuggingFaceStorageWriter
_LATER: Final = re.compile(r'"saved_offsets":\s*\[[^\[\]]*[1-9]')
_WHOLE: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")  # written by one rank for all

# Of a header, which may be crafted: 180,000 tensors of four dimensions have fewer.
_MOST_TEXT_BYTES: Final = 32 * 1024**2
_MOST_BRACKETS: Final = 700_000  # an empty list takes 3 bytes of text, and 80 of memory
_MOST_ITEMS: Final = 2_000_000


def read(path: Path) -> Checkpoint:
    """Return all tensors' offsets, in the order of the header; tied names come last."""
    text, file_bytes = _header(path)
    entries = _parsed(path, text)
    metadata: Any = entries.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict):
        raise foreign.damaged(path, f"{METADATA} is not a JSON object of strings")
    if odd := [key for key, value in metadata.items() if not isinstance(value, str)]:
        raise foreign.damaged(path, f"{METADATA}: the value of {shown(odd[0])} is not a string")
    start = 8 + len(text)
    slices = {name: _tensor(path, name, entry, start) for name, entry in entries.items()}
    at, before = start, "the header"
    for one in sorted(slices.values(), key=lambda one: (one.offset, one.storage_bytes)):
        if one.offset != at:
            fault = "overlaps" if one.offset < at else "leaves a gap after"
            what = f"tensor {shown(one.name)} at byte {one.offset:,} {fault} {before}"
            raise foreign.damaged(path, what)
        at, before = at + one.storage_bytes, f"tensor {shown(one.name)}"
        if at > file_bytes:
            raise foreign.truncated(path, before, at, file_bytes)
    if at != file_bytes:
        raise foreign.damaged(path, f"{file_bytes - at:,} bytes after {before} belong to no tensor")
    parts = metadata.get(_PARTS)
    # The first rank's parts begin at 0, as whole tensors do: only the file's name tells them apart.
    if parts is not None and (_LATER.search(parts) or not _WHOLE.fullmatch(path.name)):
        raise CheckpointError(
            f"{path}: a shard of torch's distributed checkpoint ({_PARTS} in its header), which may"
            " hold only one rank's part of each tensor",
            "join all ranks' shards by consolidate_safetensors_files(FOLDER, OUT, dict.fromkeys(NAMES, 1)) of"
            " torch.distributed.checkpoint._consolidate_hf_safetensors, with NAMES of all tensors",
        )
    for name, first in metadata.items():
        if name not in entries and first in entries and name != FORMAT:
            slices[name] = replace(slices[first], name=name)
    found = Checkpoint(slices.values())
    found.files = (path,)
    return found


def _header(path: Path) -> tuple[bytes, int]:
    """Return the header's JSON text, and the size of the file."""
    head = foreign.check_present(path)
    length = int.from_bytes(head[:8], "little")
    try:
        file_bytes, text = path.stat().st_size, foreign.read_start(path)[8:]
        if file_bytes < 10:  # the header's length, and {}
            least = f"{file_bytes} bytes, but a safetensors file has 10 or more"
            raise CheckpointError(f"{path}: truncated: {least}", foreign.AGAIN)
        if not foreign.is_safetensors(head):
            raise foreign.unknown(path, head)
        if 8 + length > file_bytes:
            raise foreign.truncated(path, "the header", 8 + length, file_bytes)
        if len(text) < length <= _MOST_TEXT_BYTES:
            with path.open("rb") as file:
                file.seek(8)
                text = file.read(length)
    except OSError as error:
        raise foreign.unreadable(path, error) from error
    if (
        length > _MOST_TEXT_BYTES
        or text.count(b"[") + text.count(b"{") > _MOST_BRACKETS
        or text.count(b",") + text.count(b":") > _MOST_ITEMS
    ):
        what = "its header lists more tensors or metadata than weighin reads in one file"
        raise CheckpointError(f"{path}: {what}", foreign.SHARDS)
    return text[:length], file_bytes


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    """Return the header as a dict, with a tuple (dtype, shape, offsets) for each well-formed tensor."""
    # The garbage collector keeps no track of tuples: with 20,000 dicts, it takes longer than the header.

    def fields(pairs: list[tuple[str, Any]]) -> Any:
        found = foreign.no_duplicates(pairs)
        dtype, shape, offsets = (found.get(key) for key in ("dtype", "shape", "data_offsets"))
        if isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list):
            return dtype, tuple(shape), tuple(offsets)
        return found

    try:
        entries = json.loads(text.decode(), object_pairs_hook=fields)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise foreign.damaged(path, f"the header is not JSON: {reason}") from error
    if not isinstance(entries, dict):
        raise foreign.damaged(path, "the header is not a JSON object of tensors")
    return entries


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> Slice:
    if not isinstance(entry, tuple):
        what = "must have a string as dtype, and lists as shape and data_offsets"
        raise foreign.damaged(path, f"tensor {shown(name)} {what}")
    dtype, shape, offsets = entry
    if dtype not in DTYPES:
        whose = "torch does not have" if dtype.startswith("F6_") else "weighin does not know"
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has the dtype {short(dtype)}; {whose} this dtype",
            "load it with the program that wrote it, convert the tensor to a dtype of torch, and save it",
        )
    kind = DTYPES[dtype]
    numbers, item_bytes, own = PACKED.get(kind, 1), ITEM_BYTES[kind], shape
    fits = is_sizes(shape) and is_sizes(offsets) and len(offsets) == 2
    if fits and numbers > 1:
        fits = bool(shape) and shape[-1] % numbers == 0
        own = (*shape[:-1], *(size // numbers for size in shape[-1:]))
    if (
        not fits
        or prod(own) * item_bytes != offsets[1] - offsets[0]
        or prod([max(size, 1) for size in shape]) * item_bytes > LARGEST
    ):
        what = f"data_offsets {short([*offsets])} do not fit {dtype} of shape {short([*shape])}"
        raise foreign.damaged(path, f"tensor {shown(name)}: {what}")
    at, size = data_start + offsets[0], offsets[1] - offsets[0]
    return Slice(name, own, row_major(own), kind, path, at, at, size)
