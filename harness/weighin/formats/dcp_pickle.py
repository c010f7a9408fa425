"""Unpickle ``.metadata`` of ``torch.distributed.checkpoint`` without executing any code.

Each class that the pickle refers to is replaced by a stand-in class that keeps the arguments and
the state of its objects. A name that dcp metadata never contains is an error. torch.distributed is
not imported.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

from weighin.errors import CheckpointError
from weighin.formats import sniff
from weighin.formats.dtypes import MOST_DIMENSIONS, is_dtype
from weighin.formats.sniff import shown, unreadable

MOST_BYTES: Final = 64 * 1024**2
_MOST_INSTRUCTIONS: Final = 3_000_000
AGAIN: Final = (
    "save it again with torch.distributed.checkpoint.save; if torch.distributed.checkpoint.load cannot"
    " read it either, the folder is damaged"
)


MERGE: Final = (
    "merge it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"
)


class StandIn:
    """Keeps the constructor's arguments and the state of an object whose class it replaces."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Size(tuple[Any, ...]):
    """Stands in for torch.Size, but refuses more dimensions than a tensor can have."""

    __slots__ = ()

    def __new__(cls, sizes: Any = ()) -> "_Size":
        if len(sizes) > MOST_DIMENSIONS:
            raise ValueError(f"a shape of {len(sizes):,} dimensions")
        return super().__new__(cls, sizes)


class _Ordered(dict[Any, Any]):
    """Stands in for an OrderedDict, which is always empty in dcp metadata."""

    def __init__(self) -> None:
        super().__init__()


class Metadata(StandIn):
    pass


class TensorMetadata(StandIn):
    pass


class BytesMetadata(StandIn):
    """Stands in for the description of a value that is no tensor, which is stored as a pickle."""


class MetadataIndex(StandIn):
    pass


_METADATA: Final = "torch.distributed.checkpoint.metadata"
# Only classes whose attributes a pickle cannot set.
_KNOWN: Final[dict[tuple[str, str], type]] = {
    (_METADATA, "Metadata"): Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): TensorMetadata,
    (_METADATA, "BytesStorageMetadata"): BytesMetadata,
    (_METADATA, "ChunkStorageMetadata"): StandIn,
    (_METADATA, "TensorProperties"): StandIn,
    (_METADATA, "MetadataIndex"): MetadataIndex,
    (_METADATA, "StorageMeta"): StandIn,
    (_METADATA, "_MEM_FORMAT_ENCODING"): StandIn,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StandIn,
    ("torch.serialization", "_get_layout"): StandIn,
    ("torch", "Size"): _Size,
    ("pathlib", "PosixPath"): StandIn,
    ("pathlib", "WindowsPath"): StandIn,
    ("pathlib._local", "PosixPath"): StandIn,
    ("pathlib._local", "WindowsPath"): StandIn,
    ("collections", "OrderedDict"): _Ordered,
    ("builtins", "getattr"): StandIn,  # Python 3.11.0 to 3.11.3 pickles enum members with getattr
}


class _Forbidden(Exception):
    """The pickle refers to a name that dcp metadata never contains."""


# Instructions that allocate a given length, hash nested tuples endlessly, or are not needed here.
_REFUSED: Final = frozenset(
    code[0]
    for code in (
        pickle.BYTEARRAY8, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.PERSID,
        pickle.BINPERSID, pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4,
    )
)  # fmt: skip


def _guarded(code: int, handler: Callable[["_Unpickler"], None]) -> Callable[["_Unpickler"], None]:
    """Return a handler that limits the number of instructions and checks the keys of dicts."""

    def handle(unpickler: "_Unpickler") -> None:
        unpickler.left -= 1  # one instruction (a byte) can make an object of 100 bytes
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
        raise TypeError("an item is set on an object that is not a dict")
    new = set()
    for key in keys:
        if not isinstance(key, str | int | MetadataIndex):
            raise TypeError(f"a dict has a key of type {type(key).__name__}")
        if key in target or key in new:
            raise ValueError(f"{shown(key)} occurs twice")
        new.add(key)


# Python's implementation: the C implementation allocates any memo size that a pickle requests.
class _Unpickler(pickle._Unpickler):
    left = _MOST_INSTRUCTIONS
    stack: list[Any]  # values pushed since the last mark
    metastack: list[list[Any]]  # values pushed before each mark
    dispatch: ClassVar = {
        code: _guarded(code, handler)  # type: ignore[arg-type, misc]
        for code, handler in pickle._Unpickler.dispatch.items()
        if code not in _REFUSED
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and is_dtype(name):
            return name
        if (module, name) not in _KNOWN:
            raise _Forbidden(f"{module}.{name}")
        return _KNOWN[module, name]


def load(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        metadata = _Unpickler(io.BytesIO(text)).load()
    except _Forbidden as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, and was NOT executed: it refers to {error}",
            f"if you trust the folder, {MERGE}",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # a damaged pickle can raise any exception
        if len(text) > MOST_BYTES:
            raise CheckpointError(
                f"{path}: more than the {MOST_BYTES:,} bytes that weighin reads", sniff.SHARDS
            ) from error
        if text.startswith(pickle.PROTO) and not text.endswith(pickle.STOP):
            raise CheckpointError(
                f"{path}: truncated: the pickle has no end", sniff.AGAIN
            ) from error
        message = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"{path}: metadata that weighin does not know: {type(error).__name__}: {message}", AGAIN
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path}: not metadata of torch.distributed.checkpoint", AGAIN)
    return metadata
