"""Parse a record or a plan from JSON with pydantic, and explain errors.

This module is apart from ``run_folder``, because importing pydantic takes 0.07 s, and a run of one
command reads no records.
"""

from functools import cache
from reprlib import repr as short_repr
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from weighin import install
from weighin.errors import DamagedRecord, SchemaTooNew
from weighin.foreign import parse_json
from weighin.records.validate import clean, impossible
from weighin.result import SCHEMA
from weighin.text import one_line

_T = TypeVar("_T")


def parse(kind: type[_T], text: bytes, place: str, repair: str = "") -> _T:
    """Parse a text of JSON as the dataclass ``kind``; ``place`` names the text in errors.

    Raises:
        SchemaTooNew: a newer version of weighin wrote the text.
        DamagedRecord: the text is not a valid ``kind``, or has an impossible figure.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise DamagedRecord(f"{place}: not JSON: {one_line(str(error))}", repair) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise SchemaTooNew(
            f"{place}: written by a newer weighin (schema {short_repr(schema)}; this version reads up to {SCHEMA})",
            install.upgrade(),
        )
    try:
        parsed: _T = _adapter(kind).validate_json(
            text if _is_clean(text) else to_json(clean(value)), strict=True
        )
    except ValidationError as error:
        raise DamagedRecord(f"{place}: {_first_complaint(error)}", repair) from None
    if complaint := impossible(value):
        raise DamagedRecord(f"{place}: {complaint}", repair)
    return parsed


@cache  # building an adapter takes time
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _is_clean(text: bytes) -> bool:
    """Return whether a line of JSON certainly has no control character, neither raw nor escaped."""
    return b"\\" not in text and text.decode().strip().isprintable()


def _first_complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the record"
    if first["type"] == "missing":
        return f"{where}: missing"
    return f"{where}: {first['msg'].lower()}, got {one_line(short_repr(first['input']), 60)}"
