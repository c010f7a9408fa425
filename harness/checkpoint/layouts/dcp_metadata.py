"""``.metadata`` of ``torch.distributed.checkpoint``: a pickle, read without running any of it.

The names that the pickle refers to become stand-ins that keep what they are given; a name that
does not belong to such a file ends the reading. Nothing of torch.distributed is imported.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import prod
from operator import le
from pathlib import Path
from typing import Any, ClassVar, Final

from harness.checkpoint.layouts.dtypes import ITEM_BYTES, MOST_DIMENSIONS
from harness.checkpoint.layouts.head import shown
from harness.errors import CheckpointError

FILE_NAME: Final = ".metadata"
MOST_BYTES: Final = 64 * 1024**2
_MOST_BLOCKS: Final = 2_000  # of one tensor: each is compared with each
_MOST_INSTRUCTIONS: Final = 3_000_000
AGAIN: Final = "copy or download the folder again, or convert its source again"
_MERGE: Final = "merge it first: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor: an archive of its own inside a file, whose places are in bytes."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor and its blocks: one that is all of it, or several that tile it."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[Block, ...]


class _StandIn:
    """Keeps the arguments and the state of an object of another class."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Size(tuple[Any, ...]):
    """A torch.Size; copies no more than one can hold."""

    __slots__ = ()

    def __new__(cls, sizes: Any = ()) -> "_Size":
        if len(sizes) > MOST_DIMENSIONS:
            raise ValueError(f"a shape of {len(sizes):,} dimensions")
        return super().__new__(cls, sizes)


class _Ordered(dict[Any, Any]):
    """An OrderedDict, which such metadata only have empty."""

    def __init__(self) -> None:
        super().__init__()


class _Metadata(_StandIn):
    pass


class _Tensor(_StandIn):
    pass


class _Index(_StandIn):
    pass


_METADATA: Final = "torch.distributed.checkpoint.metadata"
# Only classes, and only ones whose attributes a pickle cannot set.
_KNOWN: Final[dict[tuple[str, str], type]] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _StandIn,
    (_METADATA, "ChunkStorageMetadata"): _StandIn,
    (_METADATA, "TensorProperties"): _StandIn,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "StorageMeta"): _StandIn,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _StandIn,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StandIn,
    ("torch.serialization", "_get_layout"): _StandIn,
    ("torch", "Size"): _Size,
    ("pathlib", "PosixPath"): _StandIn,
    ("pathlib", "WindowsPath"): _StandIn,
    ("pathlib._local", "PosixPath"): _StandIn,
    ("pathlib._local", "WindowsPath"): _StandIn,
    ("collections", "OrderedDict"): _Ordered,
    ("builtins", "getattr"): _StandIn,  # Python 3.11.0 to 3.11.3 names a member of an enum so
}


class _Forbidden(Exception):
    """The pickle refers to something that is no part of such metadata."""


# What allocates the length that it is told, hashes nested tuples for ever, or is of no use here.
_REFUSED: Final = frozenset(
    code[0]
    for code in (
        pickle.BYTEARRAY8, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.PERSID,
        pickle.BINPERSID, pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4,
    )
)  # fmt: skip


def _guarded(code: int, handler: Callable[["_Unpickler"], None]) -> Callable[["_Unpickler"], None]:
    """Return a handler that is counted, and whose dicts have keys that are quick to hash, each once."""

    def handle(unpickler: "_Unpickler") -> None:
        unpickler.left -= 1  # each instruction can make an object of 100 bytes out of one byte
        if unpickler.left < 0:
            raise ValueError(f"more than {_MOST_INSTRUCTIONS:,} instructions")
        if code == pickle.SETITEM[0]:
            _check_keys(unpickler.stack[-3], unpickler.stack[-2:-1])
        elif code == pickle.SETITEMS[0]:
            _check_keys(unpickler.metastack[-1][-1], unpickler.stack[::2])
        handler(unpickler)

    return handle


def _check_keys(target: Any, keys: list[Any]) -> None:
    if not isinstance(target, dict):
        raise TypeError("something is set in what is no dict")
    new = set()
    for key in keys:
        if not isinstance(key, str | int | _Index):
            raise TypeError(f"a key of a dict is a {type(key).__name__}")
        if key in target or key in new:
            raise ValueError(f"{shown(key)} occurs twice")
        new.add(key)


# The one in Python: the one in C allocates as much memo as a crafted pickle asks for.
class _Unpickler(pickle._Unpickler):
    left = _MOST_INSTRUCTIONS
    stack: list[Any]  # what was pushed since the last mark
    metastack: list[list[Any]]  # what was pushed before each mark
    dispatch: ClassVar = {
        code: _guarded(code, handler)  # type: ignore[arg-type, misc]
        for code, handler in pickle._Unpickler.dispatch.items()
        if code not in _REFUSED
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in ITEM_BYTES:
            return name
        if (module, name) not in _KNOWN:
            raise _Forbidden(f"{module}.{name}")
        return _KNOWN[module, name]


def read(folder: Path) -> list[Stored]:
    """Return all tensors in the metadata's order.

    Raises:
        CheckpointError: not such metadata, damaged, or it holds more than whole tensors.
    """
    path = folder / FILE_NAME
    metadata = _load(path)
    tensors, places = metadata.field("state_dict_metadata"), metadata.field("storage_data")
    if not (isinstance(tensors, dict) and isinstance(places, dict) and tensors):
        raise CheckpointError(f"{path}: damaged: names no tensors or no places", AGAIN)
    by_key: dict[str, list[tuple[Any, Any]]] = {}
    for index, place in places.items():
        key = index.field("fqn") if isinstance(index, _Index) else None
        if not isinstance(key, str):
            raise CheckpointError(f"{path}: damaged: a place belongs to no key", AGAIN)
        by_key.setdefault(key, []).append((index.field("offset"), place))
    return [_stored(path, key, one, by_key.get(key, [])) for key, one in tensors.items()]


def _load(path: Path) -> _Metadata:
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(io.BytesIO(file.read(MOST_BYTES))).load()
    except _Forbidden as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, and was NOT executed: it refers to {error}",
            "save a flat state dict of tensors with torch.distributed.checkpoint.save",
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", AGAIN) from error
    except Exception as error:  # a damaged pickle fails in any way
        what = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"{path}: damaged metadata: {type(error).__name__}: {what}", AGAIN
        ) from error
    if not isinstance(metadata, _Metadata):
        raise CheckpointError(f"{path}: no metadata of torch.distributed.checkpoint", AGAIN)
    return metadata


def _stored(path: Path, key: Any, tensor: Any, places: list[tuple[Any, Any]]) -> Stored:
    if not isinstance(key, str):
        raise CheckpointError(f"{path}: damaged: a key that is no text: {shown(key)}", AGAIN)
    if not isinstance(tensor, _Tensor):
        raise CheckpointError(
            f"{path}: not a flat state dict of tensors: {shown(key)} is something else",
            "save the weights alone: torch.distributed.checkpoint.save(model.state_dict(), ...)",
        )
    chunks, properties = tensor.field("chunks"), tensor.field("properties")
    state = properties.state if isinstance(properties, _StandIn) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    shape = tensor.field("size")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES or not places:
        raise CheckpointError(f"{path}: damaged: {shown(key)} has no dtype or no place", AGAIN)
    if not _are_sizes(shape):
        raise CheckpointError(f"{path}: damaged: the shape or place of {shown(key)}", AGAIN)
    shape = tuple(shape)
    if not (isinstance(chunks, list) and len(chunks) > 1) and len(places) == 1:
        begin = (0,) * len(shape)
        return Stored(key, shape, dtype, (_block(path, key, begin, shape, places[0][1]),))
    blocks = _blocks(path, key, chunks, places)
    _check_tiles(path, key, shape, blocks)
    return Stored(key, shape, dtype, tuple(blocks))


def _block(
    path: Path, key: str, start: tuple[int, ...], shape: tuple[int, ...], place: Any
) -> Block:
    if not isinstance(place, _StandIn):
        raise CheckpointError(f"{path}: damaged: {shown(key)} has no dtype or no place", AGAIN)
    file, offset, length = (place.field(name) for name in ("relative_path", "offset", "length"))
    if place.field("transform_descriptors"):
        raise CheckpointError(
            f"{path}: {shown(key)} was transformed (compressed) when saved", _MERGE
        )
    if not (_are_sizes((offset, length)) and isinstance(file, str)):
        raise CheckpointError(f"{path}: damaged: the shape or place of {shown(key)}", AGAIN)
    return Block(start, shape, file, offset, length)


def _blocks(path: Path, key: str, chunks: Any, places: list[tuple[Any, Any]]) -> list[Block]:
    """Return the blocks of a tensor that is stored in several, each with the place of its start."""
    by_start = {tuple(start): place for start, place in places if _are_sizes(start)}
    found = []
    for chunk in chunks if isinstance(chunks, list) else []:
        start, shape = (
            (chunk.field("offsets"), chunk.field("sizes"))
            if isinstance(chunk, _StandIn)
            else (None, None)
        )
        if start is None or shape is None or not (_are_sizes(start) and _are_sizes(shape)):
            raise CheckpointError(f"{path}: damaged: the shape or place of {shown(key)}", AGAIN)
        if tuple(start) not in by_start:
            raise CheckpointError(
                f"{path}: the part of {shown(key)} at {tuple(start)} is missing", AGAIN
            )
        found.append(_block(path, key, tuple(start), tuple(shape), by_start[tuple(start)]))
    if len(found) != len(places):
        raise CheckpointError(
            f"{path}: {shown(key)} has {len(places)} places for {len(found)} parts", AGAIN
        )
    return found


def _check_tiles(path: Path, key: str, shape: tuple[int, ...], blocks: list[Block]) -> None:
    """Raise CheckpointError unless the blocks cover the tensor, and no element twice."""
    for one in blocks:
        ends = [at + size for at, size in zip(one.start, one.shape, strict=False)]
        inside = len(one.start) == len(one.shape) == len(shape) and all(map(le, ends, shape))
        if not inside:
            raise CheckpointError(
                f"{path}: the part of {shown(key)} at {one.start} lies outside of {shape}", AGAIN
            )
    if len(blocks) > _MOST_BLOCKS:
        raise CheckpointError(f"{path}: {shown(key)} is stored in {len(blocks):,} parts", _MERGE)
    solid = [one for one in blocks if prod(one.shape)]
    for one, other in combinations(solid, 2):
        if all(
            a < b + n and b < a + m
            for a, m, b, n in zip(one.start, one.shape, other.start, other.shape, strict=True)
        ):
            raise CheckpointError(
                f"{path}: the parts of {shown(key)} at {one.start} and {other.start} overlap", AGAIN
            )
    if sum(prod(one.shape) for one in solid) != prod(shape):  # inside, and none twice: a gap
        raise CheckpointError(f"{path}: the parts of {shown(key)} leave a gap in {shape}", AGAIN)


def _are_sizes(values: object) -> bool:
    return isinstance(values, tuple) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )
