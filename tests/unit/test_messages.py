"""A job arrives at its worker as it was sent, and a worker's events have one shape: a strategy could write them, too."""

import json
from typing import Any

import msgspec
import pytest
from fakes import ENVIRONMENT, memory
from hypothesis import given
from hypothesis import strategies as st

from weighin.cell import Cell, Job, ModelSpec, decode_job, encode_job
from weighin.run.listener import decode

PHASE: dict[str, Any] = {
    "event": "phase", "name": "read", "start_ns": 1, "end_ns": 2, "peak_rss_bytes": 3,
    "end": memory(3), "minor_faults": 1, "major_faults": 0,
}  # fmt: skip
READING = {"id": 1, "t_ns": 1, "faults": [1, 0], "peak_rss_bytes": 3, "memory": memory(3)}
EVENTS: list[dict[str, Any]] = [  # whose fields are all needed
    {"event": "begin", "name": "read", "resets": True, **READING},
    {"event": "end", **READING},
    PHASE,
    {"event": "ended", "rank": 0, "code": None, "signal": 9, "stderr_tail": ""},
]
BEFORE = {"baseline_ns": 1, "baseline": memory(3), "import_ns": 2, "environment": ENVIRONMENT}
WRITTEN = {"file_bytes": 1, "disk_bytes": 2, "files": 3}
TOLD: list[dict[str, Any]] = [
    {"event": "told", "rank": 1},
    {"event": "told", "phase": "read"},
    {"event": "baseline", **BEFORE},
    {"event": "told", "points": [[1, 2, 3]]},
    {"event": "told", "notes": ["slow"]},
    {"event": "told", "load_ns": 1},
    {"event": "ready", "ready_at_ns": 1, "touch_ns": 2, "written": WRITTEN},
    {"event": "told", "outcome": "cuda_oom", "message": "no", "summary": "much"},
    {"event": "told", "gradients": "backward", "children_private_bytes": [1]},
    {"event": "shared", "pss_bytes": None},
    {"event": "done", "first_use_ns": None, "marks_ns": 0},
]


def fields_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of the decoded event; None if it is refused."""
    if not (message := decode(json.dumps(event).encode())[1]):
        return None
    fields: dict[str, Any] = json.loads(msgspec.json.encode(message))
    return fields


@pytest.mark.parametrize("event", [*EVENTS, *TOLD], ids=lambda event: "-".join(event)[:40])
def test_an_event_is_taken_with_the_fields_of_its_kind_and_no_others(event: dict[str, Any]) -> None:
    kind, message = decode(json.dumps(event).encode())
    assert message and kind == event["event"]
    given = {name: value for name, value in event.items() if name != "event"}
    assert (fields_of(event) or {}).items() >= given.items()
    if event["event"] != "phase":
        assert fields_of(event | {"more": 1}) is None
    for name in given if event in EVENTS else ():
        assert fields_of({key: value for key, value in event.items() if key != name}) is None, name
        assert fields_of(event | {name: 1.5}) is None, name


def test_of_a_phase_and_of_memory_only_the_known_fields_are_taken() -> None:
    assert fields_of(PHASE | {"end": memory(3) | {"more": 1}, "more": 1}) == fields_of(PHASE)


def test_an_event_of_another_shape_is_refused() -> None:
    shapes: list[dict[str, Any]] = [
        {"load_ns": "1"}, {"load_ns": 1.5}, {"load_ns": True}, {"load_ns": -1},
        {"points": [[1, 2]]}, {"children_private_bytes": [None]},
        {"outcome": "odd", "message": ""}, {"outcome": "\ud800", "message": ""}, {"\ud800": 1},
    ]  # fmt: skip
    for shape in ({"event": "unknown"}, *({"event": "told", **one} for one in shapes)):
        assert fields_of(shape) is None, shape
    ended = b'{"event":"ended","rank":0,"code":1,"signal":null,"stderr_tail":"%s"}'
    assert decode(ended % b"a")[1]
    assert decode(ended % b"\\ud800") == ("ended", None)  # a text that no file can hold


def test_names_and_texts_are_of_one_line_and_not_endless() -> None:
    begun = fields_of({"event": "told", "phase": "a\nb"})
    assert begun and "\n" not in begun["phase"]
    said = fields_of({"event": "told", "notes": ["x" * 2000]})
    assert said and len(said["notes"][0]) == 1000
    said = fields_of({"event": "told", "outcome": "ok", "message": "a\x1b[31m"})
    assert said and "\x1b" not in said["message"]


SIMPLE: Any = st.none() | st.booleans() | st.integers() | st.text()
JSON: Any = st.recursive(
    SIMPLE | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=4)
CELLS = st.builds(
    Cell, st.builds(ModelSpec, st.text(), st.just("a:b"), ARGUMENTS), st.just("s"), st.just("cgroup"),
    st.none() | st.integers(1, 2**60), st.just("cuda:1"), st.just("bfloat16"), st.just("per_param"),
    st.just("warm"), ARGUMENTS, repeat=st.just(2),
)  # fmt: skip


@given(st.builds(Job, CELLS, st.just("/c"), st.just("/m"), st.just("/s.py"), st.lists(st.text(), max_size=3).map(tuple)))  # fmt: skip
def test_a_job_arrives_as_it_was_sent(job: Job) -> None:
    assert decode_job(encode_job(job)) == job
