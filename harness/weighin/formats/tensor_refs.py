"""Describe the tensors of a pickled state dict as plain records.

This module uses only the standard library.

Names of functions and classes in a pickle are only compared with the names that ``torch.save``
writes for tensors; no function or class of the pickle is imported or called.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, NoReturn

from weighin.errors import CheckpointError
from weighin.formats.dtypes import ITEM_BYTES, LARGEST, is_sizes
from weighin.formats.sniff import RESAVE, shown

_STORAGES: Final = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}  # fmt: skip
_REBUILD: Final = "torch._utils._rebuild_"
_OF_MODULES: Final = (b"_parameters", b"_buffers")  # early in a pickled nn.Module
_PLAIN: Final = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})


class NotTensors(Exception):
    """The pickle refers to a class or function, named by the argument, that tensors do not need."""


class WholeModule(Exception):
    """The pickle contains a whole module, not only weights; the argument is the class's name."""


class Malformed(Exception):
    """The pickle is invalid, or describes an impossible tensor."""


@dataclass(frozen=True, slots=True)
class Named:
    """The full name of a class or function, which is never imported."""

    name: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that is not a tensor; only the name of its type is kept."""

    kind: str


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage: its key in the file, and the dtype and number of its elements."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided tensor: a view of a storage, with ``offset`` and ``stride`` in elements."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class StateDict(dict[Any, Any]):
    """An OrderedDict in a pickle, with the version metadata that torch sets on it."""

    metadata: dict[str, dict[str, object]] | None = None

    def build(self, state: Any) -> None:
        """Set ``metadata`` to the modules' version metadata in the object's pickled state."""
        metadata = state.get("_metadata") if isinstance(state, dict) else None
        if isinstance(metadata, dict):
            self.metadata = {
                name: {key: value for key, value in local.items() if isinstance(value, int | str)}
                for name, local in metadata.items()
                if isinstance(name, str) and isinstance(local, dict)
            }


def storage(identity: Any) -> StorageRef:
    """Return the storage that a persistent id describes.

    Raises:
        Malformed, NotTensors, WholeModule: the id does not describe a storage.
    """
    if isinstance(identity, tuple) and len(identity) > 1 and identity[0] == "module":
        raise WholeModule(identity[1].name if isinstance(identity[1], Named) else "its class")
    if not isinstance(identity, tuple) or not identity or identity[0] != "storage":
        raise Malformed("a persistent id does not describe a storage")
    if len(identity) < 5:
        raise Malformed("a storage has too few fields")
    kind, key, _location, numel = identity[1:5]
    if len(identity) > 5 and identity[5] is not None:
        raise Malformed("a storage is a view of another, as torch wrote before 0.4")
    if not isinstance(kind, Named) or not isinstance(key, str):
        raise Malformed("a storage has no type or no key")
    module, _, name = kind.name.rpartition(".")
    if module not in {"torch", "torch.cuda", "torch.storage"} or name not in _STORAGES:
        raise NotTensors(kind.name)
    dtype = _STORAGES[name]
    if not is_sizes((numel,)) or numel * ITEM_BYTES[dtype] > LARGEST:
        raise Malformed(f"storage {shown(key)} has an impossible size")
    return StorageRef(key, dtype, numel)


def call(function: Any, arguments: Any) -> Any:
    """Return the record for the result of a call in the pickle, without calling anything.

    Raises:
        Malformed, NotTensors: ``torch.save`` does not write this call for plain tensors.
    """
    if not isinstance(function, Named) or not isinstance(arguments, tuple):
        raise Malformed("an object that is not a function is called")
    name = function.name
    try:
        if name == "collections.OrderedDict":
            return _mapping(*arguments)
        if name == "torch.Size":
            (sizes,) = arguments
            if not is_sizes(sizes):
                raise Malformed("a torch.Size is impossible")
            return tuple(sizes)
        if name in {"torch.device", "_codecs.encode"}:
            return Opaque(name.rpartition(".")[2])
        if name.startswith(_REBUILD):
            return _rebuilt(name, arguments)
        if name == "torch._tensor._rebuild_from_type_v2":
            inner, kind, inner_arguments, _state = arguments
            if isinstance(kind, Named) and kind.name in _PLAIN and isinstance(inner, Named):
                if inner.name.startswith(_REBUILD):
                    return call(inner, inner_arguments)
                raise NotTensors(inner.name)
    except (TypeError, ValueError) as error:
        raise Malformed(f"{name} has other arguments than torch.save writes") from error
    raise NotTensors(name)


def create(kind: Any, begins: bytes) -> NoReturn:
    """Raise the error for an instance of a class; ``begins`` is the pickle's next bytes.

    Raises:
        Malformed, NotTensors, WholeModule: always.
    """
    if not isinstance(kind, Named):
        raise Malformed("an object is created from something that is not a class")
    if all(name in begins for name in _OF_MODULES):
        raise WholeModule(kind.name)
    raise NotTensors(kind.name)


def _mapping(pairs: Any = ()) -> dict[Any, Any]:
    """Return the OrderedDict of a list of pairs, as old Python versions pickled an OrderedDict."""
    mapping = StateDict()
    for key, value in pairs:
        put(mapping, key, value)
    return mapping


def put(mapping: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an item of a pickled dict.

    Raises:
        Malformed: the dict has the key already, or the key's type is not one that ``torch.save`` uses.
    """
    if not isinstance(key, str | int | bytes):  # hashing a crafted nested tuple may never end
        raise Malformed(f"a dict has a key of type {type_name(key)}")
    if key in mapping:
        raise Malformed(f"key {shown(key)} occurs twice")
    mapping[key] = value


def _rebuilt(name: str, arguments: tuple[Any, ...]) -> Any:
    kind = name.removeprefix(_REBUILD)
    if kind in {"parameter", "parameter_with_state"}:
        tensor = arguments[0] if arguments else None
        if not isinstance(tensor, TensorRef):
            raise Malformed("a parameter is created from something that is not a tensor")
        return tensor
    if kind == "tensor":
        return _tensor(*arguments, dtype=None)
    if kind == "tensor_v2":
        base, _grad, _hooks, *metadata = arguments[:4], *arguments[4:]
        return _tensor(*base, *metadata, dtype=None)
    if kind == "tensor_v3":
        dtype = arguments[6] if len(arguments) > 6 else None
        if not isinstance(dtype, Named) or dtype.name.removeprefix("torch.") not in ITEM_BYTES:
            raise NotTensors(dtype.name if isinstance(dtype, Named) else type_name(dtype))
        return _tensor(*arguments[:4], *arguments[7:], dtype=dtype.name.removeprefix("torch."))
    raise NotTensors(name)


def _tensor(
    source: Any, offset: Any, shape: Any, stride: Any, metadata: Any = None, *, dtype: str | None
) -> TensorRef:
    if not isinstance(source, StorageRef):
        raise Malformed("a tensor is created from something that is not a storage")
    if metadata and (not isinstance(metadata, Mapping) or any(metadata.values())):
        raise NotTensors("a tensor that is conjugated or negated lazily")
    if not is_sizes(shape) or not is_sizes(stride) or not is_sizes((offset,)):
        raise Malformed(
            f"a tensor in storage {shown(source.key)} has an impossible shape, stride or offset"
        )
    kind = dtype or source.dtype
    if len(shape) != len(stride):
        raise Malformed(
            f"a tensor in storage {shown(source.key)} has {len(shape)} sizes and {len(stride)} strides"
        )
    if prod(max(size, 1) for size in shape) * ITEM_BYTES[kind] > LARGEST:
        raise Malformed(f"a tensor in storage {shown(source.key)} has an impossible shape")
    if 0 in shape:
        offset = ends = 0  # the tensor has no elements
    else:
        ends = offset + 1
        ends += sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if ends * ITEM_BYTES[kind] > source.nbytes:
        raise Malformed(
            f"a tensor ends at byte {ends * ITEM_BYTES[kind]:,} of storage {shown(source.key)}, "
            f"which has {source.nbytes:,}"
        )
    return TensorRef(source, kind, offset, tuple(shape), tuple(stride))


def check_storages(path: Path, tensors: Mapping[str, TensorRef]) -> dict[str, StorageRef]:
    """Return a dict that maps the key of each storage to the storage.

    Raises:
        CheckpointError: two tensors disagree about the size of a storage.
    """
    storages: dict[str, StorageRef] = {}
    for tensor in tensors.values():
        first = storages.setdefault(tensor.storage.key, tensor.storage)
        if first.nbytes != tensor.storage.nbytes:
            raise CheckpointError(
                f"{path}: damaged: storage {shown(first.key)} has {first.nbytes:,} bytes for one "
                f"tensor and {tensor.storage.nbytes:,} for another",
                RESAVE,
            )
    return storages


def type_name(value: Any) -> str:
    """Return the name of the Python type that a pickled value had."""
    names = {TensorRef: "Tensor", StorageRef: "storage", Named: "class or function"}
    if isinstance(value, Opaque):
        return value.kind
    return names.get(type(value), type(value).__name__)
