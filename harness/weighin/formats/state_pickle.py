"""Read a pickled state dict that ``torch.save`` wrote, without executing any code.

This module interprets the instructions of pickle protocols 2 to 5. torch's weights-only unpickler
still calls constructors such as ``bytearray(10**12)``, and Python's own unpickler allocates any length
that a crafted pickle requests. The interpreter here imports and calls nothing, compares every length
with the file's length, and limits the number of objects. An object of a class that tensors do not need
becomes an ``Opaque``, so that the weights beside it can be read.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
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
_CHUNK_BYTES: Final = 64 * 1024
_MARK: Final = object()
_STOP, _PUT, _LONG_PUT, _GET, _BYTE, _WORD, _NONE, _FALSE = b".qrhKMN\x89"
_TEXT, _OPEN, _TUPLE, _PAIR = b"X(t\x86"
_LONGEST_SMALL: Final = 5  # an instruction of _run_small with its operand, in bytes


_REBUILD: Final = Named("torch._utils._rebuild_tensor_v2")
_HOOKS: Final = Named("collections.OrderedDict")
_PUTS: Final = rb"(q.|r.{4})"
_INT: Final = rb"(?:K.|M..|J...[\x00-\x7f])"
_OPERAND: Final = re.compile(rb"K(.)|M(..)|J(.{4})", re.DOTALL)
_SIZES: Final = (
    rb"(" + _INT + rb"\x85|" + _INT + rb"{2}\x86|" + _INT + rb"{3}\x87|\(" + _INT + rb"{4,8}t)"
)
_TENSOR: Final = re.compile(
    rb"h(.)\(\(h(.)h(.)X(.)\0\0\0(\d{1,9})" + _PUTS + rb"h(.)(" + _INT + rb")t" + _PUTS
    + rb"Q(" + _INT + rb")" + _SIZES + _PUTS + _SIZES + _PUTS
    + rb"\x89h(.)\)R" + _PUTS + rb"t" + _PUTS + rb"R" + _PUTS,
    re.DOTALL,
)  # fmt: skip
"""The instructions for a tensor as torch.save writes them, after the tensor's name."""

_IN_TENSOR: Final = 24  # instructions in a match of _TENSOR, without shape and stride
_MADE_IN_TENSOR: Final = 8  # objects that these make


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
        names: the full names of all classes and functions to which the pickle refers, in order.
    """

    value: Any
    storages: dict[str, StorageRef]
    names: tuple[str, ...]

    @property
    def refused(self) -> str:
        """The first name that torch.load(weights_only=True) refuses; empty if it refuses none."""
        return next((name for name in self.names if not tensor_refs.is_safe(name)), "")


def load(path: Path, file: BinaryIO, base: int = 0, resave: str = RESAVE) -> Pickled:
    """Return the next pickled value of ``file``, with every object as a plain record.

    ``base`` is the offset of ``file`` within the file at ``path``, for messages. ``resave`` is the
    repair for a damaged pickle.

    Raises:
        CheckpointError: the pickle is damaged, too large, or refers to a storage of an unknown dtype;
            the message names the byte offset.
    """
    machine = _Machine(file)
    start = base + file.tell()
    try:
        value = machine.run()
        file.seek(start - base + machine.at)
        return Pickled(value, machine.storages, tuple(machine.names))
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
        raise CheckpointError(
            f"{path}: damaged: the pickle from byte {start:,} cannot be read at byte"
            f" {start + machine.at:,}: {reason}",
            AGAIN if isinstance(error, _Ended) and not base else resave,  # base: a part of the file
        ) from error


class _Machine:
    """The state of the interpreter: a stack of values, marks on the stack, and a memo.

    Attributes:
        at: the number of bytes of the pickle that were interpreted.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._text_read = b""
        self.at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []  # their places on the stack
        self._memo: dict[int, Any] = {}
        self._left_objects = _MOST_OBJECTS
        self._rebuild: object = _MARK  # the function's name once it is read: no value before
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
            ord("\x8f"): lambda: self._new([]),  # a set, whose elements are not needed as a set
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
            left = self._run_small(left)
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
        raise _TooLarge(f"more than {_MOST_PUSHED:,} instructions")

    def _run_small(self, left: int) -> int:  # noqa: PLR0912, PLR0915
        """Run the instructions that make up most of a state dict, up to the next other instruction.

        Return the number of instructions that may still run. Each instruction does the same as its
        method; calls of the methods would take twice the time.
        """
        data, stack, memo, at = self._text_read, self._stack, self._memo, self.at
        marks, last = self._marks, len(data) - _LONGEST_SMALL
        try:
            while left and at < last:
                instruction = data[at]
                if instruction == _LONG_PUT and stack[-1] is not _MARK:
                    memo[int.from_bytes(data[at + 1 : at + 5], "little")] = stack[-1]
                    at += 5
                elif instruction == _PUT and stack[-1] is not _MARK:
                    memo[data[at + 1]] = stack[-1]
                    at += 2
                elif instruction == _GET and memo[data[at + 1]] is self._rebuild:
                    end, count = self._tensor(at, left)
                    if end:
                        at = end
                        left -= count
                        continue
                    at += 2
                    stack.append(self._rebuild)
                elif instruction == _GET:
                    at += 2
                    stack.append(memo[data[at - 1]])
                elif instruction == _BYTE:
                    at += 2
                    stack.append(data[at - 1])
                elif instruction == _WORD:
                    at += 3
                    stack.append(data[at - 2] | data[at - 1] << 8)
                elif instruction == _TEXT:
                    start = at + 5
                    end = start + int.from_bytes(data[at + 1 : start], "little")
                    if end > len(data):
                        break
                    at = end
                    self._new(data[start:end].decode("utf-8", "surrogatepass"))
                elif instruction == _OPEN:
                    at += 1
                    marks.append(len(stack))
                    stack.append(_MARK)
                elif instruction == _TUPLE and marks:
                    at += 1
                    place = marks.pop()
                    values = tuple(stack[place + 1 :])
                    del stack[place:]
                    self._new(values)
                elif instruction == _PAIR and len(stack) > 1 and _MARK not in stack[-2:]:
                    at += 1
                    stack[-2:] = [(stack[-2], stack[-1])]
                    self._count(1)
                elif instruction == _NONE:
                    at += 1
                    stack.append(None)
                elif instruction == _FALSE:
                    at += 1
                    stack.append(False)
                else:
                    break
                left -= 1
        finally:
            self.at = at
        return left

    def _tensor(self, at: int, left: int) -> tuple[int, int]:
        """Do at once what the instructions of a usual tensor do; return their end and their number.

        Both are 0, and nothing is done, if the instructions are others, more than ``left``, or
        describe anything unusual.
        """
        found = _TENSOR.match(self._text_read, at)
        try:
            return self._usual_tensor(found, left) if found else (0, 0)
        except (KeyError, Malformed, NotTensors):
            return 0, 0  # the instructions, one by one, give the value or the error

    def _usual_tensor(self, found: re.Match[bytes], left: int) -> tuple[int, int]:
        """Run the instructions of a match of ``_TENSOR``; change nothing before the last check."""
        (_, storage_at, kind_at, length, key, key_put, location_at, numel, id_put, offset, shape,
         shape_put, stride, stride_put, hooks_at, hooks_put, arguments_put, put) = found.groups()  # fmt: skip
        memo = self._memo
        key_text, (elements,), (first,) = key.decode(), _integers(numel), _integers(offset)
        word, kind = memo[storage_at[0]], memo[kind_at[0]]
        identity = (word, kind, key_text, memo[location_at[0]], elements)
        storage = tensor_refs.persistent(identity)
        sizes, steps = _integers(shape), _integers(stride)
        count = _IN_TENSOR + 2 * (len(sizes) + 1 + (len(sizes) > 3))
        if (
            not isinstance(storage, StorageRef)
            or memo[hooks_at[0]] != _HOOKS
            or length[0] != len(key)
            or self._left_objects < _MADE_IN_TENSOR
            or self.storages.get(key_text, storage).nbytes != storage.nbytes
            or count > left
        ):
            return 0, 0
        tensor = tensor_refs.usual_tensor(storage, first, sizes, steps)
        if tensor is None:
            return 0, 0
        self.storages.setdefault(key_text, storage)
        self._count(_MADE_IN_TENSOR)
        no_hooks = tensor_refs.StateDict()
        places = (key_put, id_put, shape_put, stride_put, hooks_put, arguments_put, put)
        arguments = (storage, first, sizes, steps, False, no_hooks)
        made = (key_text, identity, sizes, steps, no_hooks, arguments, tensor)
        for place, value in zip(places, made, strict=True):
            memo[int.from_bytes(place[1:], "little")] = value
        self._stack.append(tensor)
        return found.end(), count

    def _read(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self._text_read):
            self._read_on(end)
        data = self._text_read[self.at : end]
        self.at += len(data)
        if len(data) != size:
            raise _Ended("truncated: the file ends")
        return data

    def _read_on(self, end: int) -> None:
        """Read more of the file, up to ``end`` at least if the file is as long."""
        if end > MOST_BYTES:
            raise _TooLarge(f"longer than {MOST_BYTES:,} bytes")
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
        self._stack.append(_MARK)

    def _drop(self) -> None:
        if self._stack.pop() is _MARK:
            self._marks.pop()

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
            raise _mark_as_value()
        return value

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
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
        if _MARK in values:
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
        self.names[named.name] = None
        if named == _REBUILD:
            self._rebuild = named
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
        if isinstance(arguments, tuple):  # OrderedDict(list) copies the list
            for each in arguments:
                if isinstance(each, list):
                    self._count(len(each))
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


@lru_cache
def _integers(instructions: bytes) -> tuple[int, ...]:
    """Return the numbers that instructions of ``_INT`` push, in order."""
    return tuple(
        int.from_bytes(b"".join(operand), "little")
        for operand in _OPERAND.findall(instructions.removeprefix(b"("))
    )


def _mark_as_value() -> Malformed:
    return Malformed("a mark is in the place of a value")


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
        ord("J"): lambda: push(int.from_bytes(machine._read(4), "little", signed=True)),
        ord("K"): lambda: push(integer(1)),
        ord("M"): lambda: push(integer(2)),
        ord("G"): lambda: push(struct.unpack(">d", machine._read(8))[0]),
    }
