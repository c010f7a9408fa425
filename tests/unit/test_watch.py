"""A worker that plays a script is watched: what comes of its events, its samples and its end."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fakes
import pytest
from fake_nvml import Nvml
from fakes import BASELINE, DONE, LOADED, FakeRunning, Seen, begin, done, failed, phase, ready
from hypothesis import given
from hypothesis import strategies as st

from weighin.isolation.base import Exit
from weighin.probes import kernel_log
from weighin.probes.cgroup import Counters
from weighin.records.verdict import Reference
from weighin.result import Kill, Outcome, Pressure, Result, Sample
from weighin.run import measure as watch
from weighin.run.measure import Watch
from weighin.settings.definition import Settings
from weighin.units import MIB

Script = Sequence[Any]
"""As of ``fakes.FakeRunning``; a dict is what the observer sees from then on."""

OK, KILLED, ENDED = fakes.OK, fakes.KILLED, Exit(1)
CRASHED, SEGFAULT = Exit(None, signal=6), Exit(None, signal=11)


def played(script: Script, ended: Exit = OK, *, seen: Seen | None = None, **running: Any) -> FakeRunning:  # fmt: skip
    inside = seen or Seen()
    steps = [inside.sees(**step) if isinstance(step, dict) else step for step in script]
    return FakeRunning(steps, ended, inside=inside, **running)


def followed(
    running: FakeRunning, *, timeout_s: float = 0.01, ram: int | None = None, use: str = "", **options: Any
) -> tuple[Result, Watch]:  # fmt: skip
    job = replace(fakes.JOB, cell=replace(fakes.JOB.cell, ram_limit_bytes=ram, use=use))
    return fakes.followed(running, job=job, settings=Settings(timeout_s=timeout_s), **options)


def watched(running: FakeRunning, **options: Any) -> Result:
    return followed(running, **options)[0]


def figure(of: Any, path: str) -> Any:
    """Return ``a.b`` of a result; of a tuple, that of each of its items."""
    for name in path.split("."):
        of = [getattr(one, name) for one in of] if isinstance(of, tuple) else getattr(of, name)
    return of


def sample(t_ns: int, mib: int = 1, minor: int = 0, major: int = 0) -> Sample:
    return Sample(t_ns, 2 * mib * MIB, mib * MIB, mib * MIB // 2, 0, 0, minor, major)


def of(rank: int, line: bytes) -> bytes:
    """Return the event of one rank."""
    return json.dumps(json.loads(line) | {"rank": rank}).encode() + b"\n"


# -- ranks

BOTH: Script = [  # two ranks that load, of which the second is slower and takes more
    of(0, begin("import")), of(1, begin("import")),
    {"usage_bytes": 10, "peak_bytes": 99}, of(0, fakes.baseline(t_ns=100)),
    {"usage_bytes": 20}, of(1, fakes.baseline(t_ns=200)),
    of(0, begin("read")), of(1, begin("read")),
    {"usage_bytes": 30, "peak_bytes": 40}, of(0, phase("read", 500)),
    {"peak_bytes": 60}, of(1, phase("read", 600)),
    of(0, fakes.loaded(1000)), of(1, fakes.loaded(2000)),
    of(0, ready(t_ns=2000, touch_ns=5)),
    {"peak_bytes": 70, "refaults": 9}, of(1, ready(t_ns=3000, touch_ns=1)),
    of(0, fakes.event("shared", pss_bytes=7)), of(1, fakes.event("shared", pss_bytes=8)),
    {"peak_bytes": 1000}, of(0, done()), of(1, done()),
]  # fmt: skip


def among(*steps: Any) -> Script:
    """What these two ranks say, with further steps after they began to read."""
    return [*BOTH[:8], *steps, *BOTH[8:]]


def own(kind: str, **fields: Any) -> bytes:
    """A message of a phase that a strategy measures with weighin.phase."""
    reading = {"id": 1, "t_ns": 1, "faults": [0, 0], "peak_rss_bytes": 1, "memory": fakes.memory(1)}
    return fakes.event(kind, **reading, **fields)


OWN = own("begin", name="own", resets=True), own("end")


def refuse() -> None:
    fakes.KnownListener.newest.ranks[1].note("sent a wrong message")


# -- of one worker

SHARED = fakes.memory(300, shmem_bytes=40 * MIB)
BUILT = [*BASELINE, begin("build"), phase("build", 500), begin("read")]
USED = [*LOADED, begin("touch"), phase("touch", 450), ready(), begin("forward")]
PASSES = [
    *LOADED, ready(), begin("forward"), phase("forward", 300, start_ns=3000, end_ns=4000),
    begin("forward"), phase("forward", 330, start_ns=5000, end_ns=6000), done(),
]  # fmt: skip
IN_PASSES = 2 * (330 * MIB // 3)  # of the anonymous memory at their ends
FAULTS = sample(150, 1, 7, 2), sample(250, 1, 40, 3), sample(300, 1, 90, 63)
MARKS = [
    begin("import"), {"peak_bytes": 40}, phase("import"), fakes.baseline(),
    begin("read"), {"peak_bytes": 70}, phase("read"), ready(),
    begin("forward"), {"peak_bytes": 99}, phase("forward"), done(),
]  # fmt: skip
NO_RESET = "phases have no cgroup peak, because the cgroup's peak could not be reset (cgroup v2 needs Linux 6.12 for it)"
STALLED: dict[str, Any] = {"some_ns": 4000, "full_ns": 4000}
NOTE = fakes.event("told", notes=["a part of a GPU"])
FULL = fakes.event("told", outcome="cuda_oom", message="no room", summary="| a |\n| b |")
LOST = "killed by the kernel for lack of memory in phase 'read'"
ELSEWHERE = (
    f"{LOST}: the load reached the limit of an outer cgroup, or the end of the machine's memory"
)
STARTED = "peak RSS and anonymous memory are those of the measured process alone; it started"


def on_gpu(name: str, peak: int) -> bytes:
    marks = ("cuda_requested", "cuda_allocated", "cuda_reserved", "pinned")
    return phase(name, **{f"peak_{mark}_bytes": peak + more for more, mark in enumerate(marks)})


GPU_PHASES = [on_gpu("prepare", 90), fakes.baseline(), on_gpu("a", 20), on_gpu("b", 10), fakes.loaded(), on_gpu("touch", 50), ready(), on_gpu("forward", 99), done()]  # fmt: skip


def peaks(**expected: int | None) -> dict[str, Any]:
    return {f"peaks.{name}": value for name, value in expected.items()}


def killed_at(peak: int, ram: int | None, message: str) -> Any:
    script = [*BASELINE, begin("read"), {"peak_bytes": peak}]
    return script, {"ended": KILLED, "oom_kills": 1, "ram": ram}, {"message": message}


def in_use(t_ns: int, mib: int, anon_bytes: int) -> Any:
    return PASSES, {"samples": [sample(t_ns, mib)]}, {"use.anon_sampled_bytes": anon_bytes}


PLAYED: dict[str, tuple[Script, dict[str, Any], dict[str, Any]]] = {
    "shared memory is unreclaimable, as anonymous memory is": ([fakes.baseline(), phase("read", 300, end=SHARED), fakes.loaded(), done()], {}, peaks(anon_sampled_bytes=200 * MIB, unreclaimable_sampled_bytes=240 * MIB)),
    "without shared memory, all that is unreclaimable is anonymous": ([fakes.baseline(), phase("read", 300), fakes.loaded(), done()], {}, peaks(unreclaimable_sampled_bytes=None)),
    "samples before the baseline and after ready do not count": (DONE, {"samples": [sample(99, 7000), sample(100, 3000), sample(2000, 2000), sample(2001, 9000)]}, peaks(anon_sampled_bytes=3000 * MIB, file_sampled_bytes=1500 * MIB)),
    "the mark of a phase that SIGKILL interrupts is the last that was seen": (BUILT, {"ended": KILLED, "last_peak_bytes": 700 * MIB}, peaks(rss_bytes=700 * MIB)),
    "that of a phase that a signal interrupts": (BUILT, {"ended": SEGFAULT, "last_peak_bytes": 700 * MIB}, peaks(rss_bytes=700 * MIB)),
    "that of a phase that an exit interrupts": (BUILT, {"ended": Exit(3), "last_peak_bytes": 700 * MIB}, peaks(rss_bytes=700 * MIB)),
    "the process that starts the ranks is none of them": ([], {"ranks": 2, "samples": [sample(1), sample(10**12)], "last_peak_bytes": 15 * MIB}, {"samples_path": None} | peaks(rss_bytes=None, anon_sampled_bytes=None)),
    "faults of an interrupted first phase": ([*BASELINE, begin("read"), TimeoutError], {"ended": KILLED, "samples": FAULTS}, {"faults.minor": 83, "faults.major": 61}),
    "beside those of the phase before it": ([*BASELINE, phase("build", end_ns=200), begin("read"), TimeoutError], {"ended": KILLED, "samples": FAULTS}, {"faults.minor": 10 + 50, "faults.major": 1 + 60}),
    "beside those of two phases before it": ([*BASELINE, *2 * [phase("build", end_ns=200)], begin("read"), TimeoutError], {"ended": KILLED, "samples": FAULTS}, {"faults.minor": 20 + 50, "faults.major": 2 + 60}),
    "a sample at the end of a phase counts for the next": ([*BASELINE, phase("build", end_ns=200), begin("read"), TimeoutError], {"ended": KILLED, "samples": [sample(200, 1, 5), sample(300, 1, 90)]}, {"faults.minor": 10 + 85}),
    "what comes after ready is no part of the peak": ([*USED, done()], {"ended": KILLED, "last_peak_bytes": 999 * MIB}, peaks(rss_bytes=500 * MIB)),
    "also if it is killed then": ([*USED, TimeoutError], {"ended": KILLED, "last_peak_bytes": 999 * MIB}, peaks(rss_bytes=500 * MIB)),
    "the allocator's peaks are the largest of the load": (GPU_PHASES, {}, peaks(cuda_requested_bytes=20, cuda_allocated_bytes=21, cuda_reserved_bytes=22, pinned_bytes=23)),
    "what the worker notes is a warning": ([*BASELINE, NOTE, *DONE[len(BASELINE):]], {}, {"warnings": ("a part of a GPU",)}),
    "a refusal of the GPU keeps the allocator's summary": ([*LOADED, FULL], {"ended": ENDED}, {"outcome": "cuda_oom", "message": "no room", "allocator_summary": "| a |\n| b |"}),
    # -- what the cgroup shows
    "pressure is what the load added": ([*BASELINE, begin("touch"), {"some_ns": 9000, "full_ns": 8000}, phase("touch"), ready(), begin("forward"), {"some_ns": 20000}, phase("forward"), done()], STALLED, {"pressure": Pressure(5000, 4000)}),
    "refaults and pressure of a killed load are all that it had": ([*BASELINE, begin("read"), phase("read"), begin("apply"), {"refaults": 7, "some_ns": 9000, "full_ns": 9000}], {"ended": KILLED, "refaults": 0, **STALLED}, {"pressure": Pressure(5000, 5000), "faults.workingset_refault_file": 7}),
    "where PSI is off there is no pressure": (DONE, {"refaults": 0}, {"pressure": None}),
    "a mark that cannot be reset gives the total only": (MARKS, {"resets": False, "usage_bytes": 1}, {"phases.peak_cgroup_bytes": [None] * 3, "peaks.cgroup_bytes": 70, "warnings": ()}),
    "which a strategy that marks phases of its own is told": ([*BASELINE, *OWN, *DONE[len(BASELINE):]], {"resets": False, "usage_bytes": 1}, {"warnings": (NO_RESET,)}),
    "a mark that is reset gives one for each phase": (MARKS, {"usage_bytes": 1}, {"phases.peak_cgroup_bytes": [40, 70, 99], "peaks.cgroup_bytes": 70, "warnings": ()}),
    "the import's charge is no part of the peak": ([begin("import"), {"peak_bytes": 99}, *MARKS[2:]], {}, {"phases.peak_cgroup_bytes": [99, 70, 99], "peaks.cgroup_bytes": 70}),
    "a killed cell's total is read after its death": ([*BASELINE, begin("read"), {"peak_bytes": 80, "oom_kills": 1}], {"ended": KILLED}, {"outcome": "oom_killed", "message": ELSEWHERE, "peaks.cgroup_bytes": 80, "oom_kills": 1, "warnings": ()}),
    "a cgroup that went with its worker leaves what the sampler saw": ([*BASELINE, begin("read"), {"oom_kills": None}], {"ended": KILLED, "oom_kills": 0, "sampled_kills": 2}, {"outcome": "oom_killed", "oom_kills": 2}),
    "killed at its limit": killed_at(1000, 1000, LOST),
    "killed nearly at its limit": killed_at(900, 1000, LOST),
    "killed far below its limit, another was met": killed_at(899, 1000, ELSEWHERE),
    "killed without a limit": killed_at(899, None, ELSEWHERE),
    "the limit is said with the lost child, and not with the error": ([*LOADED, failed("strategy_failed", "broken pool")], {"ended": ENDED, "ram": 1000, "oom_kills": 1, "peak_bytes": 899}, {"message": "the measured process lost a child, killed by the kernel for lack of memory: the load reached the limit of an outer cgroup, or the end of the machine's memory; then it failed: broken pool; the peak of the cgroup was 899 B"}),
    "kills that did not decide the outcome are a warning": ([*LOADED, failed("wrong_weights", "1 tensor differs")], {"ended": ENDED, "oom_kills": 2}, {"outcome": "wrong_weights", "oom_kills": 2, "warnings": ("the kernel killed 2 processes of this measurement for lack of memory",)}),
    # -- ranks and other processes
    "events of a rank that does not exist are passed over": (among(of(2, phase("read", 900))), {"ranks": 2}, {"outcome": "ok", "peaks.rss_bytes": 600 * MIB, "peaks.cgroup_bytes": 70, "baseline.cgroup_bytes": 20}),
    "a phase of one of several ranks has no peak, and no warning": (among(*(of(1, message) for message in OWN)), {"ranks": 2}, {"warnings": ()}),
    "a refused message of any rank is a warning": (among(refuse), {"ranks": 2}, {"warnings": ("sent a wrong message",)}),
    "a load of more phases than a program may have gets none of a program": ([*DONE[:-1], *1001 * [phase("forward")], *OWN, done()], {}, {"phases.name": ["import", "prepare", "read", "other", "touch", *1002 * ["forward"]], "warnings": ("a process had more than 1000 phases: later ones are not recorded",)}),
    "another process of the worker is told": (DONE, {"others": (1, 2 * MIB)}, {"warnings": (f"{STARTED} 1 process, with 2.000 MiB of private memory in all (sampled)",), "peaks.others_private_sampled_bytes": 2 * MIB}),
    "three of them": (DONE, {"others": (3, 5 * MIB)}, {"warnings": (f"{STARTED} 3 processes, with 5.000 MiB of private memory in all (sampled)",), "peaks.others_private_sampled_bytes": 5 * MIB}),
    "a small one is not": (DONE, {"others": (1, 2 * MIB - 1)}, {"warnings": (), "peaks.others_private_sampled_bytes": 2 * MIB - 1}),
    "without one there is no figure": (DONE, {}, {"warnings": (), "peaks.others_private_sampled_bytes": None}),
    "processes that a use forks are no surprise": (DONE, {"others": (2, 9 * MIB), "use": "fork"}, {"warnings": ()}),
    # -- the memory of a use: the most that was seen in it
    "before a use": in_use(2999, 900, IN_PASSES),
    "as it begins": in_use(3000, 900, 900 * MIB),
    "between two passes": in_use(4500, 900, 900 * MIB),
    "as it ends": in_use(6000, 900, 900 * MIB),
    "after it": in_use(6001, 900, IN_PASSES),
    "less than a pass has at its end": in_use(3500, 1, IN_PASSES),
    "without a use": ([*LOADED, ready(), done()], {"samples": [sample(3500, 1)]}, {"use": None}),
}  # fmt: skip


def check(script: Script, given: dict[str, Any], expected: dict[str, Any]) -> None:
    options = {key: given[key] for key in ("ranks", "ram", "use") if key in given}
    seen = Seen(**{key: given[key] for key in given if key not in {*options, "ended"}})
    result = watched(played(script, given.get("ended", OK), seen=seen), **options)
    assert {path: figure(result, path) for path in expected} == expected


@pytest.mark.parametrize("name", PLAYED)
def test_what_comes_of_a_worker(name: str) -> None:
    check(*PLAYED[name])


def test_without_pid_and_cgroup_only_the_events_are_known() -> None:
    result = watched(FakeRunning([*DONE], unseen="the engine runs elsewhere"))
    assert (result.pressure, result.oom_kills, result.peaks.cgroup_bytes) == (None, None, None)
    assert [one.peak_cgroup_bytes for one in result.phases] == [None] * 6
    assert result.warnings == ("the engine runs elsewhere",)


# -- a forward pass that fails

WHOLE = [*LOADED, begin("touch"), phase("touch", 450), ready()]
PASS = [*WHOLE, begin("forward")]
IN_PASS = "the measured process was ended by {} in phase 'forward'"
LEFT_0 = [
    of(0, failed("strategy_failed", "a")),
    fakes.event("ended", rank=0, code=1, signal=None, stderr_tail=""),
]
IN_BOTH = [*BOTH[:-3], of(0, begin("forward")), of(1, begin("forward"))]
OF_BOTH = {"ranks": 2, "ended": ENDED}


def fails(text: str, outcome: str = "strategy_failed", script: Script = PASS) -> Script:
    return [*script, failed(outcome, text)]


def of_the_model(script: Script, says: str, ended: Exit = ENDED, ranks: int = 1) -> Any:
    warning = f"the forward pass of m fails: {says}. Every weight is right. To measure the load alone: --use none"
    expected = {"outcome": "ok", "message": "", "last_phase": None, "warnings": (warning,)}
    return script, {"ended": ended, "ranks": ranks}, expected


def of_the_load(
    script: Script,
    message: str,
    ended: Exit = ENDED,
    outcome: str = "strategy_failed",
    last_phase: str = "forward",
) -> Any:
    expected = {"outcome": outcome, "message": message, "last_phase": last_phase, "warnings": ()}
    return script, {"ended": ended}, expected


PASSED: dict[str, Any] = {
    "it raises": of_the_model(fails("boom"), "boom"),
    "its output is not finite": of_the_model(fails("nan", "wrong_weights"), "nan"),
    "it crashes": of_the_model(PASS, IN_PASS.format("SIGABRT"), CRASHED),
    "it is killed": of_the_load(PASS, IN_PASS.format("SIGKILL"), KILLED),
    "it is stopped": of_the_load(PASS, IN_PASS.format("SIGTERM"), Exit(None, signal=15)),
    "it exits": of_the_load(PASS, "the measured process ended with exit code 0 in phase 'forward'", OK),
    **{f"it lacks memory: {error}": of_the_load(fails(error), error) for error in (
        "RuntimeError: DefaultCPUAllocator: can't allocate memory", "OSError: [Errno 12] Cannot allocate memory", "MemoryError",
    )},
    "it lacks memory of the GPU": of_the_load(fails("full", "cuda_oom"), "full", outcome="cuda_oom"),
    "the load raises": of_the_load(fails("boom", script=LOADED), "boom", last_phase="read"),
    "the weights are wrong": of_the_load(fails("a", "wrong_weights", WHOLE), "a", outcome="wrong_weights", last_phase="touch"),
    "a use raises": of_the_load([*WHOLE, begin("use: mine"), failed("use_failed", "mine: boom")], "mine: boom; every weight is right", outcome="use_failed", last_phase="use: mine"),
    "one of two ranks in it raises": of_the_model([*IN_BOTH, *LEFT_0], "rank 0: a", ranks=2),
    "both do": of_the_model([*IN_BOTH, *LEFT_0, of(1, failed("wrong_weights", "b"))], "rank 0: a", ranks=2),
    "one raises while the other compares": ([*IN_BOTH[:-1], *LEFT_0], OF_BOTH, {"outcome": "strategy_failed", "warnings": ()}),
    "both fail, and one compares": ([*IN_BOTH[:-1], *LEFT_0, of(1, failed("wrong_weights", "b"))], OF_BOTH, {"outcome": "strategy_failed", "warnings": ()}),
    "the process that starts the ranks ends": (IN_BOTH, OF_BOTH, {"outcome": "strategy_failed", "warnings": ()}),
    "it ends, and one compares": (IN_BOTH[:-1], OF_BOTH, {"outcome": "strategy_failed", "warnings": ()}),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSED)
def test_only_a_forward_pass_that_fails_after_a_right_load_is_the_models_fault(name: str) -> None:
    check(*PASSED[name])


@given(st.integers(0, len(DONE)))
def test_wherever_a_worker_is_killed_there_is_a_result(cut: int) -> None:
    result = watched(FakeRunning([*DONE[:cut]], KILLED))
    assert len(result.phases) == sum(b'"event":"phase"' in line for line in DONE[:cut])
    assert (result.outcome is Outcome.OK) == (cut == len(DONE))
    assert result.cost


# -- the GPU

GPU_BASELINE = fakes.event(
    "baseline", baseline_ns=100, baseline=fakes.memory(300), import_ns=50,
    environment=fakes.ENVIRONMENT | {"gpu": "Example", "gpu_uuid": "GPU-ab"},
)  # fmt: skip


def test_the_driver_is_asked_for_this_very_process(monkeypatch: pytest.MonkeyPatch) -> None:
    points = fakes.event("told", points=[[60, 300, 100_000]])
    samples = [sample(50), sample(time.monotonic_ns() + 10**12)]
    running = played([GPU_BASELINE, points], seen=Seen(samples))
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([(7, 900), (running.pid, 512)]))
    result, seen = followed(running)
    driven = [(one.cuda_allocated_bytes, one.cuda_driver_bytes) for one in seen.samples]
    assert driven == [(None, None), (300, 512)]
    assert result.environment["cuda_driver_source"] == "NVML, this process"
    assert (result.environment["gpu_driver"], result.warnings) == ("580.1", ())


def test_without_nvml_the_figure_is_the_gpus_and_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([(7, 900)]))
    points = fakes.event("told", points=[[105, 300, 100_000], [115, 200, 90_000]])
    script = [GPU_BASELINE, points, phase("a"), fakes.loaded(), ready(), done()]
    running = played(script, seen=Seen([sample(100), sample(105), sample(110), sample(120)]))
    result, seen = followed(running)
    assert [(one.cuda_allocated_bytes, one.cuda_driver_bytes) for one in seen.samples] == [
        (None, None), (300, 100_000), (300, 100_000), (200, 90_000),
    ]  # fmt: skip
    assert result.peaks.cuda_driver_sampled_bytes == 100_000
    assert result.warnings == (
        "the GPU memory that the driver reports is that of all processes on the GPU: NVML does"
        f" not report the memory of process {running.pid}: another PID namespace, or MIG",
    )


# -- the end


def test_a_worker_that_lives_on_after_its_last_event_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.01)
    running = FakeRunning([*DONE], KILLED, hangs=1)
    assert watched(running, timeout_s=60).outcome is Outcome.OK
    assert running.kills == 1


def test_what_a_cell_takes_after_its_kill_when_its_limit_is_lifted_is_no_peak() -> None:
    class Growing(Seen):
        def raise_limit(self) -> None:
            self.now = Counters(peak_bytes=300 if running.kills else 1000)

    seen = Growing(peak_bytes=256)
    running = played([*BASELINE, TimeoutError], seen=seen)
    result = watched(running)
    assert (result.outcome, result.peaks.cgroup_bytes) == (Outcome.TIMEOUT, 256)
    assert seen.now.peak_bytes == 300
    assert result.stopped and result.stopped.timeout_s == 0.01


def test_a_time_out_closes_the_disk_before_the_worker_is_expected_to_end() -> None:
    for script, closed in (([*BASELINE, TimeoutError], 1), (DONE, 0)):
        disk = Mock()
        followed(played(script, KILLED), disk=disk)
        assert disk.close.call_count == closed


class Rereading(Seen):
    """Reads 100 MiB again between two looks, once it has refaults."""

    def counters(self) -> Counters:
        if self.now.refaults is not None:
            self.sees(refaults=self.now.refaults + 100 * MIB // 4096)()
        return self.now


THRASHES: dict[str, Any] = {"ram": 256 * MIB, "timeout_s": 30, "reference": Reference(10**9, 200 * MIB)}  # fmt: skip


@pytest.mark.parametrize(("peak_mib", "thrashes"), [(256, True), (255, False)])
def test_a_worker_that_thrashes_at_its_limit_is_killed_and_its_outcome_says_by_which_figures(
    monkeypatch: pytest.MonkeyPatch, peak_mib: int, thrashes: bool
) -> None:
    monkeypatch.setattr(watch, "_TEST_S", 0.0)
    script = [*BASELINE, begin("read"), {"refaults": 0}, *[TimeoutError] * 20, begin("other")]
    running = played(script, KILLED, seen=Rereading(peak_bytes=peak_mib * MIB))
    result = watched(running, **THRASHES)
    assert (result.outcome is Outcome.THRASHING, running.kills) == (thrashes, int(thrashes))
    if not thrashes:
        assert result.stopped is None
        return
    assert (result.load_ns, result.ready_ns, result.last_phase) == (None, None, "read")
    assert result.stopped and result.stopped.timeout_s is None
    assert result.stopped.reread_bytes and result.stopped.reread_bytes > 600 * MIB
    assert (result.stopped.size_bytes, result.stopped.reference_ns) == (200 * MIB, 10**9)
    assert "it thrashes; " in result.message
    assert result.message.endswith("in phase 'read'")


PEAK = "; the peak of the cgroup was 3.000 MiB"
KILLS = "; the kernel killed {} with {} of anonymous memory"


@pytest.mark.parametrize(
    ("kills", "named"),
    [
        (  # up to three, of which one is the worker
            [Kill(pid, "python", is_main=pid == 5, anon_bytes=MIB) for pid in (5, 6, 7, 8)],
            KILLS.format("python (process 6)", "1.000 MiB") + KILLS.format("python (process 7)", "1.000 MiB"),
        ),
        ([Kill(6, "x", is_main=False)], KILLS.format("x (process 6)", "0 B")),
    ],
    ids=["several", "one"],
)  # fmt: skip
def test_children_that_the_kernel_killed_are_named(
    kills: list[Kill], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = Mock(return_value=kills)
    monkeypatch.setattr(kernel_log, "position", lambda **_: 0)
    monkeypatch.setattr(kernel_log, "kills_since", since)
    monkeypatch.setattr("weighin.probes.cgroup.read_machine_oom_kills", count(3).__next__)
    seen = Seen(oom_kills=1, peak_bytes=3 * MIB)
    script = [*LOADED, failed("strategy_failed", "broken pool")]
    running = played(script, ENDED, seen=seen, cgroup=tmp_path)
    result = watched(running)
    assert result.outcome is Outcome.OOM_KILLED
    assert result.message.partition("; then it failed: ")[2] == f"broken pool{named}{PEAK}"
    assert since.call_args_list[0].args[:3] == (0, tmp_path, running.pid)
