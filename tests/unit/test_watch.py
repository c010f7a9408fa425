"""A worker that plays a script is watched: what comes of its events, its samples and its end."""

import sys
import time
from dataclasses import replace
from typing import Any

import fakes
import pytest
from fake_nvml import Nvml
from fakes import (
    BASELINE,
    DONE,
    KILLED,
    LOADED,
    FakeRunning,
    FakeSampler,
    Silent,
    begin,
    done,
    event,
    failed,
    fake_sampler,
    followed,
    phase,
    ready,
    watched,
)
from hypothesis import given
from hypothesis import strategies as st

from weighin.isolation.base import Exit
from weighin.probes.cgroup import Counters
from weighin.result import Outcome, Sample
from weighin.run import measure as watch
from weighin.units import MIB

__all__ = ["fake_sampler"]


def sample(t_ns: int, mib: int = 1) -> Sample:
    return Sample(t_ns, 2 * mib * MIB, mib * MIB, mib * MIB // 2, 0, 0, 0, 0)


def test_shared_memory_counts_as_unreclaimable_beside_anonymous() -> None:
    shared = fakes.memory(300, shmem_bytes=40 * MIB)
    script = [fakes.baseline(), fakes.phase("read", 300, end=shared), fakes.loaded(), fakes.done()]
    peaks = watched(FakeRunning(script)).peaks
    assert peaks.anon_sampled_bytes == 200 * MIB
    assert peaks.unreclaimable_sampled_bytes == 240 * MIB


def test_without_shared_memory_all_that_is_unreclaimable_is_anonymous() -> None:
    script = [fakes.baseline(), fakes.phase("read", 300), fakes.loaded(), fakes.done()]
    assert watched(FakeRunning(script)).peaks.unreclaimable_sampled_bytes is None


def test_without_pid_and_cgroup_only_the_events_are_known() -> None:
    result = watched(FakeRunning([*DONE], unseen="the engine runs elsewhere"))
    assert (result.pressure, result.oom_kills, result.peaks.cgroup_bytes) == (None, None, None)
    assert [one.peak_cgroup_bytes for one in result.phases] == [None] * 6
    assert result.warnings == ("the engine runs elsewhere",)


class Growing(Silent):
    """Observes a cell that takes more memory from the moment at which its limit is lifted."""

    def __init__(self) -> None:
        self.running, self.peak_bytes = FakeRunning([*BASELINE, TimeoutError], inside=self), 256

    def counters(self) -> Counters:
        return Counters(peak_bytes=self.peak_bytes)

    def raise_limit(self) -> None:
        self.peak_bytes = 300 if self.running.kills else 1000


def test_the_peak_of_a_cell_that_is_killed_is_one_under_its_limit() -> None:
    result = watched(Growing().running)
    assert (result.outcome, result.peaks.cgroup_bytes) == (Outcome.TIMEOUT, 256)


def test_a_worker_that_lives_on_after_its_last_event_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.01)
    running = FakeRunning([*DONE], KILLED, hangs=1)
    assert watched(running).outcome is Outcome.OK
    assert running.kills == 1


def test_samples_before_the_baseline_and_after_ready_do_not_count(
    sampler: type[FakeSampler],
) -> None:
    sampler.seen = (sample(99, 7000), sample(100, 3000), sample(2000, 2000), sample(2001, 9000))
    peaks = watched(FakeRunning([*DONE], pid=1)).peaks
    assert (peaks.anon_sampled_bytes, peaks.file_sampled_bytes) == (3000 * MIB, 1500 * MIB)


@pytest.mark.parametrize("ended", [KILLED, Exit(None, signal=11), Exit(3)])
def test_the_mark_of_an_interrupted_phase_is_the_last_that_was_seen(
    sampler: type[FakeSampler], ended: Exit
) -> None:
    sampler.last_peak_rss_bytes = 700 * MIB
    script = [*BASELINE, begin("build"), phase("build", 500), begin("read")]
    assert watched(FakeRunning(script, ended, pid=1)).peaks.rss_bytes == 700 * MIB


def test_the_memory_of_the_process_that_starts_the_ranks_is_never_that_of_the_ranks(
    sampler: type[FakeSampler],
) -> None:
    sampler.seen, sampler.last_peak_rss_bytes = (sample(1), sample(10**12)), 15 * MIB
    result, seen = followed(FakeRunning([], pid=1), ranks=2)
    assert seen.samples == []
    assert (result.peaks.rss_bytes, result.peaks.anon_sampled_bytes) == (None, None)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_faults_of_an_interrupted_phase_count_beside_those_of_the_phases_before_it(
    sampler: type[FakeSampler], before: int
) -> None:
    sampler.seen = tuple(
        replace(sample(t_ns), minor_faults=minor, major_faults=major)
        for t_ns, minor, major in ((150, 7, 2), (250, 40, 3), (300, 90, 63))
    )
    script = [*BASELINE, *[phase("build", end_ns=200) for _ in range(before)], begin("read")]
    faults = watched(FakeRunning([*script, TimeoutError], KILLED, pid=1)).faults
    seen = (83, 61) if before == 0 else (50, 60)  # of the samples from the last mark on
    assert faults and (faults.minor, faults.major) == (10 * before + seen[0], before + seen[1])


def test_a_sample_at_the_end_of_a_phase_counts_for_the_next(sampler: type[FakeSampler]) -> None:
    sampler.seen = tuple(
        replace(sample(t_ns), minor_faults=minor) for t_ns, minor in ((200, 5), (300, 90))
    )
    script: list[Any] = [*BASELINE, phase("build", end_ns=200), begin("read"), TimeoutError]
    faults = watched(FakeRunning(script, KILLED, pid=1)).faults
    assert faults and faults.minor == 10 + 85


@pytest.mark.parametrize("last", [TimeoutError, done()])
def test_what_comes_after_ready_is_no_part_of_the_peak(
    sampler: type[FakeSampler], last: Any
) -> None:
    sampler.last_peak_rss_bytes = 999 * MIB
    script = [*LOADED, begin("touch"), phase("touch", 450), ready(), begin("forward"), last]
    assert watched(FakeRunning(script, KILLED, pid=1)).peaks.rss_bytes == 500 * MIB


CRASHED = Exit(None, signal=6)
WHOLE = (*LOADED, begin("touch"), phase("touch", 450), ready())


@pytest.mark.parametrize(
    ("script", "ended", "outcome", "message", "says"),
    [
        ([*WHOLE, begin("forward"), failed("strategy_failed", "boom")], Exit(1), "ok", "", "boom"),
        ([*WHOLE, begin("forward"), failed("wrong_weights", "nan")], Exit(1), "ok", "", "nan"),
        (
            [*WHOLE, begin("forward")],
            CRASHED,
            "ok",
            "",
            "the measured process was ended by SIGABRT in phase 'forward'",
        ),
        (
            [*WHOLE, begin("forward")],
            KILLED,
            "strategy_failed",
            "the measured process was ended by SIGKILL in phase 'forward'",
            "",
        ),
        (
            [*WHOLE, begin("forward")],
            Exit(None, signal=15),
            "strategy_failed",
            "the measured process was ended by SIGTERM in phase 'forward'",
            "",
        ),
        (
            [*WHOLE, begin("forward")],
            Exit(0),
            "strategy_failed",
            "the measured process ended with exit code 0 in phase 'forward'",
            "",
        ),
        *(
            (
                [*WHOLE, begin("forward"), failed("strategy_failed", error)],
                Exit(1),
                "strategy_failed",
                error,
                "",
            )
            for error in (
                "RuntimeError: DefaultCPUAllocator: can't allocate memory",
                "OSError: [Errno 12] Cannot allocate memory",
                "MemoryError",
            )
        ),
        ([*WHOLE, begin("forward"), failed("cuda_oom", "full")], Exit(1), "cuda_oom", "full", ""),
        ([*LOADED, failed("strategy_failed", "boom")], Exit(1), "strategy_failed", "boom", ""),
        ([*WHOLE, failed("wrong_weights", "a")], Exit(1), "wrong_weights", "a", ""),
        (
            [*WHOLE, begin("use: mine"), failed("use_failed", "mine: boom")],
            Exit(1),
            "use_failed",
            "mine: boom; every weight is right",
            "",
        ),
    ],
)
def test_only_a_forward_pass_that_fails_after_a_right_load_is_the_models_fault(
    script: list[Any], ended: Exit, outcome: str, message: str, says: str
) -> None:
    result = watched(FakeRunning(script, ended))
    assert (result.outcome, result.message) == (outcome, message)
    assert (result.last_phase is None) == (outcome == "ok")
    warning = (
        f"the forward pass of m fails: {says}. Every weight is right. To measure the load alone:"
        " --use none"
    )
    assert result.warnings == ((warning,) if says else ())


def test_looks_at_the_gpu_join_the_samples_that_follow_them(sampler: type[FakeSampler]) -> None:
    sampler.seen = tuple(map(sample, (5, 10, 19, 20, 99)))
    points = event("told", points=[[10, 1, 100], [20, 2, 200]])
    _, seen = followed(FakeRunning([points], pid=1))
    assert [(s.cuda_allocated_bytes, s.cuda_driver_bytes) for s in seen.samples] == [
        (None, None), (1, 100), (1, 100), (2, 200), (2, 200),
    ]  # fmt: skip


def test_the_allocators_peaks_are_the_largest_of_the_load() -> None:
    def gpu(name: str, peak: int) -> bytes:
        return phase(
            name,
            peak_cuda_requested_bytes=peak,
            peak_cuda_allocated_bytes=peak + 1,
            peak_cuda_reserved_bytes=peak + 2,
            peak_pinned_bytes=peak + 3,
        )

    script = [
        gpu("prepare", 90), fakes.baseline(), gpu("a", 20), gpu("b", 10), fakes.loaded(),
        gpu("touch", 50), ready(), gpu("forward", 99), done(),
    ]  # fmt: skip
    peaks = watched(FakeRunning(script)).peaks
    assert peaks.cuda_requested_bytes == 20
    assert peaks.cuda_allocated_bytes == 21
    assert peaks.cuda_reserved_bytes == 22
    assert peaks.pinned_bytes == 23


def gpu_baseline() -> bytes:
    environment = fakes.ENVIRONMENT | {"gpu": "Example", "gpu_uuid": "GPU-ab"}
    memory = fakes.memory(300)
    return event(
        "baseline", baseline_ns=100, baseline=memory, import_ns=50, environment=environment
    )


def test_the_driver_is_asked_for_this_very_process(
    sampler: type[FakeSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([(7, 900), (1, 512)]))
    later_ns = time.monotonic_ns() + 10**12
    sampler.seen = (sample(50), sample(later_ns))
    points = event("told", points=[[60, 300, 100_000]])
    result, seen = followed(FakeRunning([gpu_baseline(), points], pid=1))
    assert [(one.cuda_allocated_bytes, one.cuda_driver_bytes) for one in seen.samples] == [
        (None, None),
        (300, 512),
    ]
    assert result.environment["cuda_driver_source"] == "NVML, this process"
    assert result.environment["gpu_driver"] == "580.1"
    assert result.warnings == ()


def test_without_nvml_the_figure_is_the_gpus_and_a_warning_says_why(
    sampler: type[FakeSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([(7, 900)]))
    sampler.seen = (sample(100), sample(110), sample(120))
    points = event("told", points=[[105, 300, 100_000], [115, 200, 90_000]])
    script = [gpu_baseline(), points, phase("a"), fakes.loaded(), ready(), done()]
    result = watched(FakeRunning(script, pid=1))
    assert result.peaks.cuda_driver_sampled_bytes == 100_000
    assert result.warnings == (
        "the GPU memory that the driver reports is that of all processes on the GPU: NVML does"
        " not report the memory of process 1: another PID namespace, or MIG",
    )


def test_what_the_worker_notes_becomes_a_warning() -> None:
    note = event("told", notes=["a part of a GPU"])
    assert watched(FakeRunning([*BASELINE, note, *DONE[len(BASELINE) :]])).warnings == (
        "a part of a GPU",
    )


def test_a_refusal_of_the_gpu_keeps_the_allocators_summary() -> None:
    refused = event("told", outcome="cuda_oom", message="no room", summary="| a |\n| b |")
    result = watched(FakeRunning([*LOADED, refused], Exit(1)))
    assert (result.outcome, result.message) == (Outcome.CUDA_OOM, "no room")
    assert result.allocator_summary == "| a |\n| b |"


@given(st.integers(0, len(DONE)))
def test_wherever_a_worker_is_killed_there_is_a_result(cut: int) -> None:
    result = watched(FakeRunning([*DONE[:cut]], KILLED))
    assert len(result.phases) == sum(b'"event":"phase"' in line for line in DONE[:cut])
    assert (result.outcome is Outcome.OK) == (cut == len(DONE))
    assert result.cost
