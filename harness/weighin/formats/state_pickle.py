"""Read a pickled state dict that ``torch.save`` wrote, without executing any code.

torch's weights-only unpickler still calls constructors such as ``bytearray(10**12)``, and Python's
own unpickler allocates any length that a crafted pickle requests. ``pickle_machine`` calls no
constructor and allocates no such length. This module adds faster code for the instructions that
make up most of a state dict.
"""

import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final

from weighin.errors import CheckpointError
from weighin.formats import pickled_calls
from weighin.formats.pickle_machine import MARK, Ended, Machine, TooLarge, Unknown
from weighin.formats.tensor_refs import Malformed, Named, NotTensors, StateDict, StorageRef, is_safe
from weighin.formats.unknown_file import AGAIN, RESAVE

_PUT, _LONG_PUT, _GET, _BYTE, _WORD, _NONE, _FALSE = b"qrhKMN\x89"
_TEXT, _OPEN, _TUPLE, _PAIR = b"X(t\x86"
_MEMOIZE, _SHORT_TEXT, _LONG_GET, _DICT, _NOTHING = b"\x94\x8cj})"  # most of them of protocol 4
_LONGEST_SMALL: Final = 5  # bytes of an instruction of run_usual with its operand

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
"""Matches the pickle instructions that torch.save writes for one tensor after its name."""

_IN_TENSOR: Final = 24  # instructions in a match of _TENSOR, without those of shape and stride
_MADE_IN_TENSOR: Final = 8  # objects that the instructions of a match of _TENSOR make


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickled value as records of ``tensor_refs``.

    Attributes:
        storages: every storage to which the pickle refers, by the storage's key.
        names: the full names of all classes and functions to which the pickle refers, in order.
    """

    value: Any
    storages: dict[str, StorageRef]
    names: tuple[str, ...]

    @property
    def refused(self) -> str:
        """The first name that torch.load(weights_only=True) refuses; "" if torch.load refuses none."""
        return next((name for name in self.names if not is_safe(name)), "")


def load(path: Path, file: BinaryIO, base: int = 0, resave: str = RESAVE) -> Pickled:
    """Return the next pickled value of ``file``, with a record of ``tensor_refs`` for every object.

    ``base`` is the offset in bytes of ``file`` within the file ``path``, for messages. ``resave`` is the
    repair (advice) in the error for a damaged pickle.

    Raises:
        CheckpointError: the pickle is damaged, too large, or refers to a storage of an unknown dtype;
            the message names the byte offset.
    """
    machine = _StateMachine(file)
    start = base + file.tell()
    try:
        value = machine.run()
        file.seek(start - base + machine.at)
        return Pickled(value, machine.storages, tuple(machine.names))
    except NotTensors as error:
        raise CheckpointError(
            f"{path}: the pickle holds more than tensors, and weighin did NOT execute it: it"
            f" refers to {error}",
            "if you trust the file, load the file with torch and save plain weights:"
            " torch.save(model.state_dict(), ...)",
        ) from None
    except (TooLarge, Unknown) as error:
        raise CheckpointError(
            f"{path}: the pickle from byte {start:,} cannot be read: {error}",
            "load the file with torch, and save plain weights: torch.save(model.state_dict(), ...)",
        ) from None
    except (Malformed, IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        reason = error if isinstance(error, Malformed) else "an instruction has no operand"
        raise CheckpointError(
            f"{path}: damaged: the pickle from byte {start:,} cannot be read at byte"
            f" {start + machine.at:,}: {reason}",
            AGAIN
            if isinstance(error, Ended) and not base
            else resave,  # with a base, the pickle is a part of a file
        ) from error


class _StateMachine(Machine):
    """An interpreter with faster code for the instructions that make up most of a state dict."""

    _rebuild: object = MARK  # the record of _rebuild_tensor_v2, once the pickle has named it

    def _name(self, module: str, name: str) -> None:
        super()._name(module, name)
        if self._stack[-1] == _REBUILD:
            self._rebuild = self._stack[-1]

    def run_usual(self, left: int) -> int:  # noqa: PLR0912, PLR0915
        """Run the instructions that make up most of a state dict, up to the first other one.

        Run at most ``left`` instructions; return ``left`` minus the number that ran. Each branch
        repeats a method of ``Machine``, because calls of the methods would take twice the time.
        """
        data, stack, memo, at = self._text_read, self._stack, self._memo, self.at
        marks, last = self._marks, len(data) - _LONGEST_SMALL
        try:
            while left and at < last:
                instruction = data[at]
                if instruction == _LONG_PUT and stack[-1] is not MARK:
                    memo[int.from_bytes(data[at + 1 : at + 5], "little")] = stack[-1]
                    at += 5
                elif instruction == _PUT and stack[-1] is not MARK:
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
                    stack.append(MARK)
                elif instruction == _TUPLE and marks:
                    at += 1
                    place = marks.pop()
                    values = tuple(stack[place + 1 :])
                    del stack[place:]
                    self._new(values)
                elif instruction == _PAIR and len(stack) > 1 and MARK not in stack[-2:]:
                    at += 1
                    stack[-2:] = [(stack[-2], stack[-1])]
                    self._count(1)
                elif instruction == _MEMOIZE and stack[-1] is not MARK:
                    at += 1
                    memo[len(memo)] = stack[-1]
                elif instruction == _SHORT_TEXT:
                    end = at + 2 + data[at + 1]
                    if end > len(data):
                        break
                    self._new(data[at + 2 : end].decode("utf-8", "surrogatepass"))
                    at = end
                elif instruction == _LONG_GET:
                    at += 5
                    stack.append(memo[int.from_bytes(data[at - 4 : at], "little")])
                elif instruction == _DICT:
                    at += 1
                    self._new({})
                elif instruction == _NOTHING:
                    at += 1
                    stack.append(())
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
        """Run all instructions of one tensor together; return the offset at which they end, and
        their number.

        ``_tensor`` runs no instruction and returns zeros in three cases: the instructions do not
        match ``_TENSOR``, they are more than ``left``, or the tensor needs all checks of
        ``pickled_calls.call``.
        """
        found = _TENSOR.match(self._text_read, at)
        try:
            return self._usual_tensor(found, left) if found else (0, 0)
        except (KeyError, Malformed, NotTensors):
            return 0, 0  # the single instructions then return the value, or raise the error

    def _usual_tensor(self, found: re.Match[bytes], left: int) -> tuple[int, int]:
        """Run the instructions that match ``_TENSOR``; change nothing before the last check."""
        (_, storage_at, kind_at, length, key, key_put, location_at, numel, id_put, offset, shape,
         shape_put, stride, stride_put, hooks_at, hooks_put, arguments_put, put) = found.groups()  # fmt: skip
        memo = self._memo
        key_text, (elements,), (first,) = key.decode(), _integers(numel), _integers(offset)
        word, kind = memo[storage_at[0]], memo[kind_at[0]]
        identity = (word, kind, key_text, memo[location_at[0]], elements)
        storage = pickled_calls.persistent(identity)
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
        tensor = pickled_calls.usual_tensor(storage, first, sizes, steps)
        if tensor is None:
            return 0, 0
        self.storages.setdefault(key_text, storage)
        self._count(_MADE_IN_TENSOR)
        no_hooks = StateDict()
        places = (key_put, id_put, shape_put, stride_put, hooks_put, arguments_put, put)
        arguments = (storage, first, sizes, steps, False, no_hooks)
        made = (key_text, identity, sizes, steps, no_hooks, arguments, tensor)
        for place, value in zip(places, made, strict=True):
            memo[int.from_bytes(place[1:], "little")] = value
        self._stack.append(tensor)
        return found.end(), count


@lru_cache
def _integers(instructions: bytes) -> tuple[int, ...]:
    """Return the numbers in instructions that match ``_INT``, in order."""
    return tuple(
        int.from_bytes(b"".join(operand), "little")
        for operand in _OPERAND.findall(instructions.removeprefix(b"("))
    )
