"""Read the pickle ``.metadata`` of ``torch.distributed.checkpoint`` as records, without executing any code.

A name of a class or function that dcp metadata never contains is an error. torch.distributed is not
imported.
"""

from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats import state_pickle
from weighin.formats.dtypes import is_dtype
from weighin.formats.tensor_refs import Opaque
from weighin.formats.unknown_file import unreadable

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
TENSOR: Final = f"{_MODULE}.TensorStorageMetadata"
BYTES: Final = f"{_MODULE}.BytesStorageMetadata"
"""The class of the description of a value that is no tensor, which is stored as a pickle."""
INDEX: Final = f"{_MODULE}.MetadataIndex"
_KNOWN: Final = _METADATA | {
    TENSOR, BYTES, INDEX, f"{_MODULE}.ChunkStorageMetadata", f"{_MODULE}.TensorProperties",
    f"{_MODULE}.StorageMeta", f"{_MODULE}._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout",
    "torch.Size", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath", "collections.OrderedDict",
    "builtins.getattr",  # Python 3.11.0 to 3.11.3 pickles enum members with getattr
}  # fmt: skip


def load(path: Path) -> Opaque:
    """Return the record of the metadata.

    Raises:
        CheckpointError: the file is unreadable or damaged, or refers to an unknown name.
    """
    try:
        with path.open("rb") as file:
            pickled = state_pickle.load(path, file, resave=AGAIN)
    except OSError as error:
        raise unreadable(path, error) from error
    for name in pickled.names:
        if name not in _KNOWN and not is_dtype(name.removeprefix("torch.")):
            raise CheckpointError(
                f"{path}: holds more than tensors, and was NOT executed: it refers to {name}",
                f"if you trust the folder, {MERGE}",
            )
    metadata = pickled.value
    if not isinstance(metadata, Opaque) or metadata.kind not in _METADATA:
        raise CheckpointError(f"{path}: not metadata of torch.distributed.checkpoint", AGAIN)
    return metadata


def is_a(kind: str, value: Any) -> bool:
    """Tell whether a value is the record of an instance of the class ``kind``."""
    return isinstance(value, Opaque) and value.kind == kind


def state(value: Any) -> Any:
    """Return the state that the pickle sets on an object; None for any other value."""
    return value.contents[-1] if isinstance(value, Opaque) and len(value.contents) > 1 else None


def field(value: Any, name: str) -> Any:
    """Return an attribute of an object; None if it has none of that name."""
    attributes = state(value)
    return attributes.get(name) if isinstance(attributes, dict) else None
