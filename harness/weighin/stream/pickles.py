"""Read what ``torch.save`` pickled as plain records: nothing that a pickle names is imported or called.

Python's own unpickler moves the values on its stack. ``Pickled`` follows only the instructions of ``_DO``,
in which those that would call, build or hash an object make a record of their operands. The record of
a tensor is a ``Slice`` whose name is the key of its storage, and whose offset counts from the storage's
start.
"""

import pickle
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from weighin.errors import CheckpointError
from weighin.stream.foreign import AGAIN, RESAVE
from weighin.stream.slices import ITEM_BYTES, LARGEST, Slice, is_sizes
from weighin.text import shown

MOST_BYTES: Final = 32 * 1024**2  # of a pickle: 200 times the size of GPT-2 XL's
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
_OF_STORAGES: Final = ("torch", "torch.cuda", "torch.storage")

_REBUILD: Final = "torch._utils._rebuild_"
_TYPED: Final = "torch._tensor._rebuild_from_type_v2"
_NOT_READ: Final = (_REBUILD, "torch.nn.parameter.Uninitialized")  # sparse, nested, lazy, ...
_SAFE: Final = frozenset({  # besides tensors, storages and dtypes
    "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set",
    "collections.Counter", "collections.OrderedDict", "torch.Size", "torch.device",
    _TYPED, "torch.nn.parameter.Parameter", "torch.serialization._get_layout",
})  # fmt: skip
_NOWHERE: Final = Path()
IF_TRUSTED: Final = (
    "if you trust the file, load it with torch.load(FILE, weights_only=False), and save plain"
    " weights: torch.save(STATE_DICT, NEW)"
)


class Malformed(Exception):
    """The pickle says what no torch.save writes."""


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

    def append(self, item: Any) -> None:
        self.contents.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.contents.extend((key, value))


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
    if (
        isinstance(value, Opaque) and value.kind == "_codecs.encode"
    ):  # as older protocols write them
        return "bytes object"
    if isinstance(value, Opaque):
        return f"tensor of {value.kind}" if value.is_tensor else value.kind
    names = {Storage: "storage", Slice: "Tensor", Named: "class or function", Dict: "dict"}
    return names.get(type(value), type(value).__name__)


class Pickled(pickle._Unpickler):
    """The next pickle of a file: its ``value`` as records, and its ``storages`` by key; ``_run`` replaces the
    loop of Python's unpickler, which would call anything.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="latin-1")
        self.storages: dict[str, Storage] = {}
        self.names: dict[str, Named] = {}
        self.file, self.start, self.left = file, file.tell(), MOST_BYTES
        self.memo: dict[int, Any] = {}
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []  # the stack below each mark
        self.append = self.stack.append
        self.value = self._run()

    @property
    def refused(self) -> bool:
        return not all(map(is_safe, self.names))

    def _run(self) -> Any:
        objects = 0
        for _ in range(_MOST_INSTRUCTIONS):
            instruction = self.file.read(1)
            if instruction == b".":
                return self.stack.pop()
            do = _DO.get(instruction)
            if do is None:
                if not instruction:
                    raise EOFError
                place = f"{instruction[0]:#04x}, at byte {self.file.tell() - 1 - self.start:,}"
                raise Malformed(f"weighin does not know the instruction {place}")
            objects += instruction in _MAKING
            if objects > _MOST_OBJECTS or len(self.memo) + len(self.metastack) > _MOST_OBJECTS:
                raise _TooLarge(f"more than {_MOST_OBJECTS:,} objects")
            do(self)
        raise _TooLarge(f"more than {_MOST_INSTRUCTIONS:,} instructions")

    def read(self, size: int) -> bytes:
        data = self.file.read(min(size, self.left))
        return self._taken(data, len(data) == size)

    def readline(self) -> bytes:
        line = self.file.readline(self.left)
        return self._taken(line, line.endswith(b"\n"))

    def _taken(self, data: bytes, is_whole: bool) -> bytes:
        self.left -= len(data)
        if not is_whole:
            raise EOFError if self.left else _TooLarge(f"longer than {MOST_BYTES:,} bytes")
        return data

    def find_class(self, module: str, name: str, /) -> Named:
        full = f"{module[:_LONGEST_NAME]}.{name[:_LONGEST_NAME]}"
        if full not in self.names and len(self.names) == _MOST_NAMES:
            raise Malformed(f"the pickle names more than {_MOST_NAMES:,} classes and functions")
        return self.names.setdefault(full, Named(full))

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.append(_called(function, arguments))

    def _call_with_names(self) -> None:
        self.stack[-2:] = [tuple(self.stack[-2:])]  # the arguments, and those with names
        self._call()

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Opaque):
            target.contents.append(state)
        elif isinstance(target, Dict):
            target.state = state
        else:
            raise Malformed(f"a state is set on a {type_name(target)}")

    def persistent_load(self, identity: Any, /) -> Any:
        match identity:
            case ("module", Named() as module, *_):
                return module
            case ("storage", Named(name), str(key), _, numel, *_):
                pass
            case _:
                raise Malformed("a persistent id should name a storage, but names something else")
        if len(identity) > 5 and identity[5] is not None:
            raise Malformed("a storage is a view of another storage, as in torch before 0.4")
        of, _, kind = name.rpartition(".")
        if of not in _OF_STORAGES or kind not in _STORAGES:
            raise Malformed(f"a storage has the class {name}, which was NOT executed")
        storage = Storage(key, _STORAGES[kind], numel)
        if not is_sizes((numel,)) or storage.nbytes > LARGEST:
            raise Malformed(f"storage {shown(key)} has an impossible number of elements")
        self.storages.setdefault(key, storage)
        return storage


def _instructions(codes: bytes) -> dict[bytes, Any]:
    return {bytes([code]): pickle._Unpickler.dispatch[code] for code in codes}


_MAKING: Final[dict[bytes, Any]] = {  # the instructions that make an object
    # ] EMPTY_LIST, t and \x85 to \x87 tuples, c and \x93 a name (GLOBAL), Q BINPERSID, the others texts and numbers
    **_instructions(b"]tc\x85\x86\x87\x93\x8cUC\x8aXTB\x8b\x8d\x8eQ"),
    b"}": lambda pickled: pickled.append(Dict()),
    b"R": Pickled._call,
    b"\x81": Pickled._call,
    b"\x92": Pickled._call_with_names,
    b"b": Pickled._build,
    # A set becomes a list, because its items would be hashed, and a bytearray bytes.
    b"\x8f": Pickled.dispatch[ord("]")],
    b"\x90": Pickled.dispatch[ord("e")],
    b"\x91": Pickled.dispatch[ord("t")],
    b"\x96": Pickled.dispatch[0x8E],
}
_DO: Final = {
    **_MAKING,
    **_instructions(b"\x80(012N\x88\x89)aesu\x94KhqMJjGr"),
    b"\x95": lambda pickled: pickled.read(8),  # the size of a frame
}


def load(path: Path, file: BinaryIO, base: int = 0, resave: str = RESAVE) -> Pickled:
    """Return the pickle at the position of ``file``, a stream that begins at byte ``base`` of ``path``."""
    start = base + file.tell()
    what = f"{path}: damaged: the pickle from byte {start:,} cannot be read"
    try:
        return Pickled(file)
    except EOFError as error:
        is_cut = f"{path}: truncated: the file ends inside the pickle that begins at byte {start:,}"
        raise CheckpointError(is_cut, resave if base else AGAIN) from error
    except _TooLarge as error:
        raise CheckpointError(f"{path}: the pickle cannot be read: {error}", IF_TRUSTED) from error
    except Malformed as error:
        raise CheckpointError(f"{what}: {error}", resave) from error
    except (pickle.UnpicklingError, LookupError, ValueError, TypeError, AttributeError,
            OverflowError, MemoryError) as error:  # fmt: skip
        where = f"before byte {base + file.tell():,}"
        raise CheckpointError(f"{what}: an instruction {where} is invalid", resave) from error


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
        return make(*arguments[:16])  # each call may copy all of them
    except (TypeError, ValueError) as error:
        raise Malformed(f"{function.name} has arguments that torch.save never writes") from error


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
    if metadata:
        return Opaque("conjugated or negated values", [source], is_tensor=True)
    kind = dtype or f"torch.{source.dtype}"
    dtype = kind.removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        return Opaque(kind, [source], is_tensor=True)
    # A list would be copied for each tensor that a crafted pickle makes of it.
    are_sizes = all(isinstance(one, tuple) and is_sizes(one) for one in (shape, stride, (offset,)))
    fits = are_sizes and len(shape) == len(stride)
    if fits and prod([max(size, 1) for size in shape]) * ITEM_BYTES[dtype] <= LARGEST:
        start = 0 if 0 in shape else offset * ITEM_BYTES[dtype]
        found = Slice(source.key, shape, stride, dtype, _NOWHERE, start, 0, source.nbytes)
        if start + found.span * ITEM_BYTES[dtype] <= source.nbytes:
            return found
    what = f"a tensor in storage {shown(source.key)} has an impossible shape, stride or offset"
    raise Malformed(what)


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
