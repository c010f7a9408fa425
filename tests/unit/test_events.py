"""The shape of a worker's events, which a strategy could write too."""

from typing import Any

import pytest
from fakes import ENVIRONMENT, memory

from weighin.run.events import checked

PHASE = {
    "name": "read", "start_ns": 1, "end_ns": 2, "peak_rss_bytes": 3, "end": memory(3),
    "minor_faults": 1, "major_faults": 0,
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {
        "event": "baseline",
        "t_ns": 1,
        "memory": memory(3),
        "import_ns": 2,
        "environment": ENVIRONMENT,
    },
    {"event": "begin", "name": "read", "t_ns": 1},
    {"event": "phase", **PHASE},
    {"event": "cuda", "points": [[1, 2, 3]]},
    {"event": "note", "text": "slow"},
    {"event": "trace", "requested_bytes": 1, "reserved_bytes": 2, "events": [[1, "alloc", 2]]},
    {"event": "loaded", "load_ns": 1},
    {"event": "ready", "t_ns": 1, "touch_ns": 2},
    {"event": "failed", "outcome": "wrong_weights", "message": "no"},
    {"event": "used", "gradients": "backward", "children_private_bytes": [1]},
    {"event": "done", "first_use_ns": None, "marks_ns": 2},
    {"event": "shared", "pss_bytes": None},
    {"event": "ended", "code": None, "signal": 9, "stderr_tail": ""},
]
OPTIONAL = [
    {"event": "ready", "t_ns": 1, "touch_ns": 2,
     "written": {"file_bytes": 1, "disk_bytes": 2, "files": 3}},
    {"event": "failed", "outcome": "cuda_oom", "message": "no", "summary": "much"},
    {"event": "done", "first_use_ns": 1, "marks_ns": 2},
    {"event": "ended", "code": 1, "signal": None, "stderr_tail": "x"},
]  # fmt: skip


@pytest.mark.parametrize("event", [*EVENTS, *OPTIONAL], ids=lambda event: event["event"])
def test_an_event_with_the_fields_of_its_kind(event: dict[str, Any]) -> None:
    assert checked(event) == event


@pytest.mark.parametrize(
    ("event", "name"),
    [(event, name) for event in EVENTS for name in event if name != "event"],
    ids=lambda one: one if isinstance(one, str) else one["event"],
)
def test_an_event_without_a_field_of_its_kind_is_refused(event: dict[str, Any], name: str) -> None:
    assert checked({key: value for key, value in event.items() if key != name}) is None
    assert checked(event | {name: 1.5}) is None


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event["event"])
def test_an_event_with_more_fields_is_refused(event: dict[str, Any]) -> None:
    assert checked(event | {"more": 1}) is None


@pytest.mark.parametrize(
    "event",
    [
        {"event": "unknown"},
        {"event": "loaded", "load_ns": "1"},
        {"event": "loaded", "load_ns": 1.5},
        {"event": "cuda", "points": [[1, 2]]},
        {"event": "used", "gradients": "", "children_private_bytes": [None]},
        {"event": "failed", "outcome": "odd", "message": ""},
        {"event": "baseline", "t_ns": 1, "memory": memory(3) | {"more": 1}, "import_ns": 2,
         "environment": {}},
        {"event": "phase", **PHASE, "end": memory(3) | {"more": 1}},
    ],
)  # fmt: skip
def test_an_event_of_another_shape_is_refused(event: dict[str, Any]) -> None:
    assert checked(event) is None


@pytest.mark.parametrize(
    ("rank", "ranks", "is_known"),
    [(0, 1, True), (1, 1, False), (1, 2, True), (2, 2, False), (-1, 2, False), (True, 2, False)],
)
def test_an_event_names_one_of_the_ranks(rank: int, ranks: int, is_known: bool) -> None:
    event = {"event": "loaded", "load_ns": 1, "rank": rank}
    assert checked(event, ranks) == (event if is_known else None)


def test_names_and_texts_are_of_one_line_and_not_endless() -> None:
    begun = checked({"event": "begin", "name": "a\nb", "t_ns": 1})
    assert begun and "\n" not in begun["name"]
    said = checked({"event": "note", "text": "x" * 2000})
    assert said and len(said["text"]) == 1000
    said = checked({"event": "failed", "outcome": "ok", "message": "a\x1b[31m"})
    assert said and "\x1b" not in said["message"]
