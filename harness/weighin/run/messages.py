"""The messages of what is measured (``weighin.phase_reporter``), as weighin decodes them.

A wrong message is refused, because any process of a command, and any strategy, could send one.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct, ValidationError, convert

from weighin.files import parse_json
from weighin.result import Memory, Outcome, Phase, Written
from weighin.text import one_line

_LONGEST_TEXT: Final = 1000  # characters; an error's message has its file and line
_LARGEST: Final = 2**63 - 1  # the range of a counter of the kernel, and of a record


class Message(Struct, forbid_unknown_fields=True):
    """A message; the name of its class is its kind, but that of ``AllocatorTrace`` is "trace"."""


class Begin(Message):
    name: str
    t_ns: int
    id: int = 0  # of a program's phase, whose end repeats it; from here on of a program alone
    faults: tuple[int, int] = (0, 0)
    peak_rss_bytes: int = 0
    memory: Memory | None = None


class Rank(Message):
    rank: int  # the number of a process that loads a model with others; its first message


class Baseline(Message):
    t_ns: int
    memory: Memory
    import_ns: int
    environment: dict[str, Any]


class Cuda(Message):
    points: list[tuple[int, int, int]]  # time, allocated bytes, bytes that the driver counts


class Note(Message):
    text: str


class AllocatorTrace(Message):
    requested_bytes: int  # at the start of the trace, as ``reserved_bytes``
    reserved_bytes: int
    events: list[tuple[int, str, int]]  # time, action, bytes; the next part of them


class Loaded(Message):
    load_ns: int  # without the time spent between phases


class Ready(Message):
    t_ns: int
    touch_ns: int
    written: Written | None = None  # of a save


class Failed(Message):
    outcome: Outcome
    message: str
    summary: str = ""  # of the allocator, if GPU memory ran out


class Used(Message):
    gradients: str
    children_private_bytes: tuple[int, ...]


class Done(Message):
    first_use_ns: int | None
    marks_ns: int


class Shared(Message):
    pss_bytes: int | None  # when all ranks are ready


class Ended(Message):
    """How a rank ended, told by the process that started it."""

    rank: int
    code: int | None
    signal: int | None
    stderr_tail: str


class PhaseEnd(Struct):
    """The message "phase", which has the fields of ``Phase`` but those of the cgroup: a phase has ended.

    ``resets`` is False if the process could not reset its mark at the begin.
    """

    phase: Phase
    id: int = 0
    resets: bool = True


_KINDS: Final[dict[str, type[Message]]] = {
    "trace": AllocatorTrace,
    **{kind.__name__.lower(): kind for kind in Message.__subclasses__()},
}


def decode(packet: bytes) -> tuple[str, Message | PhaseEnd | None]:
    """Return the kind and the content of a message; None as the content of a wrong one.

    A message is wrong if its kind is unknown, if a field is missing, unknown or of a wrong type, or
    if a number is negative or too large for a record. Of a phase and of memory, unknown fields are
    ignored. Texts are cut to one printable line.
    """
    kind = ""
    try:
        fields = parse_json(packet)
        kind = fields.pop("event")
        for name in ("name", "text", "message"):
            if isinstance(text := fields.get(name), str):
                fields[name] = one_line(text, _LONGEST_TEXT)
        json.dumps(fields, ensure_ascii=False).encode()  # fails for a lone surrogate
        if not all(0 <= number <= _LARGEST for number in _integers(fields)):
            return kind, None
        if kind == "phase":
            number, resets = fields.pop("id", 0), fields.pop("resets", True)
            return kind, convert({"phase": fields, "id": number, "resets": resets}, PhaseEnd)
        return kind, convert(fields, _KINDS[kind])
    except (ValueError, TypeError, AttributeError, KeyError, ValidationError, RecursionError):
        return kind, None


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _integers(each)
