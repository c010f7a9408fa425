"""Figures that no measurement can have said: a record was edited, or a disk lied."""

from typing import Any, Final

_FREE: Final = {"kwargs", "options", "environment"}  # whatever a user put there
_LARGEST: Final = 2**63  # what a signed 64-bit counter holds: no kernel says more


def impossible(record: dict[str, Any], before: str = "") -> str:
    """Return the first impossible figure of a record, in words; empty where there is none.

    An amount below 0 or above 2**63, a phase that ends before it starts, ready before loaded.
    """
    for key, value in record.items():
        if key in _FREE:
            continue
        place = f"{before}{key}"
        inner = value if isinstance(value, dict) else {}
        if isinstance(value, list | tuple):
            inner = {str(n): one for n, one in enumerate(value) if isinstance(one, dict)}
        if complaint := impossible(inner, f"{place}."):
            return complaint
        is_amount = isinstance(value, int) and key.endswith(("_bytes", "_ns", "_faults"))
        if is_amount and not 0 <= value < _LARGEST:
            return f"{place}: no measurement is {value}"
    if record.get("end_ns", 0) < record.get("start_ns", 0):
        return f"{before}end_ns: earlier than start_ns"
    load_ns, ready_ns = record.get("load_ns"), record.get("ready_ns")
    if load_ns is not None and ready_ns is not None and ready_ns < load_ns:
        return f"{before}ready_ns: less than load_ns"
    return ""
