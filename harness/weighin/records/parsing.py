"""Parse a record or a plan from JSON, and reject impossible values.

Manual edits and damaged disks cause values of a wrong type or range. ``parse`` imports pydantic
inside the function, because the import takes 0.07 s, and a command without phases does not need it.
"""

from functools import cache
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any, Final, TypeVar

from weighin.errors import DamagedRecord, RecordError
from weighin.foreign import parse_json
from weighin.result import SCHEMA
from weighin.text import one_line, printable

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

_FREE: Final = {"kwargs", "options", "environment"}  # a user may put any value there
_CELLS: Final = {"cell", "cells", "model"}
_LARGEST: Final = 2**63  # the range of a signed 64-bit counter of the kernel

_T = TypeVar("_T")


def parse(kind: type[_T], text: bytes, place: str, repair: str = "") -> _T:
    """Parse a text of JSON as the dataclass ``kind``; ``place`` names the text in errors.

    Raises:
        RecordError: a newer version of weighin wrote the text.
        DamagedRecord: the text is not a valid ``kind``, or has an ``impossible`` value.
    """
    from pydantic import ValidationError
    from pydantic_core import to_json

    from weighin import install

    try:
        value = parse_json(text)
    except ValueError as error:
        raise DamagedRecord(f"{place}: not JSON: {one_line(str(error))}", repair) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise RecordError(
            f"{place}: written by a newer weighin (schema {short_repr(schema)}; this version reads up to {SCHEMA})",
            install.upgrade(),
        )
    try:
        parsed: _T = _adapter(kind).validate_json(  # type: ignore[arg-type]
            text if _is_clean(text) else to_json(clean(value)), strict=True
        )
    except ValidationError as error:
        raise DamagedRecord(f"{place}: {_first_complaint(error)}", repair) from None
    if complaint := impossible(value):
        raise DamagedRecord(f"{place}: {complaint}", repair)
    return parsed


@cache  # building an adapter takes time
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _is_clean(text: bytes) -> bool:
    """Return whether a line of JSON certainly has no control character, neither raw nor escaped."""
    return b"\\" not in text and text.decode().strip().isprintable()


def _first_complaint(error: "ValidationError") -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the record"
    if first["type"] == "missing":
        return f"{where}: missing"
    return f"{where}: {first['msg'].lower()}, got {one_line(short_repr(first['input']), 60)}"


def clean(value: Any, *, is_cell: bool = False) -> Any:
    """Return a record's JSON value, with "?" for each unprintable character in its texts.

    Newlines and tabs stay. What a user may choose freely in a cell, such as options, also stays as
    it is, because the cell's name follows from it; the words of a cell replace such characters.
    """
    if isinstance(value, dict):
        return {
            key: each if is_cell and key in _FREE else clean(each, is_cell=key in _CELLS)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [clean(each, is_cell=is_cell) for each in value]
    if isinstance(value, str):
        return printable(value, kept="\n\t")
    return value


def impossible(record: dict[str, Any], before: str = "") -> str:
    """Describe the first impossible value of a record; return an empty text if there is none.

    An amount in bytes, ns or faults is impossible below 0 or above 2**63 - 1. A phase that ends
    before its start is impossible, and so is ``ready_ns`` below ``load_ns``. ``before`` is the path
    from the whole record to ``record``, which may be a part of it.
    """
    for key, value in record.items():
        if key in _FREE:
            continue
        inner = value if isinstance(value, dict) else {}
        if isinstance(value, list):
            inner = {str(n): item for n, item in enumerate(value) if isinstance(item, dict)}
        if inner and (complaint := impossible(inner, f"{before}{key}.")):
            return complaint
        is_amount = isinstance(value, int) and key.endswith(("_bytes", "_ns", "_faults"))
        if is_amount and not 0 <= value < _LARGEST:
            return f"{before}{key}: impossible value {short_repr(value)}"
    if _is_less(record.get("end_ns"), record.get("start_ns")):
        return f"{before}end_ns: earlier than start_ns"
    if _is_less(record.get("ready_ns"), record.get("load_ns")):
        return f"{before}ready_ns: less than load_ns"
    return ""


def _is_less(one: Any, other: Any) -> bool:
    return isinstance(one, int) and isinstance(other, int) and one < other
