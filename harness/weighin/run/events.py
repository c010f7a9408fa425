"""Check the fields of a worker's events, because a strategy could write wrong events."""

from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, create_model
from pydantic_core import to_json

from weighin.result import Memory, Outcome, Phase, Written
from weighin.text import one_line

_STRICT: Final = ConfigDict(strict=True, extra="forbid")
_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "baseline": {"t_ns": int, "memory": Memory, "import_ns": int, "environment": dict[str, Any]},
    "begin": {"name": str, "t_ns": int},
    "cuda": {"points": list[tuple[int, int, int]]},
    "note": {"text": str},
    "trace": {
        "requested_bytes": int,
        "reserved_bytes": int,
        "events": list[tuple[int, str, int]],
    },
    "loaded": {"load_ns": int},
    "ready": {"t_ns": int, "touch_ns": int, "written": (Written, None)},
    "failed": {"outcome": Outcome, "message": str, "summary": (str, "")},
    "used": {"gradients": str, "children_private_bytes": list[int]},
    "done": {"first_use_ns": int | None, "marks_ns": int},
    "shared": {"pss_bytes": int | None},
    "ended": {"code": int | None, "signal": int | None, "stderr_tail": str},
}
_LONGEST_TEXT: Final = 1000  # characters; an error's message has its file and line
_MODEL: Final[Any] = create_model  # as Any: its types refuse **fields
_SHAPES: Final[dict[str, TypeAdapter[Any]]] = {"phase": TypeAdapter(Phase)} | {
    kind: TypeAdapter(
        _MODEL(
            kind,
            __config__=_STRICT,
            **{n: each if isinstance(each, tuple) else (each, ...) for n, each in fields.items()},
        )
    )
    for kind, fields in _FIELDS.items()
}


def checked(event: dict[str, Any], ranks: int = 1) -> dict[str, Any] | None:
    """Return an event with its texts cut to one printable line; None if the event is invalid.

    An event is invalid if its kind is unknown, if a field is missing, unknown or of a wrong type,
    or if its rank is not in 0 to ``ranks`` - 1. ``weighin.protocol`` lists the kinds and their
    fields.
    """
    fields = {name: value for name, value in event.items() if name not in ("event", "rank")}
    kind, rank = event["event"], event.get("rank", 0)
    if kind not in _SHAPES or type(rank) is not int or not 0 <= rank < ranks:
        return None
    try:
        shape = _SHAPES[kind]
        known = shape.dump_python(shape.validate_json(to_json(fields)), mode="json")
    except ValueError:
        return None
    if not _covers(known, fields):
        return None
    texts = {
        name: one_line(fields[name], _LONGEST_TEXT)
        for name in ("name", "text", "message")
        if name in fields
    }
    return event | texts


def _covers(known: dict[str, Any], given: dict[str, Any]) -> bool:
    """Tell whether ``known`` has every key of ``given``, also in nested dicts."""
    return all(
        key in known
        and (
            not (isinstance(value, dict) and isinstance(known[key], dict))
            or _covers(known[key], value)
        )
        for key, value in given.items()
    )
