"""Read the tensors and their offsets from the ``.metadata`` of ``torch.distributed.checkpoint``.

The file is a pickle, of which nothing is executed. If the pickle names a class or function that
``.metadata`` never contains, reading fails with an error.
"""

from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats.dtypes import ITEM_BYTES, is_dtype, is_sizes
from weighin.formats.foreign import unreadable
from weighin.stream import pickles
from weighin.stream.pickles import Named, Opaque
from weighin.stream.state_dicts import largest, with_key
from weighin.text import shown

FILE_NAME: Final = ".metadata"
AGAIN: Final = (
    "save it again with torch.distributed.checkpoint.save; if torch.distributed.checkpoint.load cannot"
    " read it either, the folder is damaged"
)
MERGE: Final = (
    "merge it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"
)

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_METADATA: Final = frozenset({
    f"{_MODULE}.Metadata", "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
})  # fmt: skip
_TENSOR: Final = f"{_MODULE}.TensorStorageMetadata"
_BYTES: Final = f"{_MODULE}.BytesStorageMetadata"
"""The class that describes a value other than a tensor: the folder has a pickle of this value."""
_KNOWN: Final = _METADATA | {
    _TENSOR, _BYTES, f"{_MODULE}.MetadataIndex", f"{_MODULE}.ChunkStorageMetadata",
    f"{_MODULE}.TensorProperties", f"{_MODULE}.StorageMeta", f"{_MODULE}._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout",
    "torch.Size", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath", "collections.OrderedDict",
    "builtins.getattr",  # Python 3.11.0 to 3.11.3 pickles enum members with getattr
}  # fmt: skip

_DEEPEST: Final = 5  # parts of a path in nested dicts
_MOST_BLOCKS: Final = 2_000  # of one tensor; every pair of blocks is compared


@dataclass(frozen=True, slots=True)
class DcpBlock:
    """A block of a tensor: the offset and length in bytes of its archive in ``file``."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor, and its one or several blocks, which cover the tensor without gaps or overlaps."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[DcpBlock, ...]


def read(folder: Path, key: str = "") -> tuple[list[DcpTensor], list[str]]:
    """Return all tensors, and the names of all other values, such as extra states.

    With a ``key``, both lists have only items whose names begin with the key and a dot. Both
    lists are in the order of the metadata.

    Raises:
        CheckpointError: the file is damaged or is no dcp metadata. With an empty ``key``, also for
            a training checkpoint: nested dicts that hold more than tensors.
    """
    path = folder / FILE_NAME
    metadata = _load(path)
    tensors, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not (isinstance(tensors, dict) and isinstance(stored, dict) and tensors):
        raise _damaged(path, "it has no tensors or no offsets")
    by_key: dict[str, list[tuple[Any, Any]]] = {}
    for index, place in stored.items():
        fields = _fields(index)
        if not isinstance(name := fields.get("fqn"), str):
            raise _damaged(path, "an offset belongs to no key")
        by_key.setdefault(name, []).append((fields.get("offset"), _fields(place)))
    chosen, values = [], []
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise _damaged(path, f"a key is not a string: {shown(name)}")
        if key and not name.startswith(f"{key}."):
            continue
        if isinstance(tensor, Opaque) and tensor.kind == _BYTES:
            values.append(name)
        else:
            chosen.append(_tensor(path, name, tensor, by_key.get(name, [])))
    if values and not key and (places := _places(metadata.get("planner_data"), chosen)):
        raise CheckpointError(
            f"{path}: not a flat state dict of tensors: {shown(values[0])} is not a tensor",
            with_key(places),
        )
    return chosen, values


def _load(path: Path) -> Any:
    """Return a dict of the attributes of the pickled metadata."""
    try:
        with path.open("rb") as file:
            pickled = pickles.load(path, file, resave=AGAIN)
    except OSError as error:
        raise unreadable(path, error) from error
    for name in pickled.names:
        if name not in _KNOWN and not is_dtype(name.removeprefix("torch.")):
            raise CheckpointError(
                f"{path}: the pickle holds more than tensors, and weighin did NOT execute it: it"
                f" refers to {name}",
                f"if you trust the folder, {MERGE}",
            )
    metadata = pickled.value
    if not isinstance(metadata, Opaque) or metadata.kind not in _METADATA:
        raise CheckpointError(f"{path}: not metadata of torch.distributed.checkpoint", AGAIN)
    return _fields(metadata)


def _fields(value: Any) -> Any:
    """Return a dict of the attributes that the pickle sets on an object; {} if it sets none."""
    state = value.contents[-1] if isinstance(value, Opaque) else None
    return state if isinstance(state, dict) else {}


def _places(paths: Any, tensors: list[DcpTensor]) -> dict[str, int]:
    """Return the dotted keys of the three largest state dicts in nested dicts, with their bytes.

    ``paths`` maps each tensor's name to the tuple of its keys in the dicts. A tuple of one key
    means that the tensor is in no nested dict. State dicts of optimizers are left out.
    """
    sizes: dict[str, int] = {}
    for one in tensors:
        path = paths.get(one.key) if isinstance(paths, dict) else None
        if not isinstance(path, tuple) or not 1 < len(path) <= _DEEPEST:
            continue
        place = ".".join(part if isinstance(part, str) else shown(part) for part in path[:-1])
        if "optim" not in place.lower():
            sizes[place] = sizes.get(place, 0) + prod(one.shape) * ITEM_BYTES[one.dtype]
    return largest(sizes)


def _tensor(path: Path, key: str, tensor: Any, places: list[tuple[Any, Any]]) -> DcpTensor:
    if not isinstance(tensor, Opaque) or tensor.kind != _TENSOR:
        raise CheckpointError(
            f"{path}: not a flat state dict of tensors: {shown(key)} is not a tensor",
            "save the weights alone: torch.distributed.checkpoint.save(model.state_dict(), ...)",
        )
    fields = _fields(tensor)
    chunks, shape, properties = fields.get("chunks"), fields.get("size"), fields.get("properties")
    named = None
    if isinstance(properties, Opaque) and isinstance(properties.contents[-1], tuple):
        named = next(iter(properties.contents[-1]), None)
    if not isinstance(named, Named) or not places:
        raise _damaged(path, f"{shown(key)} has no dtype or no offset")
    if (dtype := named.name.removeprefix("torch.")) not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: {shown(key)} has the dtype torch.{dtype}; weighin does not read this dtype",
            "load the checkpoint with torch, and save tensors of another dtype",
        )
    if not is_sizes(shape):
        raise _damaged(path, f"invalid shape or offset of {shown(key)}")
    shape = tuple(shape)
    if len(places) == 1 and not (isinstance(chunks, list) and len(chunks) > 1):
        begin = (0,) * len(shape)
        return DcpTensor(key, shape, dtype, (_block(path, key, begin, shape, places[0][1]),))
    by_start = {tuple(start): place for start, place in places if is_sizes(start)}
    blocks = []
    for chunk in map(_fields, chunks if isinstance(chunks, list) else ()):
        start, size = chunk.get("offsets"), chunk.get("sizes")
        if not (is_sizes(start) and is_sizes(size)):
            raise _damaged(path, f"invalid shape or offset of {shown(key)}")
        if (start := tuple(start)) not in by_start:
            raise _damaged(path, f"the part of {shown(key)} at {start} is missing")
        blocks.append(_block(path, key, start, tuple(size), by_start[start]))
    _check_tiles(path, key, shape, blocks)
    return DcpTensor(key, shape, dtype, tuple(blocks))


def _block(
    path: Path, key: str, start: tuple[int, ...], shape: tuple[int, ...], place: Any
) -> DcpBlock:
    if place.get("transform_descriptors"):
        raise CheckpointError(
            f"{path}: {shown(key)} was transformed (compressed) when saved", MERGE
        )
    file, offset, length = (place.get(name) for name in ("relative_path", "offset", "length"))
    if not (is_sizes((offset, length)) and isinstance(file, str)):
        raise _damaged(path, f"invalid shape or offset of {shown(key)}")
    return DcpBlock(start, shape, file, offset, length)


def _check_tiles(path: Path, key: str, shape: tuple[int, ...], blocks: list[DcpBlock]) -> None:
    """Raise CheckpointError unless at most 2,000 blocks contain each element, and exactly once."""
    for block in blocks:
        ends = [at + size for at, size in zip(block.start, block.shape, strict=False)]
        if not len(block.start) == len(block.shape) == len(shape) or any(
            end > size for end, size in zip(ends, shape, strict=True)
        ):
            what = f"the part of {shown(key)} at {block.start} is outside the shape {shape}"
            raise _damaged(path, what)
    if len(blocks) > _MOST_BLOCKS:
        raise CheckpointError(f"{path}: {shown(key)} is stored in {len(blocks):,} parts", MERGE)
    solid = [block for block in blocks if prod(block.shape)]
    for first, second in combinations(solid, 2):
        if all(
            a < b + n and b < a + m
            for a, m, b, n in zip(first.start, first.shape, second.start, second.shape, strict=True)
        ):
            what = f"the parts of {shown(key)} at {first.start} and {second.start} overlap"
            raise _damaged(path, what)
    if not blocks or sum(prod(block.shape) for block in solid) != prod(shape):  # without an overlap
        raise _damaged(path, f"the parts of {shown(key)} leave a gap in {shape}")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}", AGAIN)
