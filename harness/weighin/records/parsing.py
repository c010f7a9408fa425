"""Parse a record or a plan from JSON, and reject impossible values.

Manual edits and damaged disks cause values of a wrong type or range. Only the parent imports this
module: a worker must not need msgspec, which is compiled.
"""

import re
from reprlib import repr as short_repr
from typing import Any, Final, TypeVar

import msgspec

from weighin.errors import DamagedRecord, RecordError
from weighin.foreign import parse_json
from weighin.result import SCHEMA
from weighin.text import one_line, printable

_FREE: Final = {"kwargs", "options", "environment"}  # a user may put any value there
_CELLS: Final = {"cell", "cells", "model"}
_LARGEST: Final = 2**63  # the range of a signed 64-bit counter of the kernel

_VALUE_LENGTH: Final = 60  # characters of a damaged value in an error

_T = TypeVar("_T")


def parse(kind: type[_T], text: bytes, place: str, repair: str = "") -> _T:
    """Parse a text of JSON as the dataclass ``kind``; ``place`` names the text in errors.

    Raises:
        RecordError: a newer version of weighin wrote the text.
        DamagedRecord: the text is not a valid ``kind``, or has an ``impossible`` value.
    """
    try:
        shown = text.decode()  # json itself would accept UTF-16 and lone surrogates
        value = parse_json(shown)
    except ValueError as error:  # a UnicodeDecodeError too
        raise DamagedRecord(f"{place}: not JSON: {one_line(str(error))}", repair) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        from weighin import install

        raise RecordError(
            f"{place}: written by a newer weighin (schema {short_repr(schema)}; this version reads up to {SCHEMA})",
            install.upgrade(),
        )
    # Most lines have no control character, neither raw nor escaped, and need not be walked through.
    is_clean = "\\" not in shown and shown.strip().isprintable()
    try:
        parsed = msgspec.convert(value if is_clean else clean(value), kind)
    except (msgspec.ValidationError, UnicodeError) as error:  # or a lone surrogate
        raise DamagedRecord(f"{place}: {_complaint(str(error), kind, value)}", repair) from None
    if complaint := impossible(value):
        raise DamagedRecord(f"{place}: {complaint}", repair)
    return parsed


def _complaint(text: str, kind: Any, record: Any) -> str:
    """Return an error of msgspec with the place first: "peaks.rss_bytes: expected `int`, got `str` '1'"."""
    text, _, path = text.partition(" - at `$")
    keys = [int(index) if index else key for index, key in re.findall(r"\[(\d+)\]|(\w+)", path)]
    where = ".".join(map(str, keys))
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        return f"{f'{where}.{missing[1]}'.strip('.')}: missing"
    is_unknown = text.startswith("Invalid enum value")
    if not (is_unknown or text.startswith("Expected")) or "..." in path or "` in `" in text:
        # The place is not known: msgspec writes "..." for a key of a mapping.
        return one_line(f"{where or 'the record'}: {text[:1].lower()}{text[1:]}")
    expected: list[Any] = [msgspec.inspect.type_info(kind)]
    for key in keys:
        record = record[key]
        expected = [inner for each in expected for inner in _types_at(each, key)]
    shown = one_line(short_repr(record), _VALUE_LENGTH)
    if is_unknown:
        values = [str(one) for each in expected for one in getattr(each, "values", ()) or each.cls]
        return f"{where}: unknown value {shown}; known values: {', '.join(values)}"
    return one_line(f"{where or 'the record'}: {text[:1].lower()}{text[1:]} {shown}")


def _types_at(outer: Any, key: int | str) -> list[Any]:
    """Return the types that msgspec expects at a key of a dataclass, or at an index of a tuple."""
    types = getattr(outer, "types", [outer])  # of a union
    fields = [field for each in types for field in getattr(each, "fields", ())]
    found = [field.type for field in fields if field.name == key]
    return found or [each.item_type for each in types if hasattr(each, "item_type")]


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
