"""Read what ``torch.save`` pickled as plain records: nothing that a pickle names is imported or called.

Python's own unpickler moves the values on its stack, and ``_rewritten`` first replaces every
instruction that would call, build or hash an object: the new instructions hand the operands to
``_Reader.persistent_load``, which makes a record of them. An instruction that would take memory for
more than the pickle holds is refused before the unpickler sees it.

The record of a tensor is a ``Slice`` whose name is the key of its storage, and whose offset counts from
the storage's start: ``torch_files`` knows where the storages lie.
"""

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from weighin.errors import CheckpointError
from weighin.stream.foreign import AGAIN, RESAVE, damaged
from weighin.stream.slices import ITEM_BYTES, LARGEST, Slice, is_sizes
from weighin.text import shown

MOST_BYTES: Final = 32 * 1024**2
"""The largest pickle that is read, in bytes: 200 times the size of GPT-2 XL's pickle."""

_MOST_INSTRUCTIONS: Final = 3_000_000  # each may push a number of some 40 bytes
_MOST_OBJECTS: Final = 700_000  # of some 100 to 200 bytes each; a tensor takes ten
_LONGEST_NAME: Final = 1000
_MOST_NAMES: Final = 10_000  # of classes and functions, which may share the text of their parts
_LARGEST_KEY_BITS: Final = 62  # of a number: larger ones can be crafted to have equal hashes
_CHUNK_BYTES: Final = 64 * 1024

_QUANTISED_BYTES: Final = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}
_STORED_BYTES: Final = {**ITEM_BYTES, **_QUANTISED_BYTES}
_STORAGES: Final = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
_OF_STORAGES: Final = ("torch", "torch.cuda", "torch.storage")
_STORED: Final = {f"{of}.{name}": dtype for of in _OF_STORAGES for name, dtype in _STORAGES.items()}
"""Maps the name of a class of storages to its dtype."""

_REBUILD: Final = "torch._utils._rebuild_"
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


class Malformed(Exception):
    """The pickle is invalid, or describes an impossible tensor; the place in bytes may be the second argument."""


class _Ended(Malformed):
    """The data end before the last instruction of the pickle."""


class _Beyond(Malformed):
    """The pickle is larger than this module reads, or has an instruction that it does not know."""


# Records


@dataclass(frozen=True, slots=True)
class Named:
    """The full name of a class or function, which is never imported."""

    name: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Opaque:
    """An object in a pickle whose class is neither imported nor called.

    Attributes:
        kind: the full name of the object's class, or of the function that makes the object.
        contents: records of the arguments, state and items that the pickle gives the object.
        way: if the object is a tensor that weighin does not read, such as a sparse one, how to save
            its values as a plain tensor; ``kind`` is then a title.
    """

    kind: str
    contents: list[Any] = field(default_factory=list)
    way: str = ""

    def __repr__(self) -> str:
        return self.kind  # the text of crafted contents may be endless

    def extend(self, items: list[Any]) -> None:
        self.contents.extend(items)

    def append(self, item: Any) -> None:
        self.contents.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.contents.extend((key, value))

    @property
    def is_module(self) -> bool:
        return any(isinstance(one, dict) and one.keys() >= _OF_MODULES for one in self.contents)

    @property
    def is_foreign(self) -> bool:
        """Whether torch.load(weights_only=True) refuses the object."""
        return not self.way and "." in self.kind and not is_safe(self.kind)


class Dict(dict[Any, Any]):
    """A dict in a pickle. A key whose hash may be crafted becomes an ``Opaque``.

    These are all but strings, bytes and usual numbers: the hash of a nested tuple may never end.
    """

    title = "dict"

    def __setitem__(self, key: Any, value: Any) -> None:
        is_large = isinstance(key, int) and key.bit_length() > _LARGEST_KEY_BITS
        if is_large or not isinstance(key, str | int | bytes | float | Opaque):
            key = Opaque(shown(key) if is_large else type_name(key), [key])
        if key in self:
            raise Malformed(f"key {shown(key)} occurs twice")
        super().__setitem__(key, value)


class StateDict(Dict):
    """An OrderedDict in a pickle; ``state`` has the attributes that the pickle sets."""

    title = "OrderedDict"
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


class Size(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


@dataclass(slots=True, unsafe_hash=True)
class Storage:
    """A storage: the key in the file, the dtype, and the number of elements."""

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
        return _TITLES.get(value.kind, value.kind.removeprefix("__builtin__."))
    if isinstance(value, Dict):
        return value.title
    names = {Storage: "storage", Slice: "Tensor", Named: "class or function", Size: "torch.Size"}
    return names.get(type(value), type(value).__name__)


# Instructions

_PLAIN_SIZES: Final = {  # instructions that only move values, and the bytes of their operands
    **dict.fromkeys(b"(012N\x88\x89)aesu\x94", 0),
    **dict.fromkeys(b"Khq\x80", 1), **dict.fromkeys(b"M", 2), **dict.fromkeys(b"Jj", 4),
    **dict.fromkeys(b"G", 8),
}  # fmt: skip
_SIZES: Final = [1 + _PLAIN_SIZES[code] if code in _PLAIN_SIZES else 0 for code in range(256)]
_COUNTED: Final = {  # instructions with a string or number, and the bytes of its length
    **dict.fromkeys(b"\x8cUC\x8a", 1), **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}  # fmt: skip
_MAKING: Final = frozenset(b"]t\x85\x86\x87\x93")
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
"""What stands in the place of an instruction. ``Q`` calls ``_Reader.persistent_load``."""

_PUT, _GLOBAL, _FRAME, _STOP = b"rc\x95."
_TWO_LINES: Final = re.compile(rb"(?:[^\n]{0,%d}\n){2}" % _LONGEST_NAME)  # a class or function


def _rewritten(data: bytes) -> tuple[bytes, int]:  # noqa: PLR0912
    """Return the harmless form of the pickle that begins ``data``, and the pickle's length in bytes.

    Raises:
        Malformed: with the place, in bytes, as its second argument.
    """
    harmless = bytearray()
    at = copied = objects = 0
    try:
        for count in range(_MOST_INSTRUCTIONS):
            instruction = data[at]
            if size := _SIZES[instruction]:
                at += size
                continue
            objects += 1
            if objects > _MOST_OBJECTS:
                raise _Beyond(f"more than {_MOST_OBJECTS:,} objects")
            if width := _COUNTED.get(instruction, 0):
                start = at + 1 + width
                end = start + int.from_bytes(data[at + 1 : start], "little")
                if end > MOST_BYTES:
                    raise _Beyond(f"longer than {MOST_BYTES:,} bytes")
                at = end
            elif instruction in _MAKING:
                at += 1
            elif instruction == _PUT:
                # The unpickler's memo is a list, as long as the largest index.
                if int.from_bytes(data[at + 1 : at + 5], "little") > count:
                    raise Malformed("an object is stored at an impossible index", at)
                objects -= 1
                at += 5
            elif instruction in _REPLACED:
                harmless += data[copied:at]
                harmless += _REPLACED[instruction]
                at = copied = at + 1
            elif instruction == _GLOBAL:
                if (lines := _TWO_LINES.match(data, at + 1)) is None:
                    if len(data) - at > 2 * _LONGEST_NAME:
                        raise Malformed("the name of a function or class is too long", at)
                    raise IndexError  # noqa: TRY301 (as at any other end of the data)
                at = lines.end()
            elif instruction == _FRAME:  # its length, which no longer fits
                harmless += data[copied:at]
                at = copied = at + 9
            elif instruction == _STOP:
                harmless += memoryview(data)[copied : at + 1]
                return bytes(harmless), at + 1
            else:
                import pickletools  # not at the top: only a refusal needs it

                for known in pickletools.opcodes:
                    if known.code == chr(instruction):
                        raise _Beyond(f"weighin does not know the instruction {known.name}")
                raise Malformed(f"{instruction:#04x} is no instruction of a pickle", at)
    except IndexError:
        raise _Ended("truncated: the file ends inside the pickle", len(data)) from None
    raise _Beyond(f"more than {_MOST_INSTRUCTIONS:,} instructions")


class _Reader(pickle.Unpickler):
    """Makes records from the operands that the rewritten instructions hand over."""

    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")
        self._path = path
        self.storages: dict[str, Storage] = {}
        self.names: dict[str, Named] = {}

    def find_class(self, module: str, name: str, /) -> Named:
        full = f"{module}.{name}"[:_LONGEST_NAME]
        if full not in self.names and len(self.names) == _MOST_NAMES:
            raise Malformed(f"the pickle names more than {_MOST_NAMES:,} classes and functions")
        return self.names.setdefault(full, Named(full))

    def persistent_load(self, operands: tuple[Any, ...], /) -> Any:
        if len(operands) == 2:
            return _called(*operands)
        if len(operands) == 1:
            return self._persistent(operands[0])
        return _with_state(*operands[:2]) if operands else Dict()

    def _persistent(self, identity: Any) -> Storage | Named:
        """Return the record for a persistent id of torch: a storage, or the class of a pickled module."""
        match identity:
            case ("module", Named() as kind, *_):
                return kind
            case ("storage", Named(name), str(key), _, numel, *view):
                pass
            case _:
                raise Malformed("a persistent id does not describe a storage")
        if view and view[0] is not None:
            raise Malformed("a storage is a view of another, as torch wrote before 0.4")
        if not (dtype := _STORED.get(name, "")):
            raise CheckpointError(
                f"{self._path}: the pickle holds more than tensors, and weighin did NOT execute it: it"
                f" refers to {name}",
                "if you trust the file, load the file with torch and save plain weights:"
                " torch.save(model.state_dict(), ...)",
            )
        if not is_sizes((numel,)) or numel * _STORED_BYTES[dtype] > LARGEST:
            raise Malformed(f"storage {shown(key)} has an impossible size")
        storage = Storage(key, dtype, numel)
        first = self.storages.setdefault(key, storage)
        if first.nbytes != storage.nbytes:
            raise Malformed(
                f"storage {shown(key)} has {first.nbytes:,} bytes for one tensor and"
                f" {storage.nbytes:,} for another"
            )
        return storage


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickled value as records.

    Attributes:
        storages: every storage to which the pickle refers, by the storage's key.
        names: the full names of all classes and functions to which the pickle refers, in order.
    """

    value: Any
    storages: dict[str, Storage]
    names: tuple[str, ...]

    @property
    def refused(self) -> str:
        """The first name that torch.load(weights_only=True) refuses; "" if torch.load refuses none."""
        return next((name for name in self.names if not is_safe(name)), "")


def load(
    path: Path,
    file: BinaryIO,
    base: int = 0,
    resave: str = RESAVE,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Pickled:
    """Return the next pickled value of ``file``, with a record for every object.

    ``base`` is the offset in bytes of ``file`` within the file ``path``, for messages. ``resave`` is
    the repair (advice) in the error for a damaged pickle. ``chunk_bytes`` are read first.

    Raises:
        CheckpointError: the pickle is damaged, too large, or refers to a storage of an unknown dtype.
    """
    at = file.tell()
    start, data = base + at, b""
    try:
        while True:
            more = file.read(min(max(len(data), chunk_bytes), MOST_BYTES - len(data)))
            data += more
            try:
                harmless, length = _rewritten(data)
                break
            except _Ended:
                if len(data) >= MOST_BYTES:
                    raise _Beyond(f"longer than {MOST_BYTES:,} bytes") from None
                if not more:
                    raise
        data = more = b""  # which may be as large as the value
        reader = _Reader(path, harmless)
        value = reader.load()
    except _Beyond as error:
        raise CheckpointError(
            f"{path}: the pickle from byte {start:,} cannot be read: {error}",
            "load the file with torch, and save plain weights: torch.save(model.state_dict(), ...)",
        ) from None
    except (Malformed, pickle.UnpicklingError, LookupError, ValueError, TypeError, AttributeError,
            EOFError, OverflowError, MemoryError) as error:  # fmt: skip
        reason, *places = error.args if isinstance(error, Malformed) else (str(error),)
        place = f" at byte {start + places[0]:,}" if places else ""
        what = f"the pickle from byte {start:,} cannot be read{place}: {reason}"
        is_cut = isinstance(error, _Ended) and not base
        raise damaged(path, what, AGAIN if is_cut else resave) from error
    file.seek(at + length)
    return Pickled(value, reader.storages, tuple(reader.names))


def _with_state(target: Any, state: Any) -> Any:
    """Set the state of an object, such as the metadata of a state dict, as the BUILD instruction does."""
    if isinstance(target, Opaque):
        target.contents.append(state)
    elif isinstance(target, StateDict):
        target.state = state
    elif not isinstance(target, dict):
        raise Malformed(f"a state is set on a {type_name(target)}")
    return target


# Calls: the names of functions and classes are compared with those that torch.save writes for tensors

_LAZY: Final = ("lazy parameter without values", "run the model once, and save it again")
_ON_A_DEVICE: Final = (
    "tensor of a device without storages of torch",
    "save the model from the CPU: torch.save(model.cpu().state_dict(), ...)",
)


def _made_plain(method: str, loading: str = "load it with torch") -> str:
    """Return the repair for a tensor that is a plain tensor once ``method`` is called."""
    return f"{loading}, make it a plain tensor (tensor.{method}), and save it: torch.save({{NAME: TENSOR, ...}}, ...)"


_OTHER_TENSORS: Final = {
    "torch.nn.parameter.UninitializedParameter": _LAZY,
    "torch.nn.parameter.UninitializedBuffer": _LAZY,
    f"{_REBUILD}device_tensor_from_numpy": _ON_A_DEVICE,
    f"{_REBUILD}device_tensor_from_cpu_tensor": _ON_A_DEVICE,
    f"{_REBUILD}xla_tensor": _ON_A_DEVICE,
    f"{_REBUILD}sparse_tensor": ("sparse tensor", _made_plain("to_dense()")),
    f"{_REBUILD}nested_tensor": ("nested tensor", _made_plain("unbind()")),
    f"{_REBUILD}meta_tensor_no_storage": (
        "tensor on the meta device, without values",
        "load the model's weights before it is saved",
    ),
    f"{_REBUILD}wrapper_subclass": (
        "tensor of a subclass that is not named",
        _made_plain("dequantize()", "load it with the package that wrote it"),
    ),
}
"""Maps a function or class to the title of the tensors that it makes, and to the repair, for an error."""

_MOST_ARGUMENTS: Final = 16
_NOWHERE: Final = Path()


def _called(function: Any, arguments: Any) -> Any:
    """Return the record for the result of a call in the pickle, without calling anything."""
    if not isinstance(arguments, tuple) or not isinstance(function, Named | Opaque):
        raise Malformed("the pickle calls an object that is not a function")
    if isinstance(function, Opaque):  # the pickle calls the result of another call
        return Opaque(function.kind, [function, arguments])
    name = function.name
    if name in _OTHER_TENSORS:
        title, way = _OTHER_TENSORS[name]
        return Opaque(title, [arguments], way)
    make = _MAKES.get(name)
    if make is None:
        return Opaque(name, [arguments])
    try:
        return make(*arguments[:_MOST_ARGUMENTS])  # each call may copy all of them
    except (TypeError, ValueError) as error:
        raise Malformed(f"{name} has other arguments than torch.save writes") from error


def _ordered(*arguments: Any) -> StateDict:
    """Return the record of an OrderedDict or defaultdict; Python 2 put its items into a list."""
    mapping = StateDict()
    for pairs in arguments:
        if isinstance(pairs, list):
            for key, value in pairs:
                mapping[key] = value
            pairs.clear()  # a crafted pickle may give one list to many calls
        elif not isinstance(pairs, Named | Opaque):  # those make the items of a defaultdict
            raise TypeError
    return mapping


def _size(sizes: Any) -> Size:
    if is_sizes(sizes):
        return Size(sizes)
    raise Malformed("a torch.Size is impossible")


def _attribute(owner: Any, name: Any) -> Any:
    """Return the record of ``getattr``, by which Python 3.11.0 to 3.11.3 pickle an enumeration's member."""
    of_class = isinstance(owner, Named) and not is_safe(owner.name)
    return Opaque(owner.name if of_class else "builtins.getattr", [(owner, name)])


def _typed(inner: Any, kind: Any, arguments: Any, _state: Any) -> Any:
    if not isinstance(kind, Named):
        return Opaque("torch._tensor._rebuild_from_type_v2", [arguments])
    if kind.name in ("torch.Tensor", "torch.nn.parameter.Parameter") and isinstance(inner, Named):
        if inner.name.startswith(_REBUILD):
            return _called(inner, arguments)
        return Opaque(inner.name, [arguments])
    leaf = kind.name.rpartition(".")[2]
    if kind.name.startswith("torch.") and leaf in ("DTensor", "ShardedTensor"):
        return Opaque(
            f"{leaf}, of which the file of each rank has a part",
            [arguments],
            "save whole tensors: torch.distributed.checkpoint.state_dict.get_model_state_dict(model,"
            " options=StateDictOptions(full_state_dict=True)); or save with"
            " torch.distributed.checkpoint, whose folders weighin reads",
        )
    way = _made_plain("dequantize()", "load it with the code of that class")
    return Opaque(f"tensor of the subclass {kind.name}", [arguments], way)


def _parameter(tensor: Any, *_: Any) -> Any:
    if not (isinstance(tensor, Slice) or (isinstance(tensor, Opaque) and tensor.way)):
        raise Malformed("a parameter is created from something that is not a tensor")
    return tensor


def _quantised(source: Any, *_: Any) -> Opaque:
    dtype = source.dtype if isinstance(source, Storage) else "quint8"
    return Opaque(
        f"quantised tensor (torch.{dtype})", [source], _made_plain("dequantize()")
    )  # fmt: skip


def _tensor(
    source: Any, offset: Any, shape: Any, stride: Any,
    _grad: Any = None, _hooks: Any = None, metadata: Any = None, dtype: str = "",
) -> Any:  # fmt: skip
    """Return the record of a tensor; an empty ``dtype`` means that of the storage."""
    if not isinstance(source, Storage):
        raise Malformed("a tensor is created from something that is not a storage")
    if metadata and not (
        isinstance(metadata, Mapping)
        and len(metadata) <= _MOST_ARGUMENTS
        and not any(metadata.values())
    ):
        way = _made_plain("resolve_conj().resolve_neg()")
        return Opaque("tensor that is conjugated or negated lazily", [source], way)
    # A list would be copied for each tensor that a crafted pickle makes of it.
    are_tuples = isinstance(shape, tuple) and isinstance(stride, tuple)
    if not (are_tuples and is_sizes(shape) and is_sizes(stride) and is_sizes((offset,))):
        raise Malformed(
            f"a tensor in storage {shown(source.key)} has an impossible shape, stride or offset"
        )
    kind = dtype or source.dtype
    if kind in _QUANTISED_BYTES:
        return _quantised(source)
    if len(shape) != len(stride):
        raise Malformed(
            f"a tensor in storage {shown(source.key)} has {len(shape)} sizes and {len(stride)} strides"
        )
    item_bytes = ITEM_BYTES[kind]
    if (prod(shape) or prod([max(size, 1) for size in shape])) * item_bytes > LARGEST:
        raise Malformed(f"a tensor in storage {shown(source.key)} has an impossible shape")
    place = 0 if 0 in shape else offset * item_bytes
    found = Slice(
        source.key, tuple(shape), tuple(stride), kind, _NOWHERE, place, 0, source.nbytes
    )  # fmt: skip
    if (end := place + found.span * item_bytes) > source.nbytes:
        raise Malformed(
            f"a tensor ends at byte {end:,} of storage {shown(source.key)}, "
            f"which has {source.nbytes:,}"
        )
    return found


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any,
    metadata: Any = None,
) -> Any:  # fmt: skip
    if not isinstance(dtype, Named):
        raise Malformed(f"the dtype of a tensor is a {type_name(dtype)}")
    if (name := dtype.name.removeprefix("torch.")) not in ITEM_BYTES:
        way = _made_plain("view(torch.uint8)")
        return Opaque(f"tensor of {dtype.name}", [storage], way)
    return _tensor(storage, offset, shape, stride, None, None, metadata, name)


_MAKES: Final[dict[str, Any]] = {
    f"{_REBUILD}tensor": _tensor,
    f"{_REBUILD}tensor_v2": _tensor,
    f"{_REBUILD}tensor_v3": _tensor_v3,
    f"{_REBUILD}parameter": _parameter,
    f"{_REBUILD}parameter_with_state": _parameter,
    f"{_REBUILD}qtensor": _quantised,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch.Size": _size,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _ordered,
    "builtins.getattr": _attribute,
    "__builtin__.getattr": _attribute,
}
