"""Read a pickled state dict that ``torch.save`` wrote, without executing any code.

This module interprets the instructions of pickle protocols 2 to 5. torch's weights-only unpickler
still calls constructors such as ``bytearray(10**12)``, and Python's own unpickler allocates any length
that a crafted pickle requests. The interpreter here imports and calls nothing, compares every length
with the file's length, and limits the number of objects. An object of a class that tensors do not need
becomes an ``Opaque``, so that the weights beside it can be read.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from weighin.errors import CheckpointError
from weighin.formats import tensor_refs
from weighin.formats.sniff import AGAIN, RESAVE, shown
from weighin.formats.tensor_refs import Malformed, Named, NotTensors, Opaque, StorageRef

MOST_BYTES: Final = 32 * 1024**2
"""The largest pickle that is read, in bytes: 200 times the size of GPT-2 XL's pickle."""

_MOST_PUSHED: Final = 3_000_000  # values on the stack, of some 40 bytes each
_MOST_OBJECTS: Final = 1_000_000  # lists, dicts, tuples and strings, of some 100 bytes each
_LONGEST_NAME: Final = 1000
_MARK: Final = object()


class _Ended(Malformed):
    """The pickle has no end."""


class _TooLarge(Malformed):
    """The pickle is larger than this interpreter reads."""


class _Unknown(Malformed):
    """The pickle has an instruction that this interpreter does not know."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickled value as plain records.

    Attributes:
        storages: every storage that the pickle refers to, by its key.
        refused: the first name in the pickle that torch.load(weights_only=True) refuses; empty if it
            refuses none.
    """

    value: Any
    storages: dict[str, StorageRef]
    refused: str


def load(path: Path, file: BinaryIO, base: int = 0) -> Pickled:
    """Return the next pickled value of ``file``, with every object as a plain record.

    ``base`` is the offset of ``file`` within the file at ``path``, for messages.

    Raises:
        CheckpointError: the pickle is damaged, too large, or refers to a storage of an unknown dtype;
            the message names the byte offset.
    """
    machine = _Machine(file)
    start = base + file.tell()
    try:
        return Pickled(machine.run(), machine.storages, machine.refused)
    except NotTensors as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, and was NOT executed: it refers to {error}",
            "if you trust the file, load it and save plain weights: torch.save(model.state_dict(), ...)",
        ) from None
    except (_TooLarge, _Unknown) as error:
        raise CheckpointError(
            f"{path}: the pickle from byte {start:,} cannot be read: {error}",
            "load it with torch, and save plain weights: torch.save(model.state_dict(), ...)",
        ) from None
    except (Malformed, IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        reason = error if isinstance(error, Malformed) else "an instruction has no operand"
        at = base + file.tell()
        raise CheckpointError(
            f"{path}: damaged: the pickle from byte {start:,} cannot be read at byte {at:,}: {reason}",
            AGAIN if isinstance(error, _Ended) and not base else RESAVE,  # base: a part of the file
        ) from error


class _Machine:
    """The state of the interpreter: a stack of values, marks on the stack, and a memo."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._left_bytes, self._left_objects = MOST_BYTES, _MOST_OBJECTS
        self.storages: dict[str, StorageRef] = {}
        self.refused = ""
        self._do: dict[int, Callable[[], object]] = {
            **_constants(self),
            ord("c"): self._global, ord("R"): self._reduce, ord("b"): self._build,
            ord("\x93"): self._global_on_stack, ord("Q"): self._persistent,
            ord("\x81"): self._object, ord("\x92"): self._object_with_names,
            ord("\x80"): lambda: self._integer("<B"),
            ord("("): lambda: self._push(_MARK), ord("t"): self._tuple,
            ord("\x85"): lambda: self._tuple_of(1), ord("\x86"): lambda: self._tuple_of(2),
            ord("\x87"): lambda: self._tuple_of(3),
            ord("]"): lambda: self._new([]), ord("}"): lambda: self._new({}),
            ord("\x8f"): lambda: self._new([]),  # a set, whose elements are not needed as a set
            ord("\x91"): lambda: self._new(self._marked()),
            ord("a"): lambda: self._extend([self._pop()]), ord("e"): lambda: self._extend(self._marked()),
            ord("\x90"): lambda: self._extend(self._marked()),
            ord("s"): lambda: self._update([self._pop(), self._pop()][::-1]),
            ord("u"): lambda: self._update(self._marked()),
            ord("X"): lambda: self._text("<I"), ord("\x8c"): lambda: self._text("<B"),
            ord("\x8d"): lambda: self._text("<Q"),
            ord("U"): lambda: self._new(self._read(self._integer("<B")).decode("latin-1")),
            ord("T"): lambda: self._new(self._read(self._integer("<I")).decode("latin-1")),
            ord("C"): lambda: self._new(self._read(self._integer("<B"))),
            ord("B"): lambda: self._new(self._read(self._integer("<I"))),
            ord("\x8e"): lambda: self._new(self._read(self._integer("<Q"))),
            ord("\x96"): lambda: self._new(self._read(self._integer("<Q"))),
            ord("\x8a"): lambda: self._long("<B"), ord("\x8b"): lambda: self._long("<I"),
            ord("h"): lambda: self._push(self._memo[self._integer("<B")]),
            ord("j"): lambda: self._push(self._memo[self._integer("<I")]),
            ord("q"): lambda: self._memo.__setitem__(self._integer("<B"), self._top()),
            ord("r"): lambda: self._memo.__setitem__(self._integer("<I"), self._top()),
            ord("\x94"): lambda: self._memo.__setitem__(len(self._memo), self._top()),
            ord("\x95"): lambda: self._integer("<Q"),  # the length of the frame that follows
            ord("0"): self._stack.pop, ord("1"): self._marked,
            ord("2"): lambda: self._push(self._top()),
        }  # fmt: skip

    def run(self) -> Any:
        for _ in range(_MOST_PUSHED):
            instruction = self._read(1)[0]
            if instruction == ord("."):
                return self._pop()
            action = self._do.get(instruction)
            if action is None:
                raise _unknown(instruction)
            action()
        raise _TooLarge(f"more than {_MOST_PUSHED:,} instructions")

    def _read(self, size: int) -> bytes:
        self._left_bytes -= size
        if self._left_bytes < 0:
            raise _TooLarge(f"longer than {MOST_BYTES:,} bytes")
        data = self._file.read(size)
        if len(data) != size:
            raise _Ended("truncated: the file ends")
        return data

    def _integer(self, form: str) -> int:
        return int(struct.unpack(form, self._read(struct.calcsize(form)))[0])

    def _text(self, form: str) -> None:
        self._new(self._read(self._integer(form)).decode("utf-8", "surrogatepass"))

    def _long(self, form: str) -> None:
        self._new(int.from_bytes(self._read(self._integer(form)), "little", signed=True))

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _new(self, value: Any) -> None:
        self._count(1)
        self._stack.append(value)

    def _count(self, objects: int) -> None:
        self._left_objects -= objects
        if self._left_objects < 0:
            raise _TooLarge(f"more than {_MOST_OBJECTS:,} objects")

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise Malformed("a mark is in the place of a value")
        return value

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise Malformed("a mark is in the place of a value")
        return self._stack[-1]

    def _marked(self) -> list[Any]:
        """Remove the last mark and the values above it from the stack, and return the values."""
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                values = self._stack[at + 1 :]
                del self._stack[at:]
                return values
        raise Malformed("a mark is missing")

    def _tuple(self) -> None:
        self._new(tuple(self._marked()))

    def _tuple_of(self, size: int) -> None:
        self._new(tuple([self._pop() for _ in range(size)][::-1]))

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, Opaque):
            target = target.contents
        if not isinstance(target, list):
            raise Malformed("an item is appended to an object that is not a list")
        target += values

    def _update(self, values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, Opaque):
            target.contents.extend(values)
            return
        if not isinstance(target, dict) or len(values) % 2:
            raise Malformed("an item is set on an object that is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            tensor_refs.put(target, key, value)

    def _global(self) -> None:
        module, name = self._line(), self._line()
        self._name(module, name)

    def _global_on_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise Malformed("the name of a function or class is not a text")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        named = Named(f"{module}.{name}"[:_LONGEST_NAME])
        self.refused = self.refused or ("" if tensor_refs.is_safe(named.name) else named.name)
        self._new(named)

    def _line(self) -> str:
        line = self._file.readline(_LONGEST_NAME)
        self._left_bytes -= len(line)
        if not line.endswith(b"\n"):
            raise Malformed("the name of a function or class is too long or truncated")
        return line[:-1].decode()

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if isinstance(arguments, tuple):  # OrderedDict(list) copies the list
            self._count(sum(len(each) for each in arguments if isinstance(each, list)))
        self._new(tensor_refs.call(function, arguments))

    def _object(self) -> None:
        arguments, kind = self._pop(), self._pop()
        self._new(tensor_refs.create(kind, arguments))

    def _object_with_names(self) -> None:
        names, arguments, kind = self._pop(), self._pop(), self._pop()
        self._new(tensor_refs.create(kind, (arguments, names)))

    def _build(self) -> None:
        """Set the state of the object below it on the stack, such as a state dict's metadata."""
        state, target = self._pop(), self._top()
        if isinstance(target, Opaque):
            target.contents.append(state)
        elif isinstance(target, tensor_refs.StateDict):
            target.state = state
        elif not isinstance(target, dict):
            raise Malformed(f"a state is set on a {tensor_refs.type_name(target)}")

    def _persistent(self) -> None:
        value = tensor_refs.persistent(self._pop())
        if isinstance(value, StorageRef):
            first = self.storages.setdefault(value.key, value)
            if first.nbytes != value.nbytes:
                raise Malformed(
                    f"storage {shown(value.key)} has {first.nbytes:,} bytes for one tensor and"
                    f" {value.nbytes:,} for another"
                )
        self._new(value)


def _unknown(instruction: int) -> Malformed:
    import pickletools  # not at the top: only a refusal needs it

    for known in pickletools.opcodes:
        if known.code == chr(instruction):
            return _Unknown(f"instruction {known.name}, which is not known to weighin")
    return Malformed(f"{instruction:#04x} is no instruction of a pickle")


def _constants(machine: _Machine) -> dict[int, Callable[[], None]]:
    push, integer = machine._push, machine._integer
    return {
        ord("N"): lambda: push(None),
        ord("\x88"): lambda: push(True),
        ord("\x89"): lambda: push(False),
        ord(")"): lambda: push(()),
        ord("J"): lambda: push(integer("<i")),
        ord("K"): lambda: push(integer("<B")),
        ord("M"): lambda: push(integer("<H")),
        ord("G"): lambda: push(struct.unpack(">d", machine._read(8))[0]),
    }
