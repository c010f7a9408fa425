"""Read what ``torch.save`` pickled as plain records: nothing that a pickle names is imported or called.

Python's own unpickler moves the values on its stack, and ``_rewritten`` first replaces every
instruction that would call, build or hash an object: the new instructions hand the operands to
``Pickled.persistent_load``, which makes a record of them. The record of a tensor is a ``Slice`` whose
name is the key of its storage, and whose offset counts from the storage's start.
"""

import io
import pickle
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from weighin.errors import CheckpointError
from weighin.stream.foreign import AGAIN, RESAVE
from weighin.stream.slices import ITEM_BYTES, LARGEST, Slice, is_sizes
from weighin.text import shown

MOST_BYTES: Final = 32 * 1024**2
"""The largest pickle that is read, in bytes: 200 times the size of GPT-2 XL's pickle."""

_USUAL_BYTES: Final = 64 * 1024  # which are read first
_MOST_INSTRUCTIONS: Final = 3_000_000  # each may push a number of some 40 bytes
_MOST_OBJECTS: Final = 700_000  # of some 100 to 200 bytes each; a tensor takes ten
_MOST_NAMES: Final = 10_000  # of classes and functions
_LONGEST_NAME: Final = 500  # characters of a class or function, and as many of its module

_STORED_BYTES: Final = {
    **ITEM_BYTES, "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1,
}  # fmt: skip
_STORAGES: Final = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
"""Maps a class of storages to its dtype."""
_OF_STORAGES: Final = ("torch", "torch.cuda", "torch.storage")

_REBUILD: Final = "torch._utils._rebuild_"
_TYPED: Final = "torch._tensor._rebuild_from_type_v2"
_NOT_READ: Final = (_REBUILD, "torch.nn.parameter.Uninitialized")
"""The names of functions and classes that make sparse, nested, lazy and other tensors begin so."""
_SAFE: Final = frozenset({
    "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set",
    "collections.Counter", "collections.OrderedDict", "torch.Size", "torch.Tensor", "torch.device",
    _TYPED, "torch.nn.parameter.Parameter", "torch.serialization._get_layout",
})  # fmt: skip
"""Classes and functions that torch.load(weights_only=True) accepts, besides those of tensors."""

_SMALLER: Final = (
    "load the file with torch, and save plain weights: torch.save(model.state_dict(), ...)"
)

Malformed: Final = pickle.UnpicklingError


class _TooLarge(Exception):
    """The pickle may be sound, but weighin does not read as much of one."""


@dataclass(frozen=True, slots=True)
class Named:
    """The full name of a class or function, which is never imported."""

    name: str


@dataclass(slots=True, eq=False, repr=False)
class Opaque:
    """An object in a pickle, made of what the pickle gives it: ``contents``.

    ``kind`` is the full name of its class, of the function that makes it, or of a dtype. ``is_tensor``
    tells whether it is a tensor that weighin does not read, such as a sparse one.
    """

    kind: str
    contents: list[Any] = field(default_factory=list)
    is_tensor: bool = False

    def __repr__(self) -> str:
        return self.kind  # the text of crafted contents may be endless

    def extend(self, items: list[Any]) -> None:
        self.contents.extend(items)

    def append(self, item: Any) -> None:
        self.contents.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.contents.extend((key, value))

    @property
    def is_foreign(self) -> bool:
        """Whether torch.load(weights_only=True) refuses the object."""
        return not self.is_tensor and "." in self.kind and not is_safe(self.kind)


class Dict(dict[Any, Any]):
    """A dict or OrderedDict; ``state`` has the attributes that the pickle sets.

    A key becomes an ``Opaque``, unless it is a string, bytes or a usual number: the hash of a nested
    tuple may never end.
    """

    state: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        is_large = isinstance(key, int) and key.bit_length() > 62  # whose hashes may be made equal
        if is_large or not isinstance(key, str | int | bytes | float | Opaque):
            key = Opaque(shown(key) if is_large else type_name(key), [key])
        if key in self:
            raise Malformed(f"key {shown(key)} occurs twice")
        super().__setitem__(key, value)

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


@dataclass(slots=True)
class Storage:
    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * _STORED_BYTES[self.dtype]


def is_safe(name: str) -> bool:
    """Tell whether torch.load(weights_only=True) accepts the name of a class or function."""
    name = name.replace("__builtin__.", "builtins.")
    module, _, leaf = name.rpartition(".")
    of_tensors = leaf in _STORAGES or leaf in ITEM_BYTES or leaf.endswith("Tensor")
    return name in _SAFE or name.startswith(_REBUILD) or (module in _OF_STORAGES and of_tensors)


def type_name(value: Any) -> str:
    """Return the name of a pickled value's Python type, for messages."""
    if isinstance(value, Opaque):
        return f"tensor of {value.kind}" if value.is_tensor else value.kind
    names = {Storage: "storage", Slice: "Tensor", Named: "class or function", Dict: "dict"}
    return names.get(type(value), type(value).__name__)


# Instructions

_PLAIN_BYTES: Final = {  # instructions that only move values, and the bytes of their operands
    b"(012N\x88\x89)aesu\x94": 0, b"Khq\x80": 1, b"M": 2, b"Jj": 4, b"G": 8,
}  # fmt: skip
_SIZES: Final = [
    next((1 + size for codes, size in _PLAIN_BYTES.items() if code in codes), 0)
    for code in range(256)
]
_MADE: Final = {  # instructions that make an object, and the bytes of the length of its operand
    **dict.fromkeys(b"]t\x85\x86\x87\x93", 0), **dict.fromkeys(b"\x8cUC\x8a", 1),
    **dict.fromkeys(b"XTB\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8),
}  # fmt: skip
_REPLACED: Final = {
    ord("}"): b")Q",  # ()                        a dict
    ord("Q"): b"\x85Q",  # (identity,)            a storage
    ord("R"): b"\x86Q",  # (function, arguments)  a call
    ord("\x81"): b"\x86Q",  # (class, arguments)
    ord("\x92"): b"\x86\x86Q",  # (class, (arguments, names))
    ord("b"): b")\x87Q",  # (object, state, ())   a state for an object
    ord("\x8f"): b"]",  # a set becomes a list, because its items would be hashed
    ord("\x90"): b"e",
    ord("\x91"): b"t",
}
"""What stands in the place of an instruction. ``Q`` calls ``Pickled.persistent_load``."""

_PUT, _GLOBAL, _FRAME, _STOP = b"rc\x95."


def _rewritten(data: bytes) -> tuple[bytes, int]:
    """Return the harmless form of the first pickle, and its length; IndexError: it is cut off."""
    harmless = bytearray()
    at = copied = objects = 0
    for count in range(_MOST_INSTRUCTIONS):
        instruction = data[at]
        if size := _SIZES[instruction]:
            at += size
            continue
        if instruction == _PUT:
            # The unpickler's memo is a list, as long as the largest index.
            if int.from_bytes(data[at + 1 : at + 5], "little") > count:
                raise Malformed("an object is stored at an impossible index")
            at += 5
            continue
        objects += 1
        if objects > _MOST_OBJECTS:
            raise _TooLarge(f"more than {_MOST_OBJECTS:,} objects")
        if (width := _MADE.get(instruction)) is not None:
            start = at + 1 + width
            at = start + int.from_bytes(data[at + 1 : start], "little")
        elif instruction in _REPLACED:
            harmless += data[copied:at]
            harmless += _REPLACED[instruction]
            at = copied = at + 1
        elif instruction == _GLOBAL:  # two lines
            for _ in range(2):
                at = data.find(b"\n", at) + 1 or len(data)
        elif instruction == _FRAME:  # its length, which no longer fits
            harmless += data[copied:at]
            at = copied = at + 9
        elif instruction == _STOP:
            harmless += memoryview(data)[copied : at + 1]
            return bytes(harmless), at + 1
        else:
            raise Malformed(
                f"weighin does not know its instruction {instruction:#04x}, at byte {at:,}"
            )
    raise _TooLarge(f"more than {_MOST_INSTRUCTIONS:,} instructions")


class Pickled(pickle.Unpickler):
    """A pickled ``value`` as records, its ``storages`` by key, and the ``names`` of its classes."""

    def __init__(self, harmless: bytes) -> None:
        super().__init__(io.BytesIO(harmless), encoding="latin-1")
        self.storages: dict[str, Storage] = {}
        self.names: dict[str, Named] = {}
        self.value: Any = self.load()

    @property
    def refused(self) -> str:
        """The first name that torch.load(weights_only=True) refuses; "" if torch.load refuses none."""
        return next((name for name in self.names if not is_safe(name)), "")

    def find_class(self, module: str, name: str, /) -> Named:
        full = f"{module[:_LONGEST_NAME]}.{name[:_LONGEST_NAME]}"
        if full not in self.names and len(self.names) == _MOST_NAMES:
            raise Malformed(f"the pickle names more than {_MOST_NAMES:,} classes and functions")
        return self.names.setdefault(full, Named(full))

    def persistent_load(self, operands: tuple[Any, ...], /) -> Any:
        match operands:
            case (function, arguments):
                return _called(function, arguments)
            case (("module", Named() as kind, *_),):
                return kind
            case (("storage", Named(name), str(key), _, numel, *view),):
                return self._storage(name, key, numel, view)
            case (Opaque() as target, state, ()):
                target.contents.append(state)
                return target
            case (Dict() as target, state, ()):
                target.state = state
                return target
            case (target, _, ()):
                raise Malformed(f"a state is set on a {type_name(target)}")
            case ():
                return Dict()
        raise Malformed("a persistent id does not describe a storage")

    def _storage(self, name: str, key: str, numel: Any, view: list[Any]) -> Storage:
        if view and view[0] is not None:
            raise Malformed("a storage is a view of another, as torch wrote before 0.4")
        of, _, kind = name.rpartition(".")
        if of not in _OF_STORAGES or kind not in _STORAGES:
            raise Malformed(f"a storage has the class {name}, which was NOT executed")
        storage = Storage(key, _STORAGES[kind], numel)
        if not is_sizes((numel,)) or storage.nbytes > LARGEST:
            raise Malformed(f"storage {shown(key)} has an impossible size")
        first = self.storages.setdefault(key, storage)
        if first.nbytes != storage.nbytes:
            raise Malformed(
                f"storage {shown(key)} has {first.nbytes:,} bytes for one tensor and"
                f" {storage.nbytes:,} for another"
            )
        return storage


def load(path: Path, file: BinaryIO, base: int = 0, resave: str = RESAVE) -> Pickled:
    """Return the next pickle of ``file``, which begins at the byte ``base`` of ``path``."""
    at = file.tell()
    what = f"{path}: damaged: the pickle from byte {base + at:,} cannot be read"
    try:
        harmless, length = _next(file)
        pickled = Pickled(harmless)
    except EOFError as error:
        is_cut = "truncated: the file ends inside the pickle"
        raise CheckpointError(f"{what}: {is_cut}", resave if base else AGAIN) from error
    except _TooLarge as error:
        raise CheckpointError(f"{path}: the pickle cannot be read: {error}", _SMALLER) from error
    except (Malformed, LookupError, ValueError, TypeError, AttributeError, OverflowError,
            MemoryError) as error:  # fmt: skip
        raise CheckpointError(f"{what}: {error}", resave) from error
    file.seek(at + length)
    return pickled


def _next(file: BinaryIO) -> tuple[bytes, int]:
    """Return the harmless form of the next pickle, and its length; read at most twice as much."""
    data = b""
    while True:
        more = file.read(min(max(len(data), _USUAL_BYTES), MOST_BYTES - len(data)))
        data += more
        with suppress(IndexError):
            return _rewritten(data)
        if len(data) == MOST_BYTES:
            raise _TooLarge(f"longer than {MOST_BYTES:,} bytes")
        if not more:
            raise EOFError


# Calls

_MOST_ARGUMENTS: Final = 16
_NOWHERE: Final = Path()


def _called(function: Any, arguments: Any) -> Any:
    """Return a record of what the call of a function or class, which is not called, would return."""
    if not isinstance(arguments, tuple) or not isinstance(function, Named | Opaque):
        raise Malformed("the pickle calls an object that is not a function")
    if isinstance(function, Opaque):  # the pickle calls the result of another call
        return Opaque(function.kind, [function, arguments])
    make = _MAKES.get(function.name)
    if make is None:
        return Opaque(function.name, [arguments], function.name.startswith(_NOT_READ))
    try:
        return make(*arguments[:_MOST_ARGUMENTS])  # each call may copy all of them
    except (TypeError, ValueError) as error:
        what = f"{function.name} has other arguments than torch.save writes"
        raise Malformed(what) from error


def _ordered(*arguments: Any) -> Dict:
    """Return the record of an OrderedDict, whose items Python 2 put into a list, or of a defaultdict."""
    mapping = Dict()
    for pairs in arguments:
        if isinstance(pairs, list):
            for key, value in pairs:
                mapping[key] = value
            pairs.clear()  # a crafted pickle may give one list to many calls
        elif not isinstance(pairs, Named | Opaque):  # those make the items of a defaultdict
            raise TypeError
    return mapping


def _typed(inner: Any, kind: Any, arguments: Any, _state: Any) -> Any:
    if not isinstance(kind, Named) or not isinstance(inner, Named):
        return Opaque(_TYPED, [arguments])
    if kind.name not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return Opaque(kind.name, [arguments], is_tensor=True)
    if inner.name.startswith(_REBUILD):  # and not another call of this function, without end
        return _called(inner, arguments)
    return Opaque(inner.name, [arguments])


def _quantised(source: Any, *_: Any) -> Opaque:
    if not isinstance(source, Storage):
        raise TypeError
    return Opaque(f"torch.{source.dtype}", [source], is_tensor=True)


def _tensor_v3(
    source: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any,
    metadata: Any = None,
) -> Any:  # fmt: skip
    if not isinstance(dtype, Named):
        raise TypeError
    return _tensor(source, offset, shape, stride, metadata=metadata, dtype=dtype.name)


def _tensor(
    source: Any, offset: Any, shape: Any, stride: Any, _grad: Any = None, _hooks: Any = None,
    metadata: Any = None, *, dtype: str = "",
) -> Any:  # fmt: skip
    # ``metadata`` are such as {"conj": True}; without ``dtype``, it is the storage's.
    if not isinstance(source, Storage):
        raise TypeError
    are_usual = isinstance(metadata, dict) and len(metadata) <= _MOST_ARGUMENTS
    if metadata and not (are_usual and not any(metadata.values())):
        return Opaque("conjugated or negated values", [source], is_tensor=True)
    kind = dtype or f"torch.{source.dtype}"
    dtype = kind.removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        return Opaque(kind, [source], is_tensor=True)
    # A list would be copied for each tensor that a crafted pickle makes of it.
    are_tuples = isinstance(shape, tuple) and isinstance(stride, tuple)
    if not (are_tuples and is_sizes(shape) and is_sizes(stride) and is_sizes((offset,))) or (
        len(shape) != len(stride)
        or prod([max(size, 1) for size in shape]) * ITEM_BYTES[dtype] > LARGEST
    ):
        what = f"a tensor in storage {shown(source.key)} has an impossible shape, stride or offset"
        raise Malformed(what)
    start = 0 if 0 in shape else offset * ITEM_BYTES[dtype]
    found = Slice(source.key, shape, stride, dtype, _NOWHERE, start, 0, source.nbytes)
    if (end := start + found.span * ITEM_BYTES[dtype]) > source.nbytes:
        raise Malformed(
            f"a tensor ends at byte {end:,} of storage {shown(source.key)}, which has"
            f" {source.nbytes:,}"
        )
    return found


_MAKES: Final[dict[str, Any]] = {
    f"{_REBUILD}tensor": _tensor,
    f"{_REBUILD}tensor_v2": _tensor,
    f"{_REBUILD}tensor_v3": _tensor_v3,
    f"{_REBUILD}qtensor": _quantised,
    f"{_REBUILD}parameter": lambda tensor, *_: tensor,
    f"{_REBUILD}parameter_with_state": lambda tensor, *_: tensor,
    _TYPED: _typed,
    "torch.Size": lambda sizes: sizes,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _ordered,
}
