"""Cells that meet their limit in hard ways end with the right outcome, and leave nothing behind.

``bench`` itself asserts after every cell that no process, cgroup or container is left.
"""

import mmap
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cells import (
    FILE_BYTES,
    MIB,
    Bench,
    Outcome,
    Reference,
    Result,
    Watched,
    cgroup_version,
    known,
    known_file,
    names_of,
    phases_of,
    verdict_on,
)
from nightly import limits, nightly

# `import torch` charges about 150 MiB of anonymous memory to its cgroup.
LIMIT = 256 * MIB
# The kernel ends the largest process: a child of the worker's has its own share beside the worker's
# anonymous memory, and must outgrow what is mapped of torch's libraries, which the worker alone has.
LIMIT_OF_A_CHILD = 448 * MIB
PATIENCE_S = 300
REFERENCE = Reference(spent_ns=1000 * 10**9, size_bytes=FILE_BYTES)  # too long for the rule of time
ALONE = "peak RSS and anonymous memory are those of the measured process alone; it started"
KILLED = "the kernel killed 1 process of this measurement for lack of memory"
LOST = "the measured process lost a child, killed by the kernel for lack of memory"


@pytest.mark.parametrize("limit_mib", [8, 96, *nightly(32)])
def test_a_limit_below_the_import_kills_before_the_load(
    bench: Bench, limiting: Watched, limit_mib: int
) -> None:
    result = bench("baseline", limiting, limit_bytes=limit_mib * MIB)
    assert result.outcome is Outcome.OOM_KILLED
    where = "before its first phase" if result.last_phase is None else "in phase 'import'"
    assert result.message == f"killed by the kernel for lack of memory {where}"
    assert (result.baseline, names_of(result), result.load_ns) == (None, [], None)
    assert result.exit_code == 128 + 9
    if result.peaks.cgroup_bytes is not None:
        assert result.peaks.cgroup_bytes <= limit_mib * MIB


def test_children_are_charged_to_the_cell(bench: Bench, limiting: Watched) -> None:
    result = bench("children", limiting, how="each_takes_its_share", mib=100)
    assert (result.outcome, result.message) == (Outcome.OK, "")
    (warning,) = result.warnings
    assert re.match(rf"{ALONE} \d process", warning)
    assert max(Counter(each.parent_pid for each in result.processes).values()) >= 3
    phase = phases_of(result)["children"]
    assert result.baseline
    highest = phase.peak_cgroup_bytes
    if highest is None:  # the kernel's mark does not reset: each child holds its share for 1 s
        highest = max(
            sample["cgroup_bytes"] or 0
            for sample in bench.samples(result)
            if phase.start_ns <= (sample["t_ns"] or 0) <= phase.end_ns
        )
    rise = highest - known(result.baseline.cgroup_bytes)
    assert rise == pytest.approx(300 * MIB, abs=24 * MIB)  # page tables, stacks
    assert phase.peak_rss_bytes < result.baseline.rss_bytes + 50 * MIB  # the worker's alone


@pytest.mark.parametrize("limiting", limits("cgroup"), indirect=True)
def test_children_that_do_not_fit_together_are_killed(bench: Bench, limiting: Watched) -> None:
    options: dict[str, Any] = {"how": "each_takes_its_share", "limit_bytes": LIMIT + 100 * MIB}
    result = bench("children", limiting, mib=100, **options)
    assert result.oom_kills
    assert result.outcome in (Outcome.CHILD_KILLED, Outcome.OOM_KILLED)  # as the kernel chooses


def without_children(warnings: Sequence[str]) -> list[str]:
    """Return the warnings but the one about the child's memory, which a quick kill leaves unsampled."""
    return [text for text in warnings if not text.startswith(f"{ALONE} 1 process")]


def with_a_killed_child(
    bench: Bench, limiting: Watched, how: str, timeout_s: float = 120
) -> Result:
    """Run it until the kernel kills the child alone: a child that ends late leaves no memory to the worker.

    The kernel then kills the worker too, and the cell must say so.
    """
    for _ in range(5):
        options: dict[str, Any] = {"limit_bytes": LIMIT_OF_A_CHILD, "timeout_s": timeout_s}
        result = bench("children", limiting, how=how, mib=400, **options)
        if (result.outcome, result.exit_code) != (Outcome.OOM_KILLED, 128 + 9):
            break
        assert result.oom_kills
    return result


ENDS = [
    ("goes_on", Outcome.CHILD_KILLED, None, KILLED),
    ("cannot_go_on", Outcome.OOM_KILLED, "children", f"{LOST}; then it failed: RuntimeError: a loader's process ended with status 9 (children.py:34)"),
    pytest.param("exits", Outcome.OOM_KILLED, "children", f"{LOST}; then it ended with exit code 7 in phase 'children'", marks=pytest.mark.nightly),
]  # fmt: skip


@pytest.mark.parametrize(("how", "outcome", "phase", "why"), ENDS)
def test_a_worker_goes_on_or_fails_without_its_killed_child(
    bench: Bench, limiting: Watched, how: str, outcome: Outcome, phase: str | None, why: str
) -> None:
    result = with_a_killed_child(bench, limiting, f"{how}_without_the_one_that_is_killed")
    assert (result.outcome, result.oom_kills, result.last_phase) == (outcome, 1, phase)
    assert without_children(result.warnings) == []
    whom = r"(; the kernel killed \S+ \(process \d+\) with \d+\.\d+ MiB of anonymous memory)*"
    peak = r"; the peak of the cgroup was (\d+\.\d+) MiB"
    found = re.fullmatch(re.escape(why) + whom + peak, result.message)
    assert found, result.message
    assert float(found[2]) * MIB == pytest.approx(LIMIT_OF_A_CHILD, abs=MIB)


@pytest.mark.parametrize("limiting", limits("docker"), indirect=True)
def test_a_worker_that_waits_for_its_killed_child_times_out_and_says_why(
    bench: Bench, limiting: Watched, seconds_to_load: Callable[[Watched], float]
) -> None:
    how = "waits_for_ever_for_the_one_that_is_killed"
    timeout_s = round(2 * seconds_to_load(limiting) + 1)
    result = with_a_killed_child(bench, limiting, how, timeout_s=timeout_s)
    assert (result.outcome, result.oom_kills) == (Outcome.TIMEOUT, 1)
    assert result.message == f"still running after {timeout_s} s, in phase 'children'"
    assert without_children(result.warnings) == [KILLED]


@pytest.mark.parametrize(
    ("limiting", "folder"),
    [
        pytest.param("cgroup", "/dev/shm", marks=pytest.mark.cgroup),
        pytest.param("docker", "/dev/shm", marks=pytest.mark.docker),
        # Only a container has a /tmp of its own: a cgroup's cell writes to the machine's.
        pytest.param("docker", "/tmp", marks=pytest.mark.docker),
    ],
    indirect=["limiting"],
)
def test_what_a_cell_writes_to_a_tmpfs_is_its_own_and_goes_with_it(
    bench: Bench, limiting: Watched, folder: str
) -> None:
    result = bench("fills_shm", limiting, folder=folder, mib=48, limit_bytes=LIMIT + 64 * MIB)
    assert (result.outcome, result.message) == (Outcome.OK, "")
    written, before = phases_of(result)["hold it"].end, phases_of(result)["prepare"].end
    assert known(written.cgroup_bytes) - known(before.cgroup_bytes) >= 47 * MIB


def test_a_tmpfs_that_does_not_fit_kills(bench: Bench, limiting: Watched) -> None:
    result = bench("fills_shm", limiting, mib=62, limit_bytes=LIMIT - 64 * MIB)
    assert (result.outcome, result.last_phase) == (Outcome.OOM_KILLED, "write")
    assert result.message == "killed by the kernel for lack of memory in phase 'write'"


def thrashing(bench: Bench, limiting: Watched, **options: Any) -> Result:
    """Run a cell that reads a mapped file again and again: 64 MiB where 40 are left."""
    files, limit_mib = [known_file(bench.strategies)], LIMIT // MIB
    options |= {"limit_bytes": LIMIT, "files": files, "limit_mib": limit_mib, "left_mib": 40}
    return bench("thrashes", limiting, **options)


@pytest.mark.parametrize("limiting", limits("cgroup"), indirect=True)
def test_thrashing_for_ever_ends_at_the_time_out_with_its_timeline(
    bench: Bench, limiting: Watched, seconds_to_load: Callable[[Watched], float]
) -> None:
    timeout_s = round(2 * seconds_to_load(limiting) + 3)
    start = time.monotonic()
    result = thrashing(bench, limiting, timeout_s=timeout_s)
    assert time.monotonic() - start < timeout_s + 15  # it dies promptly: its limit was lifted
    assert (result.outcome, result.last_phase) == (Outcome.TIMEOUT, "thrash")
    assert result.message == f"still running after {timeout_s} s, in phase 'thrash'"
    assert result.oom_kills == 0
    assert result.faults and result.faults.workingset_refault_file
    assert result.faults.workingset_refault_file > 16 * MIB // mmap.PAGESIZE
    assert result.faults.major > 50  # each brings its neighbours with it
    if cgroup_version() == 2:
        assert result.limit_events and result.limit_events["max"] > 100
    late = bench.samples(result)[-20:]
    assert late[-1]["major_faults"] and (late[0]["major_faults"] or 0) < late[-1]["major_faults"]


@pytest.mark.parametrize("limiting", limits("cgroup"), indirect=True)
def test_a_cell_that_thrashes_for_ever_is_ended_long_before_its_time_out(
    bench: Bench, limiting: Watched
) -> None:
    start = time.monotonic()
    result = thrashing(bench, limiting, timeout_s=PATIENCE_S, reference=REFERENCE)
    assert time.monotonic() - start < PATIENCE_S / 3
    assert (result.outcome, result.last_phase) == (Outcome.THRASHING, "thrash")
    assert (result.load_ns, result.ready_ns, result.oom_kills) == (None, None, 0)
    assert result.stopped
    assert (result.stopped.timeout_s, result.stopped.size_bytes) == (None, FILE_BYTES)
    assert result.stopped.reread_bytes
    assert result.stopped.reread_bytes > 3 * FILE_BYTES
    assert result.stopped.after_ns < PATIENCE_S / 3 * 10**9
    verdict, reason = verdict_on(result)
    assert verdict == "thrashes"
    assert "read again" in reason


@pytest.mark.parametrize("limiting", limits("cgroup"), indirect=True)
def test_a_load_that_fits_its_limit_is_not_ended(bench: Bench, limiting: Watched) -> None:
    result = bench(
        "baseline", limiting, limit_bytes=512 * MIB, timeout_s=PATIENCE_S, reference=REFERENCE
    )
    assert (result.outcome, result.stopped) == (Outcome.OK, None)
