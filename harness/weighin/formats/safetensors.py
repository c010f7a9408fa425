"""Read and write a safetensors file: a JSON header and the tensors' bytes, with nothing to execute.

::

    8 bytes   N, little-endian
    N bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest  the tensors' bytes, without gaps; data_offsets count from here

The header is parsed entry by entry, so that a crafted header takes no more memory than a valid header
with as many tensors.

The format has no shared tensors. weighin writes a tied tensor only under the first of its names.
The other names are in ``__metadata__`` as {name: first name}, like those of Hugging Face's
``save_model``. weighin reads these names too; other programs see only the first names. If tied
names are not at the end of the state dict, the metadata's key ``weighin.order`` lists all names in
order.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError, ConfigError
from weighin.formats.base import Pieces, Plans, Progress, Slices, TensorPlan, TensorSlice, row_major
from weighin.formats.dtypes import ITEM_BYTES, LARGEST, MOST_DIMENSIONS, dtype_name, is_sizes
from weighin.formats.foreign import (
    AGAIN,
    MOST_HEADER_BYTES,
    RESAVE,
    SHARDS,
    check_present,
    first_bytes,
    is_safetensors,
    no_duplicates,
    read_start,
    unknown,
    unreadable,
)
from weighin.text import short, shown

NAME: Final = "safetensors"
SUFFIX: Final = ".safetensors"

DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
"""Maps the format's name for each dtype to torch's name."""

MOST_TENSORS: Final = 200_000  # in one file: some 100 MiB of Python objects

_NAMES: Final = {torch_name: name for name, torch_name in DTYPES.items()}
_NOT_IN_TORCH: Final = ("F6_E2M3", "F6_E3M2")  # numbers of 6 bits
_PACKED: Final = {"float4_e2m1fn_x2": 2}
"""Maps a dtype of torch to the count of numbers that one element packs. In the header, the last
size of such a tensor's shape counts numbers, not elements."""

_METADATA: Final = "__metadata__"
_FORMAT: Final = "format"  # {"format": "pt"} names the writing library; it is not a tied name
_ORDER: Final = "weighin.order"
_PARTS: Final = "DCP_SHARDING_INFO"  # torch.distributed.checkpoint.HuggingFaceStorageWriter
_LATER: Final = re.compile(r'"saved_offsets":\s*\[[^\]]*[1-9]')
_WHOLE: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")  # written by one rank for all

_MOST_METADATA_BYTES: Final = 8 * 1024**2
_MOST_ENTRY_BYTES: Final = 64 * 1024
_SHORTEST: Final = 10  # bytes: the header's length, and {}
_ALIGNMENT: Final = 64  # bytes: the data begin at a cache line, as in torch.save

# Possessive (*+), so that a crafted header cannot make the expression store backtracking states.
_STRING: Final = rb'"(?:[^"\\]|\\.)*+"'
_ENTRY: Final = re.compile(
    rb"\s*+(" + _STRING + rb")\s*+:\s*+(\{(?:[^{}\"]|" + _STRING + rb")*+\}|null)\s*+([,}])",
    re.DOTALL,
)
_SIZE: Final = rb"(?:0|[1-9]\d{0,17}+)"
_USUAL: Final = re.compile(
    rb'"([^"\\\x00-\x1f\x7f-\xff]{0,1000}+)":\{"dtype":"(\w{1,20}+)","shape":\[((?:'
    + _SIZE + rb"(?:," + _SIZE + rb')*+)?+)\],"data_offsets":\[('
    + _SIZE + rb"),(" + _SIZE + rb")\]\}([,}])"
)  # fmt: skip
"""Matches a tensor's entry as most programs write it. Such an entry needs no JSON decoder, which would
take three times as long."""


def matches(path: Path) -> bool:
    head = first_bytes(path)
    return bool(head) and (path.suffix == SUFFIX or is_safetensors(head))


def files(path: Path) -> list[Path]:
    read(path)
    return [path]


def read(path: Path) -> Slices:
    """Return all tensors' offsets, in the order of ``weighin.order`` or else of the header.

    Raises:
        CheckpointError: the file is damaged (for example, tensors overlap), or a tensor has a dtype
            that torch lacks. The message names the faulty tensor or byte offset.
    """
    tensors, metadata = _read_header(path)
    parts = metadata.get(_PARTS)
    # The first rank's parts begin at 0, as whole tensors do: only the file's name tells them apart.
    if parts is not None and (_LATER.search(parts) or not _WHOLE.fullmatch(path.name)):
        raise CheckpointError(
            f"{path}: a shard of torch's distributed checkpoint ({_PARTS} in its header), which may"
            " hold only one rank's part of each tensor",
            "join the shards of all ranks: consolidate_safetensors_files(FOLDER, OUT, {name: 1 for"
            " each tensor}) in torch.distributed.checkpoint._consolidate_hf_safetensors",
        )
    slices = dict(tensors)
    for name, first in metadata.items():
        if name not in tensors and first in tensors and name not in {_FORMAT, _ORDER}:
            slices[name] = replace(tensors[first], name=name)
    if _ORDER not in metadata:
        return Slices(slices.values())
    try:
        order = json.loads(metadata[_ORDER])
    except (ValueError, RecursionError):
        order = None
    fits = isinstance(order, list) and all(isinstance(name, str) for name in order)
    if not fits or sorted(order) != sorted(slices):
        raise _damaged(path, f"{_METADATA}: {_ORDER} is not a list of the file's tensor names")
    return Slices(slices[name] for name in order)


def _read_header(path: Path) -> tuple[dict[str, TensorSlice], dict[str, str]]:
    """Return the tensors by their names, in the header's order, and the header's metadata."""
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
    tensors: dict[str, TensorSlice] = {}
    metadata: dict[str, str] | None = None
    for name, value in _entries(path, text, 8 + length):
        if name in tensors or (metadata is not None and name == _METADATA):
            raise _damaged(path, f"{shown(name)} occurs twice in the header")
        if name == _METADATA:
            metadata = _metadata(path, value)
        elif len(tensors) == MOST_TENSORS:
            raise CheckpointError(
                f"{path}: has more than {MOST_TENSORS:,} tensors, the most that weighin reads in one file",
                SHARDS,
            )
        else:
            is_read = isinstance(value, TensorSlice)
            tensors[name] = value if is_read else _tensor(path, name, value, 8 + length)
    _check_cover(path, tensors.values(), 8 + length, file_bytes)
    return tensors, metadata or {}


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


def _entries(path: Path, text: bytes, data_start: int) -> Iterator[tuple[str, Any]]:
    """Yield each entry's name with a ``TensorSlice`` if ``_USUAL`` matches, else with its JSON."""
    at, last = 1, b","
    if text[1:].strip() == b"}":
        return
    while last == b",":
        usual = _USUAL.match(text, at)
        if usual and (tensor := _usual_tensor(path, usual, data_start)):
            yield tensor.name, tensor
            at, last = usual.end(), usual[6]
            continue
        entry = _ENTRY.match(text, at)
        if entry is None:
            raise _damaged(path, f"the header is not valid JSON for tensors at byte {8 + at:,}")
        if entry.end(1) - entry.start(1) > _MOST_ENTRY_BYTES:
            raise _damaged(
                path, f"a name of more than {_MOST_ENTRY_BYTES:,} bytes begins at byte {8 + at:,}"
            )
        yield _value(path, entry[1], f"at byte {8 + at:,}"), entry[2]
        at, last = entry.end(), entry[3]
    if text[at:].strip():
        raise _damaged(path, f"the header has more text after its end at byte {8 + at:,}")


def _usual_tensor(path: Path, found: re.Match[bytes], data_start: int) -> TensorSlice | None:
    """Return the tensor of a match of ``_USUAL``; None if ``_tensor`` must check the entry."""
    name, dtype, sizes, first, last, _ = found.groups()
    kind = DTYPES.get(dtype.decode())
    shape = tuple(map(int, sizes.split(b","))) if sizes else ()
    at, size = data_start + int(first), int(last) - int(first)
    if kind is None or kind in _PACKED or len(shape) > MOST_DIMENSIONS or 0 in shape:
        return None
    if prod(shape) * ITEM_BYTES[kind] != size or name == _METADATA.encode():
        return None
    return TensorSlice(name.decode(), shape, row_major(shape), kind, path, at, at, size)


def _value(path: Path, text: bytes, place: str) -> Any:
    try:
        return json.loads(text.decode(), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise _damaged(path, f"the header is not JSON {place}: {reason}") from error


def _metadata(path: Path, text: bytes) -> dict[str, str]:
    if len(text) > _MOST_METADATA_BYTES:
        raise _damaged(
            path, f"{_METADATA} has {len(text):,} bytes, more than {_MOST_METADATA_BYTES:,}"
        )
    metadata: dict[str, str] = _value(path, text, f"in {_METADATA}") or {}
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise _damaged(path, f"{_METADATA}: {shown(key)} is not a string")
    return metadata


def _tensor(path: Path, name: str, text: bytes, data_start: int) -> TensorSlice:
    if len(text) > _MOST_ENTRY_BYTES:
        raise _damaged(path, f"tensor {shown(name)}: its entry is too long: {len(text):,} bytes")
    fields = _value(path, text, f"in tensor {shown(name)}") or {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        whose = "torch does not have" if dtype in _NOT_IN_TORCH else "weighin does not know"
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has the dtype {short(dtype)}; {whose} this dtype",
            "with the program that wrote the file, convert the tensor to a dtype of torch",
        )
    if not is_sizes(shape):
        raise _damaged(path, f"tensor {shown(name)}: {short(shape)} is not a shape")
    if not is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"tensor {shown(name)}: {short(offsets)} is not a pair of offsets")
    kind, (begin, end) = DTYPES[dtype], offsets
    numbers = _PACKED.get(kind, 1)
    needed = prod(shape) * ITEM_BYTES[kind] // numbers
    is_whole = numbers == 1 or (shape and shape[-1] % numbers == 0)
    fits = needed == end - begin and (
        needed > 0 or prod(max(size, 1) for size in shape) * ITEM_BYTES[kind] <= LARGEST
    )
    if not is_whole or not fits:
        raise _damaged(
            path,
            f"tensor {shown(name)}: {dtype} of shape {short(shape)} takes {needed:,} bytes, "
            f"but its offsets span {end - begin:,}",
        )
    shape = (*shape[:-1], *(size // numbers for size in shape[-1:]))
    at = data_start + begin
    return TensorSlice(name, shape, row_major(shape), kind, path, at, at, end - begin)


def _check_cover(
    path: Path, tensors: Iterable[TensorSlice], data_start: int, file_bytes: int
) -> None:
    """Raise CheckpointError unless the tensors fill the file after the header without overlap."""
    at, before = data_start, "the header"
    for one in sorted(tensors, key=lambda one: (one.offset, one.storage_bytes)):
        if one.offset != at:
            fault = "overlaps" if one.offset < at else "leaves a gap after"
            raise _damaged(
                path, f"tensor {shown(one.name)} at byte {one.offset:,} {fault} {before}"
            )
        at += one.storage_bytes
        before = f"tensor {shown(one.name)}"
        if at > file_bytes:
            raise CheckpointError(
                f"{path}: truncated: {before} ends at byte {at:,}, but the file ends at byte"
                f" {file_bytes:,}",
                AGAIN,
            )
    if at != file_bytes:
        raise _damaged(path, f"{file_bytes - at:,} bytes after {before} belong to no tensor")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", RESAVE)


def write(target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None) -> None:
    """Write a file that does not exist yet; see ``base.Layout.write``.

    Raises:
        ConfigError: the format does not allow a tensor's dtype or name, or a header so long.
    """
    from weighin.formats.zip_writer import write_raw  # not at the top: imports torch

    head, places = layout_of(tensors)
    write_raw(target, {0: head}, places, pieces, progress)


def layout_of(tensors: Plans) -> tuple[bytes, list[tuple[TensorPlan, int]]]:
    """Return the file's bytes before the data, and the offset of each tensor's data.

    The tensors with the widest elements come first, so that each offset is a multiple of the
    tensor's element size. The header keeps the order of ``tensors``. ``layout_of`` raises
    ConfigError as ``write`` does.
    """
    stored = [plan for plan in tensors if plan.shared_with is None]
    begins: dict[str, int] = {}
    at = 0
    for plan in sorted(stored, key=lambda plan: -plan.dtype.itemsize):
        begins[plan.name] = at
        at += plan.nbytes
    header: dict[str, Any] = {_METADATA: _metadata_of(tensors)}
    for plan in stored:
        begin, numbers = begins[plan.name], _PACKED.get(dtype_name(plan.dtype), 1)
        header[plan.name] = {
            "dtype": _dtype_of(plan),
            "shape": [*plan.shape[:-1], *(numbers * size for size in plan.shape[-1:])],
            "data_offsets": [begin, begin + plan.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MOST_HEADER_BYTES:
        raise ConfigError(
            f"the header of {len(stored):,} tensors takes {len(text):,} bytes, but safetensors allows "
            f"{MOST_HEADER_BYTES:,}",
            "write several files: weighin convert CHECKPOINT OUT --format sharded",
        )
    head = len(text).to_bytes(8, "little") + text
    return head, [(plan, len(head) + begins[plan.name]) for plan in stored]


def _dtype_of(plan: TensorPlan) -> str:
    kind = dtype_name(plan.dtype)
    if kind not in _NAMES or (not plan.shape and kind in _PACKED):
        scalars = " for a single element" if kind in _NAMES else ""
        raise ConfigError(
            f"tensor {shown(plan.name)}: safetensors has no dtype {plan.dtype}{scalars}",
            "write the format pt, which has every dtype of torch: --format pt",
        )
    if plan.name == _METADATA:
        raise ConfigError(
            f"a tensor is called {_METADATA}, a name that safetensors reserves",
            "write the format pt, which allows every name: --format pt",
        )
    return _NAMES[kind]


def _metadata_of(tensors: Plans) -> dict[str, str]:
    ties = {plan.name: plan.shared_with for plan in tensors if plan.shared_with is not None}
    if reserved := [name for name in ties if name in {_FORMAT, _ORDER}]:
        raise ConfigError(
            f"the tied tensor {reserved[0]!r} has a name that is reserved in the metadata",
            "write the format pt, which allows every name: --format pt",
        )
    metadata = {_FORMAT: "pt", **ties}
    names = [plan.name for plan in tensors]
    if ties and names[-len(ties) :] != list(ties):
        metadata[_ORDER] = json.dumps(names)
    return metadata
