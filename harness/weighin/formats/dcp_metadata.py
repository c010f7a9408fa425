"""Read the tensors and their offsets from the ``.metadata`` of ``torch.distributed.checkpoint``.

The file is a pickle, which this module interprets without executing any code. If the pickle names a
class or function that ``.metadata`` never contains, reading fails with an error.
"""

from dataclasses import dataclass
from itertools import combinations
from math import prod
from operator import le
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats import state_pickle
from weighin.formats.dtypes import ITEM_BYTES, is_dtype, is_sizes
from weighin.formats.state_dicts import largest, with_key
from weighin.formats.tensor_refs import Named, Opaque
from weighin.formats.unknown_file import shown, unreadable

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
_INDEX: Final = f"{_MODULE}.MetadataIndex"
_KNOWN: Final = _METADATA | {
    _TENSOR, _BYTES, _INDEX, f"{_MODULE}.ChunkStorageMetadata", f"{_MODULE}.TensorProperties",
    f"{_MODULE}.StorageMeta", f"{_MODULE}._MEM_FORMAT_ENCODING",
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
    tensors, places = _field(metadata, "state_dict_metadata"), _field(metadata, "storage_data")
    if not (isinstance(tensors, dict) and isinstance(places, dict) and tensors):
        raise _damaged(path, "it has no tensors or no offsets")
    by_key: dict[str, list[tuple[Any, Any]]] = {}
    for index, place in places.items():
        name = _field(index, "fqn") if _is_a(_INDEX, index) else None
        if not isinstance(name, str):
            raise _damaged(path, "an offset belongs to no key")
        by_key.setdefault(name, []).append((_field(index, "offset"), place))
    chosen, values = [], []
    for name, tensor in tensors.items():
        if key and not (isinstance(name, str) and name.startswith(f"{key}.")):
            continue
        if _is_a(_BYTES, tensor) and isinstance(name, str):
            values.append(name)
        else:
            chosen.append(_stored(path, name, tensor, by_key.get(name, [])))
    if values and not key and (places := _places(_field(metadata, "planner_data"), chosen)):
        raise CheckpointError(
            f"{path}: not a flat state dict of tensors: {shown(values[0])} is not a tensor",
            with_key(places),
        )
    return chosen, values


def _places(paths: Any, tensors: list[DcpTensor]) -> dict[str, int]:
    """Return the dotted keys of the three largest state dicts in nested dicts, with their bytes.

    ``paths`` maps each tensor's name to the tuple of its keys in the dicts. A tuple of one key
    means that the tensor is in no nested dict. State dicts of optimizers are left out.
    """
    sizes: dict[str, int] = {}
    for one in tensors:
        path = paths.get(one.key) if isinstance(paths, dict) else None
        if not isinstance(path, tuple) or len(path) < 2 or len(path) > _DEEPEST:
            continue
        place = ".".join(str(part) for part in path[:-1])
        if "optim" not in place.lower():
            sizes[place] = sizes.get(place, 0) + prod(one.shape) * ITEM_BYTES[one.dtype]
    return largest(sizes)


def _stored(path: Path, key: Any, tensor: Any, places: list[tuple[Any, Any]]) -> DcpTensor:
    if not isinstance(key, str):
        raise _damaged(path, f"a key is not a string: {shown(key)}")
    if not _is_a(_TENSOR, tensor):
        raise CheckpointError(
            f"{path}: not a flat state dict of tensors: {shown(key)} is not a tensor",
            "save the weights alone: torch.distributed.checkpoint.save(model.state_dict(), ...)",
        )
    chunks, shape = _field(tensor, "chunks"), _field(tensor, "size")
    properties = _state(_field(tensor, "properties"))
    named = properties[0] if isinstance(properties, tuple) and properties else None
    dtype = named.name.removeprefix("torch.") if isinstance(named, Named) else None
    if isinstance(dtype, str) and dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: {shown(key)} has the dtype torch.{dtype}; weighin does not read this dtype",
            "load the checkpoint with torch, and save tensors of another dtype",
        )
    if not isinstance(dtype, str) or not places:
        raise _damaged(path, f"{shown(key)} has no dtype or no offset")
    if not is_sizes(shape):
        raise _damaged(path, f"invalid shape or offset of {shown(key)}")
    shape = tuple(shape)
    if not (isinstance(chunks, list) and len(chunks) > 1) and len(places) == 1:
        begin = (0,) * len(shape)
        return DcpTensor(key, shape, dtype, (_block(path, key, begin, shape, places[0][1]),))
    blocks = _blocks(path, key, chunks, places)
    _check_tiles(path, key, shape, blocks)
    return DcpTensor(key, shape, dtype, tuple(blocks))


def _block(
    path: Path, key: str, start: tuple[int, ...], shape: tuple[int, ...], place: Any
) -> DcpBlock:
    file, offset, length = (_field(place, name) for name in ("relative_path", "offset", "length"))
    if _field(place, "transform_descriptors"):
        raise CheckpointError(
            f"{path}: {shown(key)} was transformed (compressed) when saved", MERGE
        )
    if not (is_sizes((offset, length)) and isinstance(file, str)):
        raise _damaged(path, f"invalid shape or offset of {shown(key)}")
    return DcpBlock(start, shape, file, offset, length)


def _blocks(path: Path, key: str, chunks: Any, places: list[tuple[Any, Any]]) -> list[DcpBlock]:
    by_start = {tuple(start): place for start, place in places if is_sizes(start)}
    blocks = []
    for chunk in chunks if isinstance(chunks, list) else []:
        start, shape = _field(chunk, "offsets"), _field(chunk, "sizes")
        if not (is_sizes(start) and is_sizes(shape)):
            raise _damaged(path, f"invalid shape or offset of {shown(key)}")
        if tuple(start) not in by_start:
            raise _damaged(path, f"the part of {shown(key)} at {tuple(start)} is missing")
        blocks.append(_block(path, key, tuple(start), tuple(shape), by_start[tuple(start)]))
    if len(blocks) != len(places):
        raise _damaged(path, f"{shown(key)} has {len(places)} offsets for {len(blocks)} parts")
    return blocks


def _check_tiles(path: Path, key: str, shape: tuple[int, ...], blocks: list[DcpBlock]) -> None:
    """Raise CheckpointError unless at most 2,000 blocks contain each element, and exactly once."""
    for block in blocks:
        ends = [at + size for at, size in zip(block.start, block.shape, strict=False)]
        inside = len(block.start) == len(block.shape) == len(shape) and all(map(le, ends, shape))
        if not inside:
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
    if sum(prod(block.shape) for block in solid) != prod(shape):  # no overlap, so there is a gap
        raise _damaged(path, f"the parts of {shown(key)} leave a gap in {shape}")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}", AGAIN)


def _load(path: Path) -> Opaque:
    try:
        with path.open("rb") as file:
            pickled = state_pickle.load(path, file, resave=AGAIN)
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
    return metadata


def _is_a(kind: str, value: Any) -> bool:
    """Tell whether a pickled value is an instance of the class ``kind``."""
    return isinstance(value, Opaque) and value.kind == kind


def _state(value: Any) -> Any:
    """Return the state that the pickle sets on the object ``value``; None without such a state."""
    return value.contents[-1] if isinstance(value, Opaque) and len(value.contents) > 1 else None


def _field(value: Any, name: str) -> Any:
    """Return an attribute of a pickled object; None if the object lacks the attribute."""
    attributes = _state(value)
    return attributes.get(name) if isinstance(attributes, dict) else None
