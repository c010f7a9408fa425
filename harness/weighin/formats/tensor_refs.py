"""Define the records that stand for the values of a pickled checkpoint: tensors, and other objects.

An object of a class that tensors do not need becomes an ``Opaque``. ``pickled_calls`` makes the records.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from weighin.formats.base import TensorSlice, frozen_in_types
from weighin.formats.dtypes import ITEM_BYTES, QUANTISED_BYTES

STORAGES: Final = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
STORED_BYTES: Final = {**ITEM_BYTES, **QUANTISED_BYTES}
OF_STORAGES: Final = frozenset({"torch", "torch.cuda", "torch.storage"})
REBUILD: Final = "torch._utils._rebuild_"
_OF_MODULES: Final = {"_parameters", "_buffers"}  # keys in the state of every pickled nn.Module
_TITLES: Final = {
    "_codecs.encode": "bytes",
    "numpy.core.multiarray.scalar": "NumPy scalar",
    "numpy._core.multiarray.scalar": "NumPy scalar",
    "numpy.core.multiarray._reconstruct": "NumPy array",
    "numpy._core.multiarray._reconstruct": "NumPy array",
}
"""Maps a function by which a pickle makes an object to the object's title in messages."""

_SAFE: Final = frozenset({
    "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set",
    "collections.Counter", "collections.OrderedDict", "torch.Size", "torch.Tensor", "torch.device",
    "torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
})  # fmt: skip
"""Classes and functions that torch.load(weights_only=True) accepts, besides those of tensors."""


class NotTensors(Exception):
    """The pickle refers to a class or function that no tensor needs; the exception's argument is
    the name of this class or function.
    """


class Malformed(Exception):
    """The pickle is invalid, or describes an impossible tensor."""


@dataclass(frozen=True, slots=True)
class Named:
    """The full name of a class or function, which weighin never imports."""

    name: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Opaque:
    """An object in a pickle whose class is neither imported nor called.

    Attributes:
        kind: the full name of the object's class, or of the function that makes the object.
        contents: records of the arguments, state and items that the pickle gives the object.
    """

    kind: str
    contents: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.kind  # the text of crafted contents may be endless

    @property
    def is_module(self) -> bool:
        return any(isinstance(one, dict) and one.keys() >= _OF_MODULES for one in self.contents)

    @property
    def is_foreign(self) -> bool:
        """Whether torch.load(weights_only=True) refuses the object."""
        return "." in self.kind and not is_safe(self.kind)  # a full name, not a description


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OtherTensor(Opaque):
    """A tensor of a kind that weighin does not read, such as sparse; ``kind`` is the kind's title.

    Attributes:
        way: how to save the values as a plain tensor, as advice for the user.
    """

    way: str = ""

    @property
    def is_foreign(self) -> bool:
        return False


class Size(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


@frozen_in_types
class StorageRef:
    """A storage: the key in the file, the dtype, and the number of elements."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * STORED_BYTES[self.dtype]


@frozen_in_types
class TensorRef:
    """A strided tensor: a view of a storage, with ``offset`` and ``stride`` in elements."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def located(self, name: str, file: Path, start: int) -> TensorSlice:
        """Return the tensor's place in a file; the tensor's storage begins at the byte ``start``."""
        offset = start + self.offset * ITEM_BYTES[self.dtype]
        return TensorSlice(
            name, self.shape, self.stride, self.dtype, file, offset, start, self.storage.nbytes
        )


class StateDict(dict[Any, Any]):
    """An OrderedDict in a pickle; ``state`` has the attributes that the pickle sets."""

    state: Any = None

    @property
    def metadata(self) -> dict[str, dict[str, object]] | None:
        """The modules' version metadata, in the pickled attribute ``_metadata``; else None."""
        metadata = self.state.get("_metadata") if isinstance(self.state, dict) else None
        if not isinstance(metadata, dict):
            return None
        return {
            name: {key: value for key, value in local.items() if isinstance(value, int | str)}
            for name, local in metadata.items()
            if isinstance(name, str) and isinstance(local, dict)
        }


def is_safe(name: str) -> bool:
    """Tell whether torch.load(weights_only=True) accepts the name of a class or function."""
    name = name.replace("__builtin__.", "builtins.")
    module, _, leaf = name.rpartition(".")
    of_tensors = leaf in STORAGES or leaf in ITEM_BYTES or leaf.endswith("Tensor")
    return name in _SAFE or name.startswith(REBUILD) or (module in OF_STORAGES and of_tensors)


def type_name(value: Any) -> str:
    """Return the name of a pickled value's Python type, for messages."""
    names = {
        TensorRef: "Tensor", StorageRef: "storage", Named: "class or function",
        StateDict: "OrderedDict", Size: "torch.Size",
    }  # fmt: skip
    if isinstance(value, Opaque):
        return _TITLES.get(value.kind, value.kind.removeprefix("__builtin__."))
    return names.get(type(value), type(value).__name__)
