"""Interpret the instructions of a pickle, of protocols 2 to 5, without executing any code.

The interpreter imports and calls nothing, reads at most ``MOST_BYTES``, and limits the number of
objects. ``pickled_calls`` makes the records that stand for the pickled objects.
"""

import struct
from collections.abc import Callable
from typing import Any, BinaryIO, Final

from weighin.formats import pickled_calls
from weighin.formats.tensor_refs import Malformed, Named, Opaque, StateDict, StorageRef, type_name
from weighin.formats.unknown_file import shown

MOST_BYTES: Final = 32 * 1024**2
"""The largest pickle that is read, in bytes: 200 times the size of GPT-2 XL's pickle."""

_MOST_PUSHED: Final = 3_000_000  # values on the stack, of some 40 bytes each
_MOST_OBJECTS: Final = 1_000_000  # lists, dicts, tuples and strings, of some 100 bytes each
_LONGEST_NAME: Final = 1000
_CHUNK_BYTES: Final = 64 * 1024
MARK: Final = object()
"""The value that MARK pushes; the values after the mark become a list, tuple or dict."""
_STOP: Final = ord(".")


class Ended(Malformed):
    """The checkpoint's file ends before the last instruction of its pickle."""


class TooLarge(Malformed):
    """The pickle has more bytes, instructions or objects than this interpreter reads."""


class Unknown(Malformed):
    """The pickle has an instruction that this interpreter does not know."""


class Machine:
    """The state of the interpreter: a stack of values, marks on the stack, and a memo.

    Attributes:
        at: the number of bytes of the pickle that the interpreter has used so far.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._text_read = b""
        self.at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []  # the indexes of the marks on the stack
        self._memo: dict[int, Any] = {}
        self._left_objects = _MOST_OBJECTS
        self.storages: dict[str, StorageRef] = {}
        self.names: dict[str, None] = {}  # a set that keeps the order
        self._do: dict[int, Callable[[], object]] = {
            **_constants(self),
            ord("c"): self._global, ord("R"): self._reduce, ord("b"): self._build,
            ord("\x93"): self._global_on_stack, ord("Q"): self._persistent,
            ord("\x81"): self._object, ord("\x92"): self._object_with_names,
            ord("\x80"): lambda: self._integer(1),
            ord("("): self._mark, ord("t"): self._tuple,
            ord("\x85"): lambda: self._tuple_of(1), ord("\x86"): lambda: self._tuple_of(2),
            ord("\x87"): lambda: self._tuple_of(3),
            ord("]"): lambda: self._new([]), ord("}"): lambda: self._new({}),
            ord("\x8f"): lambda: self._new([]),  # an empty set, which is read as a list
            ord("\x91"): lambda: self._new(self._marked()),
            ord("a"): lambda: self._extend([self._pop()]), ord("e"): lambda: self._extend(self._marked()),
            ord("\x90"): lambda: self._extend(self._marked()),
            ord("s"): lambda: self._update([self._pop(), self._pop()][::-1]),
            ord("u"): lambda: self._update(self._marked()),
            ord("X"): lambda: self._text(4), ord("\x8c"): lambda: self._text(1),
            ord("\x8d"): lambda: self._text(8),
            ord("U"): lambda: self._new(self._read(self._integer(1)).decode("latin-1")),
            ord("T"): lambda: self._new(self._read(self._integer(4)).decode("latin-1")),
            ord("C"): lambda: self._new(self._read(self._integer(1))),
            ord("B"): lambda: self._new(self._read(self._integer(4))),
            ord("\x8e"): lambda: self._new(self._read(self._integer(8))),
            ord("\x96"): lambda: self._new(self._read(self._integer(8))),
            ord("\x8a"): lambda: self._long(1), ord("\x8b"): lambda: self._long(4),
            ord("h"): lambda: self._push(self._memo[self._integer(1)]),
            ord("j"): lambda: self._push(self._memo[self._integer(4)]),
            ord("q"): lambda: self._memo.__setitem__(self._integer(1), self._top()),
            ord("r"): lambda: self._memo.__setitem__(self._integer(4), self._top()),
            ord("\x94"): lambda: self._memo.__setitem__(len(self._memo), self._top()),
            ord("\x95"): lambda: self._integer(8),  # the length of the frame that follows
            ord("0"): self._drop, ord("1"): self._marked,
            ord("2"): lambda: self._push(self._top()),
        }  # fmt: skip

    def run(self) -> Any:
        left = _MOST_PUSHED
        while left:
            left = self.run_usual(left)
            if not left:
                break
            left -= 1
            if self.at < len(self._text_read):
                instruction = self._text_read[self.at]
                self.at += 1
            else:
                instruction = self._read(1)[0]
            if instruction == _STOP:
                return self._pop()
            action = self._do.get(instruction)
            if action is None:
                raise _unknown(instruction)
            action()
        raise TooLarge(f"more than {_MOST_PUSHED:,} instructions")

    def run_usual(self, left: int) -> int:
        """Run what a subclass runs faster (here nothing); return what remains of ``left`` steps."""
        return left

    def _read(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self._text_read):
            self._read_on(end)
        data = self._text_read[self.at : end]
        self.at += len(data)
        if len(data) != size:
            raise Ended("truncated: the file ends inside the pickle")
        return data

    def _read_on(self, end: int) -> None:
        """Read more of the file: at least up to the byte ``end``, or up to the file's end."""
        if end > MOST_BYTES:
            raise TooLarge(f"longer than {MOST_BYTES:,} bytes")
        have = len(self._text_read)
        wanted = min(max(end, 2 * have, _CHUNK_BYTES), MOST_BYTES) - have
        self._text_read += self._file.read(wanted) or b""

    def _integer(self, size: int) -> int:
        return int.from_bytes(self._read(size), "little")

    def _text(self, size: int) -> None:
        self._new(self._read(self._integer(size)).decode("utf-8", "surrogatepass"))

    def _long(self, size: int) -> None:
        self._new(int.from_bytes(self._read(self._integer(size)), "little", signed=True))

    def _mark(self) -> None:
        self._marks.append(len(self._stack))
        self._stack.append(MARK)

    def _drop(self) -> None:
        if self._stack.pop() is MARK:
            self._marks.pop()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _new(self, value: Any) -> None:
        self._count(1)
        self._stack.append(value)

    def _count(self, objects: int) -> None:
        self._left_objects -= objects
        if self._left_objects < 0:
            raise TooLarge(f"more than {_MOST_OBJECTS:,} objects")

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is MARK:
            raise _mark_as_value()
        return value

    def _top(self) -> Any:
        if self._stack[-1] is MARK:
            raise _mark_as_value()
        return self._stack[-1]

    def _marked(self) -> list[Any]:
        """Remove the last mark and the values above it from the stack, and return the values."""
        if not self._marks:
            raise Malformed("a mark is missing")
        at = self._marks.pop()
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _tuple(self) -> None:
        self._new(tuple(self._marked()))

    def _tuple_of(self, size: int) -> None:
        values = tuple(self._stack[-size:])
        if len(values) != size:
            raise IndexError
        if MARK in values:
            raise _mark_as_value()
        del self._stack[-size:]
        self._new(values)

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
            pickled_calls.put(target, key, value)

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
        self.names[named.name] = None
        self._new(named)

    def _line(self) -> str:
        start, most = self.at, min(self.at + _LONGEST_NAME, MOST_BYTES)
        if most > len(self._text_read):
            self._read_on(most)
        end = self._text_read.find(b"\n", start, most)
        self.at = end + 1 if end >= 0 else min(most, len(self._text_read))
        if end < 0:
            raise Malformed("the name of a function or class is too long or truncated")
        return self._text_read[start:end].decode()

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if isinstance(arguments, tuple):  # the record of OrderedDict(list) is a copy of the list
            for each in arguments:
                if isinstance(each, list):
                    self._count(len(each))
        self._new(pickled_calls.call(function, arguments))

    def _object(self) -> None:
        arguments, kind = self._pop(), self._pop()
        self._new(pickled_calls.create(kind, arguments))

    def _object_with_names(self) -> None:
        names, arguments, kind = self._pop(), self._pop(), self._pop()
        self._new(pickled_calls.create(kind, (arguments, names)))

    def _build(self) -> None:
        """Set the state of an object, such as the metadata of a state dict, as the BUILD instruction does."""
        state, target = self._pop(), self._top()
        if isinstance(target, Opaque):
            target.contents.append(state)
        elif isinstance(target, StateDict):
            target.state = state
        elif not isinstance(target, dict):
            raise Malformed(f"a state is set on a {type_name(target)}")

    def _persistent(self) -> None:
        value = pickled_calls.persistent(self._pop())
        if isinstance(value, StorageRef):
            first = self.storages.setdefault(value.key, value)
            if first.nbytes != value.nbytes:
                raise Malformed(
                    f"storage {shown(value.key)} has {first.nbytes:,} bytes for one tensor and"
                    f" {value.nbytes:,} for another"
                )
        self._new(value)


def _mark_as_value() -> Malformed:
    return Malformed("a mark is in the place of a value")


def _unknown(instruction: int) -> Malformed:
    import pickletools  # not at the top: only a refusal needs it

    for known in pickletools.opcodes:
        if known.code == chr(instruction):
            return Unknown(f"weighin does not know the instruction {known.name}")
    return Malformed(f"{instruction:#04x} is no instruction of a pickle")


def _constants(machine: Machine) -> dict[int, Callable[[], None]]:
    push, integer = machine._push, machine._integer
    return {
        ord("N"): lambda: push(None),
        ord("\x88"): lambda: push(True),
        ord("\x89"): lambda: push(False),
        ord(")"): lambda: push(()),
        ord("J"): lambda: push(int.from_bytes(machine._read(4), "little", signed=True)),
        ord("K"): lambda: push(integer(1)),
        ord("M"): lambda: push(integer(2)),
        ord("G"): lambda: push(struct.unpack(">d", machine._read(8))[0]),
    }
