"""What parent and worker say to each other arrives as it was said, and garbage as nothing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin.cell import Cell, Job, ModelSpec, decode_job, encode_job
from weighin.child_process import decode_event, encode_event

JSON: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=4)


@given(
    kwargs=ARGUMENTS,
    options=ARGUMENTS,
    name=st.text(),
    limit=st.none() | st.integers(1, 2**60),
    python_path=st.lists(st.text(), max_size=3),
)
def test_a_job_arrives_as_it_was_sent(
    kwargs: dict[str, Any],
    options: dict[str, Any],
    name: str,
    limit: int | None,
    python_path: list[str],
) -> None:
    cell = Cell(
        ModelSpec(name, "a:b", kwargs), "s", "cgroup", limit, "cuda:1", "bfloat16", "per_param",
        "warm", options, repeat=2,
    )  # fmt: skip
    job = Job(cell, "/c", "/m", "/s.py", tuple(python_path))
    assert decode_job(encode_job(job)) == job


@given(ARGUMENTS)
def test_an_event_arrives_as_it_was_sent(fields: dict[str, Any]) -> None:
    event = fields | {"event": "begin"}
    line = encode_event(event)
    assert line.count(b"\n") == 1
    assert decode_event(line) == event


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"Loading...",
        b"\xff\xfe",
        b"null",
        b"3",
        b'"event"',
        b'["event"]',
        b'{"evnt": 1}',
        b"{",
    ],
)
def test_garbage_is_no_event(line: bytes) -> None:
    assert decode_event(line) is None
