"""Reject records with impossible values, which come from manual edits or a damaged disk."""

from typing import Any, Final

_FREE: Final = {"kwargs", "options", "environment"}  # a user may put any value there
_LARGEST: Final = 2**63  # the range of a signed 64-bit counter of the kernel


def impossible(record: dict[str, Any], before: str = "") -> str:
    """Return a description of the first impossible value of a record; empty if there is none.

    A value is impossible if an amount is outside of 0 to 2**63 - 1, if a phase ends before it
    starts, or if the ready time is less than the load time. ``before`` is the path of ``record``
    inside the whole record.
    """
    for key, value in record.items():
        if key in _FREE:
            continue
        place = f"{before}{key}"
        inner = value if isinstance(value, dict) else {}
        if isinstance(value, list | tuple):
            inner = {str(n): item for n, item in enumerate(value) if isinstance(item, dict)}
        if complaint := impossible(inner, f"{place}."):
            return complaint
        is_amount = isinstance(value, int) and key.endswith(("_bytes", "_ns", "_faults"))
        if is_amount and not 0 <= value < _LARGEST:
            return f"{place}: impossible value {value}"
    if record.get("end_ns", 0) < record.get("start_ns", 0):
        return f"{before}end_ns: earlier than start_ns"
    load_ns, ready_ns = record.get("load_ns"), record.get("ready_ns")
    if load_ns is not None and ready_ns is not None and ready_ns < load_ns:
        return f"{before}ready_ns: less than load_ns"
    return ""
