"""Where the engine's processes cannot be seen, a watcher in the container looks.

The engine here is a local one: ``is_here`` is made to say that it is not.
"""

import os
import time
from collections.abc import Iterator

import pytest
from cells import (
    FILE_BYTES,
    LARGE,
    MIB,
    Bench,
    Outcome,
    Reference,
    Result,
    Watched,
    cgroup_version,
    known_file,
    phases_of,
    prepared_isolation,
)

from weighin.isolation.docker import container as docker_running

pytestmark = pytest.mark.docker

LIMIT = 256 * MIB
ELSEWHERE = "the Docker engine's processes are not visible on this machine"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Watched]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(docker_running, "is_here", lambda container, pid: False)
        yield prepared_isolation("docker")


# Linux counts resident pages per processor, in batches of 32 pages, and raises VmHWM by the
# approximate sum; VmRSS, which the sampler reads, is the exact one.
UNCOUNTED_BYTES = 32 * 4096 * (os.cpu_count() or 1)


@pytest.fixture(scope="module")
def result(bench: Bench, elsewhere: Watched) -> Result:
    result = bench("baseline", elsewhere, spec=LARGE)
    assert (result.outcome, result.message) == (Outcome.OK, "")
    return result


def test_the_timeline_is_that_of_the_worker(bench: Bench, result: Result) -> None:
    samples = bench.samples(result)
    assert len(samples) > 20
    assert [one["t_ns"] or 0 for one in samples] == sorted(one["t_ns"] or 0 for one in samples)
    assert result.baseline
    assert (samples[0]["t_ns"] or 0) < phases_of(result)["import"].end_ns
    assert (samples[-1]["t_ns"] or 0) > phases_of(result)["touch"].end_ns
    sampled, exact = max(one["rss_bytes"] or 0 for one in samples), result.peaks.rss_bytes
    assert exact
    assert 0.9 * exact < sampled <= exact + UNCOUNTED_BYTES
    assert result.peaks.anon_sampled_bytes
    assert all(one["cgroup_bytes"] and one["cgroup_file_bytes"] is not None for one in samples)


def test_the_cgroups_figures_are_there(result: Result) -> None:
    assert result.oom_kills == 0
    assert result.peaks.cgroup_bytes is not None
    assert (result.limit_events is not None) == (cgroup_version() == 2)  # only v2 counts them
    assert result.faults and result.faults.workingset_refault_file is not None
    # Inside, nobody may put the mark back: it is the whole cell's.
    assert {phase.peak_cgroup_bytes for phase in result.phases} == {None}
    for phase in result.phases:
        assert phase.end.cgroup_bytes
        assert phase.end.cgroup_bytes > phase.end.anon_bytes


def test_the_watchers_own_memory_is_recorded_and_shown(result: Result) -> None:
    assert result.watcher
    assert MIB < result.watcher.anon_bytes < 16 * MIB  # no torch
    assert result.watcher.rss_bytes < 32 * MIB
    (warning,) = result.warnings
    weights = (result.watcher.rss_bytes / MIB, result.watcher.anon_bytes / MIB)
    assert warning == (
        f"{ELSEWHERE}: a watcher in the container measured the load; the cgroup's memory includes"
        " the watcher's {:.3f} MiB (anonymous: {:.3f} MiB)".format(*weights)
    )


def test_a_worker_that_is_killed_was_watched_to_its_end(bench: Bench, elsewhere: Watched) -> None:
    result = bench("overrun", elsewhere, limit_bytes=LIMIT, mib=400)
    assert (result.outcome, result.last_phase) == (Outcome.OOM_KILLED, "take")
    assert result.message == "killed by the kernel for lack of memory in phase 'take'"
    assert result.oom_kills
    assert result.peaks.cgroup_bytes is not None
    assert 0.95 * LIMIT <= result.peaks.cgroup_bytes <= LIMIT
    assert max(one["cgroup_bytes"] or 0 for one in bench.samples(result)) > 0.8 * LIMIT
    assert result.watcher


def test_a_worker_that_hangs_is_killed_and_its_figures_are_kept(
    bench: Bench, elsewhere: Watched
) -> None:
    result = bench("bad_ends", elsewhere, how="hangs_with_the_gil_held", timeout_s=20)
    assert (result.outcome, result.last_phase) == (Outcome.TIMEOUT, "bad")
    assert result.oom_kills == 0
    assert result.watcher
    assert len(bench.samples(result)) > 50


def test_a_worker_that_thrashes_is_seen_to_do_so(bench: Bench, elsewhere: Watched) -> None:
    start = time.monotonic()
    result = bench(
        "thrashes",
        elsewhere,
        limit_mib=LIMIT // MIB,
        left_mib=40,  # of the 64 that it reads
        limit_bytes=LIMIT,
        timeout_s=300,
        files=[known_file(bench.strategies)],
        reference=Reference(spent_ns=1000 * 10**9, size_bytes=FILE_BYTES),
    )
    assert time.monotonic() - start < 100
    assert (result.outcome, result.last_phase) == (Outcome.THRASHING, "thrash")
    assert result.stopped and result.stopped.reread_bytes
    assert result.stopped.reread_bytes > 3 * FILE_BYTES


def test_a_worker_that_fits_its_limit_is_not_ended(bench: Bench, elsewhere: Watched) -> None:
    reference = Reference(spent_ns=1000 * 10**9, size_bytes=FILE_BYTES)
    result = bench("baseline", elsewhere, limit_bytes=512 * MIB, reference=reference)
    assert (result.outcome, result.stopped) == (Outcome.OK, None)


def test_where_no_watcher_can_be_started_the_record_says_why(
    bench: Bench, elsewhere: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_running, "PYTHON", "/not/there")
    result = bench("baseline", elsewhere)
    assert (result.outcome, result.watcher, result.oom_kills) == (Outcome.OK, None, None)
    (warning,) = result.warnings
    assert warning.startswith(f"{ELSEWHERE}, and ")
    assert "/not/there" in warning
