"""Decode a worker's events, and refuse wrong ones, because a strategy could write events, too.

``weighin.protocol`` says what the events mean.
"""

import json
from typing import Any, Final

from msgspec import Struct, ValidationError, convert

from weighin.protocol import decode_event
from weighin.result import Memory, Outcome, Phase, Written
from weighin.text import one_line

_LONGEST_TEXT: Final = 1000  # characters; an error's message has its file and line


class Event(Struct, forbid_unknown_fields=True):
    """An event of a worker, but for ``Phase``; the name of its class is its kind."""


class Baseline(Event):
    t_ns: int
    memory: Memory
    import_ns: int
    environment: dict[str, Any]


class Begin(Event):
    name: str
    t_ns: int


class Cuda(Event):
    points: list[tuple[int, int, int]]


class Note(Event):
    text: str


class Trace(Event):
    requested_bytes: int
    reserved_bytes: int
    events: list[tuple[int, str, int]]


class Loaded(Event):
    load_ns: int


class Ready(Event):
    t_ns: int
    touch_ns: int
    written: Written | None = None


class Failed(Event):
    outcome: Outcome
    message: str
    summary: str = ""


class Used(Event):
    gradients: str
    children_private_bytes: tuple[int, ...]


class Done(Event):
    first_use_ns: int | None
    marks_ns: int


class Shared(Event):
    pss_bytes: int | None


class Ended(Event):
    code: int | None
    signal: int | None
    stderr_tail: str


_KINDS: Final[dict[str, type[Event | Phase]]] = {
    "phase": Phase,
    **{kind.__name__.lower(): kind for kind in Event.__subclasses__()},
}


def decode(line: bytes, ranks: int = 1) -> tuple[int | None, Event | Phase] | None:
    """Return the rank that an event names, if any, and the event; None for any other line.

    A line is no event if its kind is unknown, if a field is missing, unknown or of a wrong type, or
    if its rank is not in 0 to ``ranks`` - 1. Of a phase and of memory, unknown fields are ignored.
    Names and texts are cut to one printable line.
    """
    fields = decode_event(line)
    if fields is None:
        return None
    kind, rank = _KINDS.get(fields.pop("event")), fields.pop("rank", None)
    if kind is None or not (rank is None or (type(rank) is int and 0 <= rank < ranks)):
        return None
    for name in ("name", "text", "message"):
        if isinstance(text := fields.get(name), str):
            fields[name] = one_line(text, _LONGEST_TEXT)
    try:
        json.dumps(fields, ensure_ascii=False).encode()  # fails for a lone surrogate
        return rank, convert(fields, kind)
    except (ValidationError, UnicodeError):
        return None
