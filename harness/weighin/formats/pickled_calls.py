"""Describe what each call in a pickled checkpoint would return, without making the call.

This module compares the names of functions and classes in a pickle with the names that
``torch.save`` writes for tensors.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, Final

from weighin.formats.dtypes import ITEM_BYTES, LARGEST, QUANTISED_BYTES, is_sizes
from weighin.formats.tensor_refs import (
    OF_STORAGES,
    REBUILD,
    STORAGES,
    STORED_BYTES,
    Malformed,
    Named,
    NotTensors,
    Opaque,
    OtherTensor,
    Size,
    StateDict,
    StorageRef,
    TensorRef,
    is_safe,
    type_name,
)
from weighin.formats.unknown_file import shown

_PLAIN: Final = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})
_LAZY: Final = frozenset(
    f"torch.nn.parameter.Uninitialized{kind}" for kind in ("Parameter", "Buffer")
)
_GETATTR: Final = frozenset({"__builtin__.getattr", "builtins.getattr"})
_DICTS: Final = frozenset({"collections.OrderedDict", "collections.defaultdict"})

_SAVE: Final = "torch.save({NAME: TENSOR, ...}, ...)"
_DEQUANTISE: Final = (
    f"load it with torch, dequantise each such tensor (tensor.dequantize()), and save them: {_SAVE}"
)
_AS_BYTES: Final = f"load it with torch, give it a dtype that weighin reads (tensor.view(torch.uint8)), and save it: {_SAVE}"
_RESOLVE: Final = (
    f"load it with torch, and save its values: tensor.resolve_conj().resolve_neg(), then {_SAVE}"
)
_OF_RANKS: Final = frozenset({"DTensor", "ShardedTensor"})
_RANKS_PART: Final = "of which the file of each rank has a part"
_WHOLE_TENSORS: Final = (
    "save whole tensors: torch.distributed.checkpoint.state_dict.get_model_state_dict(model,"
    " options=StateDictOptions(full_state_dict=True)); or save with torch.distributed.checkpoint,"
    " whose folders weighin reads"
)
_OTHER_TENSORS: Final = {
    "sparse_tensor": (
        "sparse tensor",
        f"load it with torch, make it dense (tensor.to_dense()), and save it: {_SAVE}",
    ),
    "nested_tensor": (
        "nested tensor",
        f"load it with torch, and save the tensors in it: tensor.unbind(), then {_SAVE}",
    ),
    "meta_tensor_no_storage": (
        "tensor on the meta device, without values",
        "load the model's weights before it is saved",
    ),
    "wrapper_subclass": (
        "tensor of a subclass that is not named",
        f"load it with the package that wrote it, and save plain tensors: {_SAVE}",
    ),
    **dict.fromkeys(
        ("device_tensor_from_numpy", "device_tensor_from_cpu_tensor", "xla_tensor"),
        (
            "tensor of a device without storages of torch",
            "save the model from the CPU: torch.save(model.cpu().state_dict(), ...)",
        ),
    ),
}
"""Maps each kind of tensor without a plain storage to its title and the repair, for an error.

The key KEY stands for the tensors that the function ``torch._utils._rebuild_KEY`` makes.
"""

_MOST_USUAL: Final = 2**40  # elements; their bytes fit into 64 bits in every dtype


class _Other(Exception):
    """The pickle makes a tensor of a kind that weighin does not read; the exception's arguments are
    the kind's title and the repair, for the error that the user sees.
    """


def persistent(identity: Any) -> StorageRef | Named:
    """Return the record for a persistent id of torch: a storage, or the class of a pickled module.

    Raises:
        Malformed: the id is invalid, or describes neither a storage nor a class.
        NotTensors: the class of the storage is unknown.
    """
    if isinstance(identity, tuple) and len(identity) > 1 and identity[0] == "module":
        if isinstance(identity[1], Named):
            return identity[1]
        raise Malformed("a persistent id describes a class without a name")
    return _storage(identity)


def _storage(identity: Any) -> StorageRef:
    if not isinstance(identity, tuple) or not identity or identity[0] != "storage":
        raise Malformed("a persistent id does not describe a storage")
    if len(identity) < 5:
        raise Malformed("a storage has too few fields")
    kind, key, _location, numel = identity[1:5]
    if len(identity) > 5 and identity[5] is not None:
        raise Malformed("a storage is a view of another, as torch wrote before 0.4")
    if not isinstance(kind, Named) or not isinstance(key, str):
        raise Malformed("a storage has no type or no key")
    dtype = _stored_dtype(kind.name)
    if not dtype:
        raise NotTensors(kind.name)
    if not is_sizes((numel,)) or numel * STORED_BYTES[dtype] > LARGEST:
        raise Malformed(f"storage {shown(key)} has an impossible size")
    return StorageRef(key, dtype, numel)


@lru_cache
def _stored_dtype(kind: str) -> str:
    """Return the dtype of a class of storages, "float32" for "torch.FloatStorage"; "" for any other class."""
    module, _, name = kind.rpartition(".")
    return STORAGES.get(name, "") if module in OF_STORAGES else ""


def call(function: Any, arguments: Any) -> Any:
    """Return the record for the result of a call in the pickle, without calling anything.

    Raises:
        Malformed: the pickle calls an object that is no function, or a function that makes tensors has
            impossible arguments.
    """
    if not isinstance(arguments, tuple):
        raise Malformed("the pickle calls an object that is not a function")
    if isinstance(function, Opaque):  # the pickle calls the result of another call
        return Opaque(function.kind, [function, arguments])
    if not isinstance(function, Named):
        raise Malformed("the pickle calls an object that is not a function")
    name = function.name
    try:
        return _called(name, arguments)
    except (TypeError, ValueError) as error:
        raise Malformed(f"{name} has other arguments than torch.save writes") from error
    except _Other as error:
        title, way = error.args
        return OtherTensor(title, [arguments], way)
    except NotTensors as error:
        return Opaque(str(error), [arguments])


def _called(name: str, arguments: tuple[Any, ...]) -> Any:
    if name.startswith(REBUILD):
        return _rebuilt(name, arguments)
    if name in _DICTS:
        return _mapping(*(one for one in arguments if not isinstance(one, Named)))
    if name == "torch.Size":
        (sizes,) = arguments
        if not is_sizes(sizes):
            raise Malformed("a torch.Size is impossible")
        return Size(sizes)
    if name in _GETATTR and isinstance(owner := arguments[0], Named):
        # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as getattr(CLASS, NAME).
        raise NotTensors(name if is_safe(owner.name) else owner.name)
    if name in _LAZY:
        raise _Other("lazy parameter without values", "run the model once, and save it again")
    if name == "torch._tensor._rebuild_from_type_v2":
        inner, kind, inner_arguments, _state = arguments
        if isinstance(kind, Named) and kind.name in _PLAIN and isinstance(inner, Named):
            if inner.name.startswith(REBUILD) and isinstance(inner_arguments, tuple):
                return _rebuilt(inner.name, inner_arguments)
            raise NotTensors(inner.name)
        if not isinstance(kind, Named):
            raise NotTensors(name)
        raise _Other(*_subclass(kind.name))
    raise NotTensors(name)


def create(kind: Any, arguments: Any) -> Opaque:
    """Return the record for an instance of ``kind``; raise Malformed if ``kind`` is not a class."""
    if not isinstance(kind, Named | Opaque):
        raise Malformed("an object is created from something that is not a class")
    return Opaque(kind.name if isinstance(kind, Named) else kind.kind, [arguments])


def _mapping(pairs: Any = ()) -> dict[Any, Any]:
    """Return the record of an OrderedDict or defaultdict; Python 2 put its items into ``pairs``."""
    mapping = StateDict()
    for key, value in pairs:
        put(mapping, key, value)
    return mapping


def put(mapping: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an item of a pickled dict. A key other than str, int, bytes or float becomes ``Opaque``.

    Raises:
        Malformed: the dict has the key already.
    """
    if not isinstance(key, str | int | bytes | float | Opaque):
        key = Opaque(type_name(key), [key])  # hashing a crafted nested tuple may never end
    if key in mapping:
        raise Malformed(f"key {shown(key)} occurs twice")
    mapping[key] = value


def _rebuilt(name: str, arguments: tuple[Any, ...]) -> Any:
    kind = name.removeprefix(REBUILD)
    if kind in {"parameter", "parameter_with_state"}:
        tensor = arguments[0] if arguments else None
        if not isinstance(tensor, TensorRef | OtherTensor):
            raise Malformed("a parameter is created from something that is not a tensor")
        return tensor
    if kind == "tensor":
        return _tensor(*arguments, dtype=None)
    if kind == "tensor_v2":
        base, _grad, _hooks, *metadata = arguments[:4], *arguments[4:]
        return _tensor(*base, *metadata, dtype=None)
    if kind == "tensor_v3":
        dtype = arguments[6] if len(arguments) > 6 else None
        if not isinstance(dtype, Named):
            raise Malformed(f"the dtype of a tensor is a {type_name(dtype)}")
        if dtype.name.removeprefix("torch.") not in ITEM_BYTES:
            raise _Other(f"tensor of {dtype.name}", _AS_BYTES)
        return _tensor(*arguments[:4], *arguments[7:], dtype=dtype.name.removeprefix("torch."))
    if kind == "qtensor":
        source = arguments[0] if arguments else None
        dtype = source.dtype if isinstance(source, StorageRef) else "quint8"
        raise _Other(f"quantised tensor (torch.{dtype})", _DEQUANTISE)
    if kind in _OTHER_TENSORS:
        raise _Other(*_OTHER_TENSORS[kind])
    raise NotTensors(name)


def _subclass(name: str) -> tuple[str, str]:
    """Return, for messages, a title and advice for a tensor of the subclass ``name``."""
    if name.startswith("torch.") and (leaf := name.rpartition(".")[2]) in _OF_RANKS:
        return f"{leaf}, {_RANKS_PART}", _WHOLE_TENSORS
    return (
        f"tensor of the subclass {name}",
        "load it with the code of that class, make each one a plain tensor (a quantised one with"
        f" tensor.dequantize()), and save them: {_SAVE}",
    )


def _tensor(
    source: Any, offset: Any, shape: Any, stride: Any, metadata: Any = None, *, dtype: str | None
) -> TensorRef:
    if not isinstance(source, StorageRef):
        raise Malformed("a tensor is created from something that is not a storage")
    if metadata and (not isinstance(metadata, Mapping) or any(metadata.values())):
        raise _Other("tensor that is conjugated or negated lazily", _RESOLVE)
    if not is_sizes(shape) or not is_sizes(stride) or not is_sizes((offset,)):
        raise Malformed(
            f"a tensor in storage {shown(source.key)} has an impossible shape, stride or offset"
        )
    kind = dtype or source.dtype
    if kind in QUANTISED_BYTES:
        raise _Other(f"quantised tensor (torch.{kind})", _DEQUANTISE)
    if len(shape) != len(stride):
        raise Malformed(
            f"a tensor in storage {shown(source.key)} has {len(shape)} sizes and {len(stride)} strides"
        )
    if prod([max(size, 1) for size in shape]) * ITEM_BYTES[kind] > LARGEST:
        raise Malformed(f"a tensor in storage {shown(source.key)} has an impossible shape")
    if 0 in shape:
        offset = ends = 0  # the tensor has no elements
    else:
        ends = offset + 1
        ends += sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])
    if ends * ITEM_BYTES[kind] > source.nbytes:
        raise Malformed(
            f"a tensor ends at byte {ends * ITEM_BYTES[kind]:,} of storage {shown(source.key)}, "
            f"which has {source.nbytes:,}"
        )
    return TensorRef(source, kind, offset, tuple(shape), tuple(stride))


def usual_tensor(
    source: StorageRef, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> TensorRef | None:
    """Return the tensor that ``_rebuild_tensor_v2`` makes; None if ``call`` must check the arguments.

    All numbers in the arguments must be non-negative integers of at most 32 bits.
    """
    ends = _elements_spanned(shape, stride)
    size = STORED_BYTES[source.dtype]
    if not ends or source.dtype in QUANTISED_BYTES or (offset + ends) * size > source.nbytes:
        return None
    return TensorRef(source, source.dtype, offset, shape, stride)


@lru_cache
def _elements_spanned(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements from a tensor's first to its last element, gaps included.

    The result is 0 for a tensor that ``_tensor`` must check: empty, invalid or over 2**40 elements.
    """
    if len(shape) != len(stride) or not 0 < prod(shape) <= _MOST_USUAL:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
