"""A job arrives at its worker as it was sent."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weighin.cell import Cell, Job, ModelSpec, decode_job, encode_job

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
