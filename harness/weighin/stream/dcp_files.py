"""Read the folder that torch.distributed.checkpoint writes (DCP).

::

    .metadata    a pickle: each tensor's shape and dtype, and the file and offset of each of its blocks
    *.distcp     the blocks, each in an archive of torch.save
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.stream import foreign, pickles, torch_files
from weighin.stream.pickles import Named, Opaque
from weighin.stream.slices import ITEM_BYTES, Checkpoint, Slice, is_sizes, row_major
from weighin.stream.torch_files import with_key
from weighin.text import shown

Shape = tuple[int, ...]

INDEX: Final = ".metadata"
_AGAIN: Final = (
    "load the folder with torch.distributed.checkpoint.load, and save it again; if that fails, too, it is"
    " damaged: get another copy"
)
_KNOWN: Final = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|MetadataIndex|TensorStorageMetadata"
    r"|BytesStorageMetadata|ChunkStorageMetadata|TensorProperties|StorageMeta|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo|torch\.serialization\._get_layout"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.MCoreMetadata"
    r"|torch\.(Size|bool|(q?u?int|bits|b?float|complex)\d\w{,30})"
    r"|pathlib\.(_local\.)?(Posix|Windows)Path|collections\.OrderedDict"
    r"|builtins\.getattr"  # Python 3.11.0 to 3.11.3 pickles enum members with getattr
)
_MOST_BLOCKS: Final = 2_000  # of one tensor; every pair of blocks is compared


def files(folder: Path) -> list[Path]:
    return [folder / INDEX, *sorted(folder.glob("*.distcp"))]


def read(folder: Path, key: str) -> Checkpoint:
    """Return all tensors, or those below ``key``. torch has flattened nested dicts into dotted names."""
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            pickled = pickles.load(path, file, resave=_AGAIN)
    except OSError as error:
        raise foreign.unreadable(path, error) from error
    if odd := [name for name in pickled.names if not _KNOWN.fullmatch(name)]:
        what = "the pickle holds more than tensors, and weighin did NOT execute it: it refers to"
        repair = f"if you trust the folder, {_merge(path)}"
        raise CheckpointError(f"{path}: {what} {odd[0]}", repair)
    metadata = _fields(pickled.value)
    tensors, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not (isinstance(tensors, dict) and isinstance(stored, dict) and tensors):
        raise foreign.damaged(path, "no state_dict_metadata or no storage_data", _AGAIN)
    places: dict[tuple[str, Shape], Any] = {}  # of the blocks of each tensor
    for index, place in stored.items():
        name, start = _fields(index).get("fqn"), _fields(index).get("offset")
        if isinstance(name, str) and is_sizes(start):
            places[name, tuple(start)] = _fields(place)
    found, values = Checkpoint(), dict[str, object]()
    archives: dict[tuple[str, int], Slice] = {}
    paths: Any = metadata.get("planner_data")  # the keys of each tensor in nested dicts
    sizes = Counter[str]()  # of the state dicts in nested dicts, but those of optimizers
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise foreign.damaged(path, f"a name is not a string: {shown(name)}", _AGAIN)
        if key and not name.startswith(f"{key}."):
            continue
        if isinstance(tensor, Opaque) and tensor.kind.endswith(".BytesStorageMetadata"):
            values[name] = Opaque("pickled object")
            continue
        found.append(_tensor(path, name, tensor, places, archives))
        keys: Any = paths.get(name) if isinstance(paths, dict) else None
        if isinstance(keys, tuple) and len(keys) > 1 and isinstance(keys[0], str):
            sizes[keys[0]] += 0 if "optim" in keys[0].lower() else found[-1].nbytes
    if values and not key and (way := with_key(sizes)):
        what = f"not a flat state dict of tensors: {shown(next(iter(values)))} is not a tensor"
        raise CheckpointError(f"{path}: {what}", way)
    found.values, found.files = values, (*files(folder),)
    return found


def _fields(value: Any) -> Any:
    """Return the attributes that the pickle sets on an object."""
    state = value.contents[-1] if isinstance(value, Opaque) and value.contents else None
    return state if isinstance(state, dict) else {}


def _tensor(
    path: Path, key: str, tensor: Any, places: Mapping[Any, Any], archives: dict[Any, Slice]
) -> Slice:
    try:
        fields = _fields(tensor)
        chunks = fields["chunks"] if isinstance(fields["chunks"], list) else []
        blocks = [(one["offsets"], one["sizes"]) for one in map(_fields, chunks)]
        shape, dtype = fields["size"], fields["properties"].contents[-1][0]
        is_tensor = isinstance(dtype, Named) and all(map(is_sizes, chain([shape], *blocks)))
    except (AttributeError, LookupError, TypeError):
        is_tensor = False
    if not is_tensor:
        raise foreign.damaged(
            path, f"the metadata do not describe {shown(key)} as a tensor", _AGAIN
        )
    if (kind := dtype.name.removeprefix("torch.")) not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: {shown(key)} has the dtype torch.{kind}; weighin does not read this dtype",
            "load the checkpoint with torch, and save tensors of another dtype",
        )
    shape, blocks = tuple(shape), [(tuple(start), tuple(size)) for start, size in blocks]
    _check_tiles(path, key, shape, blocks)
    parts = []
    for start, size in blocks:
        place = places.get((key, start), {})
        name, offset, length = map(place.get, ("relative_path", "offset", "length"))
        if not (isinstance(name, str) and is_sizes((offset, length))):
            raise foreign.damaged(path, f"no valid place of {shown(key)} at {start}", _AGAIN)
        if (name, offset) not in archives:
            file = foreign.file_of(path, name, key, _AGAIN)
            if offset + length > (file_bytes := file.stat().st_size):
                raise foreign.truncated(file, shown(key), offset + length, file_bytes)
            archives[name, offset] = torch_files.read_one(file, key, offset, length)
        where = replace(archives[name, offset], name=key, start=start)
        if (where.shape, where.dtype_name) != (size, kind):
            what = f"{where.shape} of torch.{where.dtype_name} here, but {size} of torch.{kind} in {INDEX}"
            raise CheckpointError(f"{where.file}: {shown(key)} has the shape {what}", _AGAIN)
        if len(blocks) > 1 and where.span < prod(size):  # torch stores each element
            raise foreign.damaged(where.file, f"elements of {shown(key)} overlap", _AGAIN)
        parts.append(where)
    if len(parts) == 1:
        return replace(parts[0], start=())
    return replace(parts[0], shape=shape, stride=row_major(shape), start=(), parts=tuple(parts))


def _merge(index: Path) -> str:
    command = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
    return f"merge it: {command} {quote(str(index.parent))} FILE.pt (this executes the pickle)"


def _check_tiles(path: Path, key: str, shape: Shape, blocks: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise CheckpointError unless at most 2,000 blocks contain each element, and exactly once."""
    for start, size in blocks:
        fits = len(start) == len(size) == len(shape)
        if not fits or any(at + n > end for at, n, end in zip(start, size, shape, strict=True)):
            what = f"the part of {shown(key)} at {start} is outside the shape {shape}"
            raise foreign.damaged(path, what, _AGAIN)
    if len(blocks) > _MOST_BLOCKS:
        what = f"{shown(key)} has {len(blocks):,} parts; weighin reads at most {_MOST_BLOCKS:,}"
        raise CheckpointError(f"{path}: {what}", _merge(path))
    solid = [block for block in blocks if prod(block[1])]
    for (start, size), (other, others) in combinations(solid, 2):
        pairs = zip(start, size, other, others, strict=True)
        if all(a < b + n and b < a + m for a, m, b, n in pairs):
            what = f"the parts of {shown(key)} at {start} and {other} overlap"
            raise foreign.damaged(path, what, _AGAIN)
    if not blocks or sum(prod(size) for _, size in solid) != prod(shape):  # without an overlap
        raise foreign.damaged(path, f"the parts of {shown(key)} do not fill {shape}", _AGAIN)
