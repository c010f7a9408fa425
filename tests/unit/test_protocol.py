"""A job arrives at its worker as it was sent."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weighin.cell import Cell, Job, ModelSpec, decode_job, encode_job

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
