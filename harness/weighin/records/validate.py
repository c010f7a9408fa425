"""Reject records with impossible values, which manual edits or damaged disks cause."""

from reprlib import repr as short_repr
from typing import Any, Final

from weighin.text import printable

_FREE: Final = {"kwargs", "options", "environment"}  # a user may put any value there
_LARGEST: Final = 2**63  # the range of a signed 64-bit counter of the kernel


def clean(value: Any) -> Any:
    """Return a record's JSON value without control characters in names and texts.

    Values that a user may choose freely, such as options, stay as they are: reports escape them.
    """
    if isinstance(value, dict):
        return {key: each if key in _FREE else clean(each) for key, each in value.items()}
    if isinstance(value, list):
        return [clean(each) for each in value]
    if isinstance(value, str):
        return printable(value, kept="\n\t")
    return value


def impossible(record: dict[str, Any], before: str = "") -> str:
    """Describe the first impossible value of a record; return an empty text if there is none.

    An amount below 0 or above 2**63 - 1 is impossible, and so is a phase that ends before it starts,
    or a ready time below the load time. ``before`` is the path to ``record`` in the whole record.
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
