"""The shape of a worker's events, which a strategy could write too."""

import json
from typing import Any

import msgspec
import pytest
from fakes import ENVIRONMENT, memory

from weighin.run.listener import decode

PHASE = {
    "name": "read", "start_ns": 1, "end_ns": 2, "peak_rss_bytes": 3, "end": memory(3),
    "minor_faults": 1, "major_faults": 0,
}  # fmt: skip
READING = {
    "id": 1, "t_ns": 1, "faults": [1, 0], "peak_rss_bytes": 3, "memory": memory(3),
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"event": "begin", "name": "read", "resets": True, **READING},
    {"event": "end", **READING},
    {"event": "phase", **PHASE},
    {"event": "ended", "rank": 0, "code": None, "signal": 9, "stderr_tail": ""},
]
TOLD: list[dict[str, Any]] = [
    {"event": "told", "rank": 1},
    {"event": "told", "phase": "read"},
    {
        "event": "baseline",
        "baseline_ns": 1,
        "baseline": memory(3),
        "import_ns": 2,
        "environment": ENVIRONMENT,
    },
    {"event": "told", "points": [[1, 2, 3]]},
    {"event": "told", "notes": ["slow"]},
    {"event": "told", "load_ns": 1},
    {"event": "ready", "ready_at_ns": 1, "touch_ns": 2,
     "written": {"file_bytes": 1, "disk_bytes": 2, "files": 3}},
    {"event": "told", "outcome": "cuda_oom", "message": "no", "summary": "much"},
    {"event": "told", "gradients": "backward", "children_private_bytes": [1]},
    {"event": "shared", "pss_bytes": None},
    {"event": "done", "first_use_ns": None, "marks_ns": 0},
]  # fmt: skip


def fields_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of the decoded event; None if it is refused."""
    if not (message := decode(json.dumps(event).encode())[1]):
        return None
    fields: dict[str, Any] = json.loads(msgspec.json.encode(message))
    return fields


@pytest.mark.parametrize("event", [*EVENTS, *TOLD], ids=lambda event: event["event"])
def test_an_event_with_the_fields_of_its_kind(event: dict[str, Any]) -> None:
    kind, message = decode(json.dumps(event).encode())
    assert message
    assert kind == event["event"]
    given = {name: value for name, value in event.items() if name != "event"}
    assert (fields_of(event) or {}).items() >= given.items()


@pytest.mark.parametrize(
    ("event", "name"),
    [(event, name) for event in EVENTS for name in event if name != "event"],
    ids=lambda one: one if isinstance(one, str) else one["event"],
)
def test_an_event_without_a_field_of_its_kind_is_refused(event: dict[str, Any], name: str) -> None:
    assert fields_of({key: value for key, value in event.items() if key != name}) is None
    assert fields_of(event | {name: 1.5}) is None


@pytest.mark.parametrize(
    "event",
    [one for one in [*EVENTS, *TOLD] if one["event"] != "phase"],
    ids=lambda event: event["event"],
)
def test_an_event_with_more_fields_is_refused(event: dict[str, Any]) -> None:
    assert fields_of(event | {"more": 1}) is None


def test_of_a_phase_and_of_memory_only_the_known_fields_are_taken() -> None:
    event = {"event": "phase", **PHASE, "end": memory(3) | {"more": 1}, "more": 1}
    assert fields_of(event) == fields_of({"event": "phase", **PHASE})


@pytest.mark.parametrize(
    "event",
    [
        {"event": "unknown"},
        {"event": "told", "load_ns": "1"},
        {"event": "told", "load_ns": 1.5},
        {"event": "told", "load_ns": True},
        {"event": "told", "load_ns": -1},
        {"event": "told", "points": [[1, 2]]},
        {"event": "told", "children_private_bytes": [None]},
        {"event": "told", "outcome": "odd", "message": ""},
        {"event": "told", "outcome": "\ud800", "message": ""},
        {"event": "told", "\ud800": 1},
    ],
)
def test_an_event_of_another_shape_is_refused(event: dict[str, Any]) -> None:
    assert fields_of(event) is None


def test_a_text_that_no_file_can_hold_is_refused() -> None:
    ended = b'{"event":"ended","rank":0,"code":1,"signal":null,"stderr_tail":"%s"}'
    assert decode(ended % b"a")
    assert decode(ended % b"\\ud800") == ("ended", None)


def test_names_and_texts_are_of_one_line_and_not_endless() -> None:
    begun = fields_of({"event": "told", "phase": "a\nb"})
    assert begun and "\n" not in begun["phase"]
    said = fields_of({"event": "told", "notes": ["x" * 2000]})
    assert said and len(said["notes"][0]) == 1000
    said = fields_of({"event": "told", "outcome": "ok", "message": "a\x1b[31m"})
    assert said and "\x1b" not in said["message"]
