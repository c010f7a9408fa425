"""Measures one cell: starts its worker, answers its marks, watches it end, and writes the Result.

The worker's events say what it did; the kernel's counters, read here from outside while the
worker waits at a mark or after it has died, say what it cost.
"""

import bisect
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import page_cache
from harness.cell import Job
from harness.counters import MemoryCgroup, PeakMark, pressure_file_of
from harness.isolation import Exit, Isolation, Running
from harness.record import (
    SCHEMA,
    Cost,
    Faults,
    Memory,
    Outcome,
    Peaks,
    Phase,
    Pressure,
    Result,
    Sample,
)
from harness.sampler import DEFAULT_INTERVAL_S, Sampler, write_samples
from harness.units import format_bytes
from harness.worker.protocol import ACKNOWLEDGEMENT, decode_event

_GRACE_S = 10.0  # from the end of a worker's events to its own end
_SIGKILL = 9


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cells of a run share: how, and where to, they are measured."""

    isolation: Isolation
    run: Path
    environment: dict[str, Any]
    interval_s: float = DEFAULT_INTERVAL_S
    on_phase: Callable[[str], None] = lambda _: None


@dataclass(slots=True)
class _Story:
    """What a worker's events have told so far."""

    baseline: Memory | None = None
    baseline_ns: int = 0
    ready_ns: int | None = None
    phases: list[Phase] = field(default_factory=list)
    loading: int = 0  # how many of the phases lie before the baseline
    until_ready: int | None = None  # how many of the phases lie before ``ready``
    current: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    cuda_points: list[tuple[int, int, int]] = field(default_factory=list)
    failure: tuple[Outcome, str] | None = None
    done: bool = False

    def load_phases(self) -> list[Phase]:
        """Return the phases from the baseline until ``ready``, or as far as it came."""
        return self.phases[self.loading : self.until_ready]


@dataclass(frozen=True, slots=True)
class _Counters:
    """Totals of the cell's cgroup at one instant."""

    refaults: int | None = None
    pressure_ns: tuple[int | None, int | None] = (None, None)


def measure(setting: Setting, job: Job, files: Iterable[Path], model_bytes: int | None) -> Result:
    """Run one cell to its end and return what was measured; its samples are written beside.

    ``files`` are the checkpoint's, in the parent's paths: their cached pages are dropped first,
    for a warm cell too, which then reads them inside its own cgroup.
    """
    started_at, start_ns = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic_ns()
    cached_bytes = page_cache.drop(files)
    with closing(setting.isolation.start(job)) as running:
        watch = _Watch(running, setting)
        try:
            watch.follow(job.timeout_s)
            ended = watch.end()
        finally:
            watch.close()
    result = watch.result(job, ended)
    warnings = list(result.warnings)
    if cached_bytes:
        warnings.append(
            f"{format_bytes(cached_bytes)} of the checkpoint could not be dropped from the page cache"
        )
    samples_path = f"samples/{job.cell.id}.csv" if watch.samples else None
    if samples_path:
        write_samples(setting.run / samples_path, watch.samples)
    cost = replace(result.cost, wall_ns=time.monotonic_ns() - start_ns) if result.cost else None
    return replace(
        result,
        cost=cost,
        model_bytes=model_bytes,
        cached_bytes_at_start=cached_bytes,
        samples_path=samples_path,
        started_at=started_at,
        environment=setting.environment | watch.story.environment,
        warnings=tuple(warnings),
    )


class _Watch:
    """One running worker, from its start until nothing of it is left to read."""

    def __init__(self, running: Running, setting: Setting) -> None:
        self.story = _Story()
        self.samples: list[Sample] = []
        self._running = running
        self._on_phase = setting.on_phase
        self._timed_out = False
        self._peak_bytes: int | None = None
        self._cgroup: MemoryCgroup | None = None
        self._mark: PeakMark | None = None
        self._sampler: Sampler | None = None
        self._at_baseline = self._at_end = _Counters()
        self._oom_kills: int | None = None
        if running.cgroup and running.pid:
            self._cgroup = MemoryCgroup(running.cgroup, pressure_file_of(running.pid))
            self._mark = PeakMark(self._cgroup)
        if running.pid:
            self._sampler = Sampler(running.pid, self._cgroup, setting.interval_s)
            self._sampler.start()

    def follow(self, timeout_s: float) -> None:
        """Answer the worker's events until they end, or kill it where the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._running.channel.receive(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self._timed_out = True
                if self._cgroup:
                    self._cgroup.raise_limit()
                self._running.kill()
                return
            if line is None:
                return
            if event := decode_event(line):
                self._take(event)

    def end(self) -> Exit:
        """Wait for the worker's end, and read the counters that outlive it."""
        try:
            ended = self._running.wait(_GRACE_S)
        except TimeoutError:  # its events ended, but something of it still runs
            self._running.kill()
            ended = self._running.wait(_GRACE_S)
        self._at_end = self._read_counters()
        if self._cgroup:
            self._oom_kills = self._cgroup.read_oom_kills()
        if self._mark and not self.story.done and (peak := self._mark.read()):
            self._peak_bytes = max(self._peak_bytes or 0, peak)
        return ended

    def close(self) -> None:
        if self._sampler:
            self.samples = _with_cuda(self._sampler.stop(), self.story.cuda_points)
            if self._oom_kills is None:
                self._oom_kills = self._sampler.oom_kills
        if self._mark:
            self._mark.close()

    def result(self, job: Job, ended: Exit) -> Result:
        """Return what is known now that it is over."""
        story, facts = self.story, self.story.facts
        outcome, message = self._judge(ended)
        warnings = [self._running.unseen] if self._running.unseen and not self._cgroup else []
        if self._oom_kills and outcome is not Outcome.OOM_KILLED:
            warnings.append(
                f"the kernel killed {self._oom_kills} process(es) of this cell for lack of memory"
            )
        load_ns, touch_ns = facts.get("load_ns"), facts.get("touch_ns")
        return Result(
            schema=SCHEMA,
            cell=job.cell,
            outcome=outcome,
            message=message,
            last_phase=None if outcome is Outcome.OK else story.current,
            baseline=story.baseline,
            peaks=self._peaks(outcome),
            phases=tuple(story.phases),
            load_ns=load_ns,
            ready_ns=None if load_ns is None or touch_ns is None else load_ns + touch_ns,
            faults=self._faults(),
            pressure=self._pressure(),
            oom_kills=self._oom_kills,
            exit_code=ended.code if ended.signal is None else 128 + ended.signal,
            cost=Cost(
                wall_ns=0,
                import_ns=facts.get("import_ns"),
                load_ns=load_ns,
                touch_ns=touch_ns,
                first_use_ns=facts.get("first_use_ns"),
                marks_ns=facts.get("marks_ns"),
            ),
            warnings=tuple(warnings),
        )

    def _take(self, event: dict[str, Any]) -> None:
        story, kind = self.story, event.pop("event")
        if kind == "begin":
            story.current = event["name"]
            self._on_phase(event["name"])
        elif kind == "phase":
            self._take_phase(event)
        elif kind == "cuda":
            story.cuda_points += [(t, a, d) for t, a, d in event["points"]]
        elif kind == "baseline":
            story.baseline = Memory(**event.pop("memory"))
            if self._cgroup:
                story.baseline = replace(story.baseline, cgroup_bytes=self._cgroup.read_usage())
            story.baseline_ns, story.loading = event["t_ns"], len(story.phases)
            story.environment = event.pop("environment")
            story.facts |= event
            self._at_baseline = self._read_counters()
            if self._mark and self._mark.reset():
                self._peak_bytes = None
            self._running.channel.send(ACKNOWLEDGEMENT)
        elif kind == "failed":
            story.failure = Outcome(event["outcome"]), event["message"]
        elif kind in ("loaded", "ready", "done"):
            story.facts |= event
            if kind == "ready":
                story.ready_ns, story.until_ready = event["t_ns"], len(story.phases)
            story.done = kind == "done"

    def _take_phase(self, event: dict[str, Any]) -> None:
        end = Memory(**event.pop("end"))
        cgroup_peak = None
        if self._mark and self._cgroup:
            end = replace(end, cgroup_bytes=self._cgroup.read_usage())
            cgroup_peak = self._mark.read()
            if self.story.until_ready is None:
                self._peak_bytes = max(self._peak_bytes or 0, cgroup_peak or 0) or None
            if not self._mark.reset():
                cgroup_peak = None
        self.story.phases.append(Phase(**event | {"end": end, "peak_cgroup_bytes": cgroup_peak}))
        self._running.channel.send(ACKNOWLEDGEMENT)

    def _judge(self, ended: Exit) -> tuple[Outcome, str]:
        """Return the outcome and, where it is not ok, one line that says why."""
        story = self.story
        where = f"in phase {story.current!r}" if story.current else "before its first phase"
        if self._timed_out:
            return Outcome.TIMEOUT, f"still running when the time was over, {where}"
        if story.done:
            return Outcome.OK, ""
        if story.failure:
            return story.failure
        if ended.signal == _SIGKILL and (self._oom_kills or ended.oom_killed):
            return Outcome.OOM_KILLED, f"killed by the kernel for lack of memory {where}"
        how = f"by signal {ended.signal}" if ended.signal else f"with exit code {ended.code}"
        chatter = self._running.channel.chatter.decode(errors="replace").strip().splitlines()
        last = f": {chatter[-1]}" if chatter else ""
        if story.baseline is None:
            return Outcome.MEASUREMENT_FAILED, f"the worker ended {how} {where}{last}"
        return Outcome.STRATEGY_FAILED, f"the worker ended {how} {where}{last}"

    def _peaks(self, outcome: Outcome) -> Peaks:
        story, phases = self.story, self.story.load_phases()
        rss = [phase.peak_rss_bytes for phase in phases]
        if outcome in (Outcome.OOM_KILLED, Outcome.TIMEOUT) and self._sampler:
            # The interrupted phase's own mark died with it: this is how it was last seen.
            rss.append(self._sampler.last_peak_rss_bytes or 0)
        last_ns = story.ready_ns or time.monotonic_ns()
        seen: list[Memory | Sample] = [phase.end for phase in phases]
        seen += [
            s for s in self.samples if story.baseline and story.baseline_ns <= s.t_ns <= last_ns
        ]
        return Peaks(
            rss_bytes=max(rss, default=None),
            cgroup_bytes=self._peak_bytes,
            anon_sampled_bytes=max((one.anon_bytes for one in seen), default=None),
            file_sampled_bytes=max((one.file_bytes for one in seen), default=None),
            cuda_requested_bytes=_largest(phase.peak_cuda_requested_bytes for phase in phases),
            cuda_allocated_bytes=_largest(phase.peak_cuda_allocated_bytes for phase in phases),
            cuda_reserved_bytes=_largest(phase.peak_cuda_reserved_bytes for phase in phases),
        )

    def _faults(self) -> Faults | None:
        phases = self.story.load_phases()
        if not phases:
            return None
        return Faults(
            minor=sum(phase.minor_faults for phase in phases),
            major=sum(phase.major_faults for phase in phases),
            workingset_refault_file=_grown(self._at_baseline.refaults, self._at_end.refaults),
        )

    def _pressure(self) -> Pressure | None:
        before, after = self._at_baseline.pressure_ns, self._at_end.pressure_ns
        some, full = _grown(before[0], after[0]), _grown(before[1], after[1])
        return None if some is None and full is None else Pressure(some, full)

    def _read_counters(self) -> _Counters:
        if self._cgroup is None:
            return _Counters()
        return _Counters(self._cgroup.read_refaults(), self._cgroup.read_pressure_ns())


def _with_cuda(samples: list[Sample], points: list[tuple[int, int, int]]) -> list[Sample]:
    """Return the samples with the worker's latest look at the GPU before each of them."""
    if not points:
        return samples
    times = [point[0] for point in points]
    joined = []
    for sample in samples:
        index = bisect.bisect_right(times, sample.t_ns) - 1
        _, allocated, driver = points[index] if index >= 0 else (0, None, None)
        joined.append(replace(sample, cuda_allocated_bytes=allocated, cuda_driver_bytes=driver))
    return joined


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
