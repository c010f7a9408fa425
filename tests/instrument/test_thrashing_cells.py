"""A real cell that reads a mapped file again and again under its limit is ended early."""

import time

import pytest
from cells import (
    FILE_BYTES,
    MIB,
    Bench,
    Outcome,
    Reference,
    Result,
    Watched,
    known_file,
    prepared_isolation,
    verdict_on,
)  # fmt: skip
from nightly import limits

LIMIT = 256 * MIB
TIMEOUT_S = 300
REFERENCE = Reference(spent_ns=1000 * 10**9, size_bytes=FILE_BYTES)  # too long for the rule of time


@pytest.fixture(params=limits("cgroup"))
def place(request: pytest.FixtureRequest) -> Watched:
    """Each isolation that holds a limit."""
    return prepared_isolation(request.param)


def thrashing(bench: Bench, place: Watched, reference: Reference | None) -> Result:
    return bench(
        "thrashes",
        place,
        limit_mib=LIMIT // MIB,
        left_mib=40,  # of the 64 that it reads
        limit_bytes=LIMIT,
        timeout_s=TIMEOUT_S,
        files=[known_file(bench.strategies)],
        reference=reference,
    )


def test_a_cell_that_thrashes_for_ever_is_ended_long_before_its_time_out(
    bench: Bench, place: Watched
) -> None:
    start = time.monotonic()
    result = thrashing(bench, place, REFERENCE)
    assert time.monotonic() - start < TIMEOUT_S / 3
    assert (result.outcome, result.last_phase) == (Outcome.THRASHING, "thrash")
    assert (result.load_ns, result.ready_ns, result.oom_kills) == (None, None, 0)
    assert result.stopped
    assert (result.stopped.timeout_s, result.stopped.size_bytes) == (None, FILE_BYTES)
    assert result.stopped.reread_bytes
    assert result.stopped.reread_bytes > 3 * FILE_BYTES
    assert result.stopped.after_ns < TIMEOUT_S / 3 * 10**9
    verdict, reason = verdict_on(result)
    assert verdict == "thrashes"
    assert "read again" in reason


def test_a_load_that_fits_its_limit_is_not_ended(bench: Bench, place: Watched) -> None:
    result = bench(
        "baseline", place, limit_bytes=512 * MIB, timeout_s=TIMEOUT_S, reference=REFERENCE
    )
    assert (result.outcome, result.stopped) == (Outcome.OK, None)
