"""Supervise a running worker (measured process): answer events, sample memory, read cgroup counters.

The worker reports events. At the end of a phase (a step of the load), it waits until the supervisor
has read the cgroup's counters. The supervisor reads them again after the worker's exit.
"""

import bisect
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV
from typing import TypeVar

from weighin.cell import Job
from weighin.disk.mount import Mount
from weighin.isolation.base import Exit, Running
from weighin.probes import kernel_log
from weighin.probes.cgroup import limits_around, read_machine_oom_kills
from weighin.probes.gpu_memory import DriverMemory, NvmlUnavailable
from weighin.probes.observer import Observation, Observer, grown
from weighin.probes.sampler import DEFAULT_INTERVAL_S, RankSamplers
from weighin.protocol import ACKNOWLEDGEMENT
from weighin.records import thrashing
from weighin.records.repeats import largest
from weighin.result import (
    BROKEN,
    SCHEMA,
    Faults,
    Kill,
    Memory,
    Outcome,
    Peaks,
    Phase,
    Pressure,
    Result,
    Sample,
    Stopped,
    Use,
)
from weighin.run import events, interrupts, rank_logs
from weighin.run.event_log import LOST_CHILD, EventLog
from weighin.run.thrash_guard import ThrashGuard
from weighin.units import MIB, format_bytes
from weighin.uses import FORK, FORWARD, is_of_use

_LACK_OF_MEMORY = r"MemoryError|(?i:can't allocate|cannot allocate)"  # of Python, torch, the kernel
_CRASHES = (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL)  # signals that code sends to itself
_Point = TypeVar("_Point", bound=tuple[int, ...])

_FULL = 0.9  # of the cell's limit; a kill at a smaller charge was for another limit
_NOTABLE_BYTES = 2 * MIB  # of child processes, for a warning; a shell takes less
_NAMED = 3  # the most killed processes that a message names
_GRACE_S = 10.0  # from the end of a worker's events to its exit


class Watch:
    """Supervises one worker from its start to its exit, and then reads its cgroup's last counters.

    A worker of several ``ranks`` starts one process for each rank. Each rank has its own event log.

    Attributes:
        samples: the worker's memory readings; for several ranks, joined by ``rank_logs.merge``.
        rank_samples: the memory readings of each rank, by the rank's number.
        escape: how the worker got out of its memory limit: "left its cgroup"; empty if it did not.
    """

    def __init__(
        self,
        running: Running,
        on_phase: Callable[[str], None],
        before_load: Callable[[], None] | None = None,
        ranks: int = 1,
        guard: ThrashGuard | None = None,
        disk: Mount | None = None,
    ) -> None:
        """Start to sample the worker.

        Args:
            on_phase: is called with the name of each phase that begins.
            before_load: is called when all ranks have reported their memory before the load. The
                worker waits during the call.
            guard: tests whether the cell thrashes; if it does, the worker is killed.
            disk: the slow disk from which the worker reads. It is closed when the worker is killed,
                because a process that waits for an unanswered read cannot die.
        """
        self._started_ns = time.monotonic_ns()
        self._guard = guard
        self._disk = disk
        self._stalled = ""
        self._stopped: Stopped | None = None
        self._logs = [EventLog() for _ in range(ranks)]
        self.event_log = self._logs[0]
        self.samples: list[Sample] = []
        self.rank_samples: dict[int, list[Sample]] = {}
        self._rank_samplers: RankSamplers | None = None
        self._ends: dict[int, Exit] = {}
        self._running = running
        self._on_phase = on_phase
        self._before_load = before_load
        self._peak_bytes: int | None = None
        self._driver: DriverMemory | None = None
        self._at_baseline = self._at_end = Observation()
        self._at_ready: Observation | None = None
        self.escape = ""
        self._peak_at_kill: int | None = None
        self._oom_kills: int | None = None
        self._limits: list[tuple[int, Path]] = []
        self._machine_oom_kills = read_machine_oom_kills()
        self._observer = (
            Observer(
                running.pid,
                running.cgroup,
                DEFAULT_INTERVAL_S,
                is_alone=ranks == 1,
                helpers=running.helpers,
            )
            if running.pid
            else None
        )
        self._at_phase_end = self._observe()

    def follow(self, timeout_s: float) -> None:
        """Answer all events of the worker; kill the worker if it thrashes, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            due_s = min(deadline, self._guard.next_s) if self._guard else deadline
            try:
                with interrupts.allowed():
                    line = self._running.channel.receive(max(0.0, due_s - time.monotonic()))
            except TimeoutError:
                if due_s == deadline:
                    self._stopped = Stopped(time.monotonic_ns() - self._started_ns, timeout_s)
                line = b""
            if line is None:
                return
            self._stopped = self._stopped or self._proof()
            if self._stopped:
                if self._disk and self._stopped.timeout_s is not None:
                    self._stalled = self._disk.stalled()
                self._kill()
                return
            if event := events.decode(line, len(self._logs)):
                self._take(*event)

    def _proof(self) -> Stopped | None:
        if self._guard is None:
            return None
        return self._guard.proof(
            self._observe, self._at_baseline, self._peak_bytes, is_loading=not self._is_ready
        )

    def end(self) -> Exit:
        """Wait for the worker's exit, kill it after 10 s, and read the counters of its cgroup."""
        try:
            ended = self._running.wait(_GRACE_S)
        except TimeoutError:  # the worker closed its event pipe, but still runs
            self._kill()
            try:
                ended = self._running.wait(_GRACE_S)
            except TimeoutError:  # it is in an uninterruptible sleep, which SIGKILL does not end
                ended = Exit(None, still_runs=True)
        self._at_end = self._observe()
        self._oom_kills = self._at_end.oom_kills
        if self._running.cgroup:
            self._limits = limits_around(self._running.cgroup.parent)
        if not self._is_ready:
            self._raise_peak(self._peak_at_kill or self._at_end.peak_bytes)
        return ended

    def close(self) -> None:
        """End the sampling, and set ``samples`` and ``rank_samples``."""
        driver = self._driver.stop() if self._driver else None
        if self._observer:
            samples = self._observer.stop()
            if self._rank_samplers:
                self.rank_samples = self._rank_samplers.stop()
            if len(self._logs) > 1:
                samples = rank_logs.merge(samples, list(self.rank_samples.values()))
            self.samples = _with_cuda(samples, self.event_log.cuda_points, driver)
            if self._oom_kills is None:
                self._oom_kills = self._observer.oom_kills

    def result(self, job: Job, ended: Exit) -> Result:
        event_log, totals = self.event_log, self._at_ready or self._at_end
        if self._stopped and self._stopped.timeout_s is not None:
            outcome = Outcome.TIMEOUT
            message = f"still running after {job.timeout_s:g} s, {rank_logs.where(self._logs)}"
            message += f"; {self._stalled}" if self._stalled else ""
        elif self._stopped:
            outcome = Outcome.THRASHING
            message = f"{thrashing.words(self._stopped)}; {rank_logs.where(self._logs)}"
        else:
            outcome, message = rank_logs.judge(
                self._logs,
                self._ends,
                ended,
                self._oom_kills,
                self._running.channel.stderr_tail,
                grown(self._machine_oom_kills, read_machine_oom_kills()),
            )
        culprit = self._logs[rank_logs.culprit(self._logs, self._ends, self._oom_kills)]
        doubts: list[str] = []
        if outcome is Outcome.USE_FAILED:
            message += "; every weight is right"
        elif outcome in BROKEN and self._only_forward_failed(ended):  # so the load is right
            doubts.append(
                f"the forward pass of {job.cell.model.title} fails: {message}. Every weight is"
                " right. To measure the load alone: --use none"
            )
            outcome, message = Outcome.OK, ""
        is_whole = outcome is Outcome.OK or all(log.done for log in self._logs)
        is_cut = outcome is Outcome.THRASHING  # such a cell was killed, so its times are no results
        if outcome is Outcome.OOM_KILLED:
            message += self._met_elsewhere(job.cell.ram_limit_bytes)
        if outcome is Outcome.CHILD_KILLED or LOST_CHILD in message:
            message += self._killed_children()
        return Result(
            schema=SCHEMA,
            cell=job.cell,
            outcome=outcome,
            message=message,
            last_phase=None if is_whole else culprit.current,
            baseline=event_log.baseline,
            peaks=self._peaks(),
            phases=tuple(event_log.phases),
            load_ns=None if is_cut else rank_logs.longest_load_ns(self._logs),
            ready_ns=None if is_cut else rank_logs.longest_ready_ns(self._logs),
            faults=self._faults(totals),
            pressure=self._pressure(totals),
            oom_kills=self._oom_kills,
            limit_events=self._at_end.limit_events,
            exit_code=ended.shell_code,
            written=event_log.written,
            cost=rank_logs.slowest(self._logs).cost(),
            allocator_summary=event_log.allocator_summary,
            warnings=(*self._warnings(outcome, ended, forks=job.cell.use == FORK), *doubts),
            ranks=rank_logs.ranks(self._logs, self._ends),
            stopped=self._stopped,
            use=self._use(),
        )

    def _only_forward_failed(self, ended: Exit) -> bool:
        """Tell whether the model's own forward pass failed, by an error or a crash, and nothing else.

        A signal from outside and a lack of memory are failures of the cell.
        """
        number = rank_logs.culprit(self._logs, self._ends, self._oom_kills)
        log, end = self._logs[number], self._ends.get(number)
        end = end or (ended if len(self._logs) == 1 else None)
        told = log.failure and not re.search(_LACK_OF_MEMORY, log.failure[1])
        return (
            self._is_ready
            and log.current == FORWARD
            and all(each.done or each.current == FORWARD for each in self._logs)
            and bool(told if log.failure else end and end.signal in _CRASHES)
        )

    def _use(self) -> Use | None:
        """Return facts of the use after the load; None if no use has ended, or for several ranks."""
        phases = [phase for phase in self.event_log.phases if is_of_use(phase.name)]
        if not phases or len(self._logs) > 1:
            return None
        start_ns, end_ns = phases[0].start_ns, phases[-1].end_ns
        seen = [each.anon_bytes for each in self.samples if start_ns <= each.t_ns <= end_ns]
        sampled = largest([*seen, *(phase.end.anon_bytes for phase in phases)])
        return replace(self.event_log.use, anon_sampled_bytes=sampled)

    def _met_elsewhere(self, limit_bytes: int | None) -> str:
        """Say for which limit the kernel killed; empty for the cell's own limit, or if it is
        unknown.
        """
        peak = largest(
            (self._peak_bytes, self._at_end.peak_bytes)
        )  # each phase resets the kernel's mark
        if peak is None or (limit_bytes and peak >= _FULL * limit_bytes):
            return ""
        charge = f", when its cgroup had {format_bytes(peak)}"
        if self._limits and self._limits[0][0] < (limit_bytes or math.inf):
            limit, group = self._limits[0]
            return f"{charge}: the limit of the outer cgroup {group} is {format_bytes(limit)}"
        if limit_bytes is None:
            return ""
        return f"{charge}: the machine, or an outer cgroup that is not visible here, was full"

    def _killed_children(self) -> str:
        """Describe the child processes that the kernel killed, and the peak of the cell's cgroup."""
        if len(self._logs) > 1:
            return ""
        group = self._running.cgroup
        kills: tuple[Kill, ...] = ()
        if group:  # the group's name is unique, so that the whole kernel log can be searched
            log = kernel_log.position(at_end=False)
            kills = kernel_log.kills_since(log, group, self._running.pid or 0) or ()
        text = "".join(
            f"; the kernel killed {kill.command} (process {kill.pid}) with"
            f" {format_bytes(kill.anon_bytes or 0)} of anonymous memory"
            for kill in kills[:_NAMED]
            if not kill.is_main
        )
        peak = largest((self._peak_bytes, self._at_end.peak_bytes))
        return f"{text}; the peak of the cgroup was {format_bytes(peak)}" if peak else text

    @property
    def _is_ready(self) -> bool:
        return all(log.is_ready for log in self._logs)

    def _take(self, rank: int | None, event: events.Event | Phase) -> None:
        number = rank or 0
        log = self._logs[number]
        match event:
            case Phase():
                self._take_phase(log, event)
            case events.Baseline():
                self._take_baseline(log, event)
            case events.Ended():
                log.stderr_tail = event.stderr_tail
                self._ends[number] = Exit(event.code, event.signal)
            case _:
                log.take(event)
                if isinstance(event, events.Ready) and self._is_ready:
                    self._take_ready()
                if isinstance(event, events.Begin) and number == 0:
                    self._on_phase(event.name)
        meets = isinstance(event, events.Ready | events.Shared | events.Done)
        if isinstance(event, events.Baseline | Phase) or (meets and rank is not None):
            self._running.channel.send(ACKNOWLEDGEMENT)

    def _take_baseline(self, log: EventLog, event: events.Baseline) -> None:
        """Store one rank's memory before the load; the ranks load only after all have reported it."""
        is_last = all(each.baseline for each in self._logs if each is not log)
        if is_last and self._before_load:
            self._before_load()
        self._at_baseline = self._observe()
        log.take_baseline(event, self._at_baseline.usage_bytes)
        if not is_last:
            return
        for each in self._logs:  # all ranks share one cgroup, so each has the charge of all
            assert each.baseline
            usage = self._at_baseline.usage_bytes
            each.baseline = replace(each.baseline, cgroup_bytes=usage)
        self._watch_driver()
        if len(self._logs) > 1 and self._running.pid:
            self._rank_samplers = RankSamplers(self._running.pid, DEFAULT_INTERVAL_S)
        if self._observer and self._observer.reset_peak():
            self._peak_bytes = None

    def _take_phase(self, log: EventLog, phase: Phase) -> None:
        now = self._observe()
        phase = replace(phase, end=replace(phase.end, cgroup_bytes=now.usage_bytes))
        peak = now.peak_bytes
        if not self._is_ready:
            self._raise_peak(peak)
        before, self._at_phase_end = self._at_phase_end, now
        if len(self._logs) > 1:  # ranks share a cgroup, so its figures are of no single phase
            log.take_phase(phase)
            return
        if not (self._observer and self._observer.reset_peak()):
            peak = None  # without a reset, the high-water mark includes earlier phases
        refaults = grown(before.refaults, now.refaults)
        log.take_phase(replace(phase, peak_cgroup_bytes=peak, workingset_refault_file=refaults))

    def _take_ready(self) -> None:
        """Store the cgroup's figures at the time at which all ranks have read every byte."""
        self._at_ready = self._at_phase_end
        if len(self._logs) > 1:
            self._at_ready = self._observe()
            self._raise_peak(self._at_ready.peak_bytes)

    def _watch_driver(self) -> None:
        """Sample the worker's GPU memory with NVML; record whether NVML or CUDA gives the figure."""
        environment, pid = self.event_log.environment, self._running.pid
        if "gpu" not in environment:
            return
        try:
            self._driver = DriverMemory(environment["gpu_uuid"], pid)
        except NvmlUnavailable as reason:
            environment["cuda_driver_source"] = "cudaMemGetInfo"
            self.event_log.notes.append(
                "the GPU memory that the driver reports is that of all processes on the GPU:"
                f" {reason}"
            )
        else:
            environment["cuda_driver_source"] = "NVML, this process"
            environment["gpu_driver"] = self._driver.driver_version

    def _raise_peak(self, peak: int | None) -> None:
        self._peak_bytes = largest((self._peak_bytes, peak))

    def _peaks(self) -> Peaks:
        event_log = self.event_log
        phases = [phase for log in self._logs for phase in log.load_phases()]
        on_gpu = event_log.cuda_phases()
        rss: list[int | None] = [phase.peak_rss_bytes for phase in phases]
        if self._observer and not (self._is_ready or event_log.failure):
            # The worker died inside a phase, whose high-water mark only the last sample has.
            if self._rank_samplers:
                rss += self._rank_samplers.last_peaks_rss_bytes
            elif len(self._logs) == 1:
                rss.append(self._observer.last_peak_rss_bytes)
        baseline_ns = max(log.baseline_ns for log in self._logs)
        last_ns = max(log.ready_at_ns or math.inf for log in self._logs)
        seen: list[Memory | Sample] = []
        if len(self._logs) == 1:  # the memory of one rank is not the memory of the cell
            seen += [phase.end for phase in phases]
        if all(log.baseline for log in self._logs):
            seen += [each for each in self.samples if baseline_ns <= each.t_ns <= last_ns]
        number, private_bytes = self._observer.others if self._observer else (0, 0)
        return Peaks(
            rss_bytes=largest(rss),
            cgroup_bytes=self._peak_bytes,
            anon_sampled_bytes=largest(each.anon_bytes for each in seen),
            file_sampled_bytes=largest(each.file_bytes for each in seen),
            unreclaimable_sampled_bytes=_unreclaimable(seen),
            cuda_requested_bytes=largest(phase.peak_cuda_requested_bytes for phase in on_gpu),
            cuda_allocated_bytes=largest(phase.peak_cuda_allocated_bytes for phase in on_gpu),
            cuda_reserved_bytes=largest(phase.peak_cuda_reserved_bytes for phase in on_gpu),
            cuda_driver_sampled_bytes=largest(
                each.cuda_driver_bytes for each in seen if isinstance(each, Sample)
            ),
            pinned_bytes=largest(phase.peak_pinned_bytes for phase in on_gpu),
            pss_bytes=rank_logs.pss_bytes(self._logs),
            others_private_sampled_bytes=private_bytes if number and len(self._logs) == 1 else None,
        )

    def _faults(self, totals: Observation) -> Faults | None:
        refaults = grown(self._at_baseline.refaults, totals.refaults)
        counted = rank_logs.faults(self._logs, refaults)
        if self.event_log.baseline is None or self._is_ready or len(self._logs) > 1:
            return counted
        # The worker died inside a phase, whose page faults only the samples have.
        phases = self.event_log.load_phases()
        since_ns = phases[-1].end_ns if phases else self.event_log.baseline_ns
        seen = [each for each in self.samples if each.t_ns >= since_ns]
        if not seen:
            return counted
        before, first, last = counted or Faults(0, 0), seen[0], seen[-1]
        return Faults(
            before.minor + last.minor_faults - first.minor_faults,
            before.major + last.major_faults - first.major_faults,
            refaults,
        )

    def _pressure(self, totals: Observation) -> Pressure | None:
        before, after = self._at_baseline, totals
        some, full = grown(before.some_ns, after.some_ns), grown(before.full_ns, after.full_ns)
        return None if some is None and full is None else Pressure(some, full)

    def _warnings(self, outcome: Outcome, ended: Exit, *, forks: bool) -> list[str]:
        warnings = [self._running.unseen] if self._running.unseen else []
        warnings += self.event_log.notes
        if len(self._logs) > 1 and not self._running.cgroup:
            warnings.append(
                "without a cgroup, the memory that ranks share cannot be counted once, so the"
                " file-backed memory is that of the rank that has the most"
            )
        number, private_bytes = self._observer.others if self._observer else (0, 0)
        if private_bytes >= _NOTABLE_BYTES and len(self._logs) == 1 and not forks:
            started = f"{number} process{'es' * (number > 1)}"
            warnings.append(
                "peak RSS and anonymous memory are those of the measured process alone; it started"
                f" {started}, with {format_bytes(private_bytes)} of private memory in all (sampled)"
            )
        if ended.still_runs:
            warnings.append(
                "the measured process was still running when this was recorded: SIGKILL did not end"
                " it"
            )
        if self._oom_kills and outcome not in (Outcome.OOM_KILLED, Outcome.CHILD_KILLED):
            warnings.append(rank_logs.lost(self._oom_kills))
        return warnings

    def _observe(self) -> Observation:
        seen = self._observer.look() if self._observer else Observation()
        if self.event_log.baseline:  # a worker enters its cgroup only after it was started
            self.escape = self.escape or seen.escape
        return seen

    def _kill(self) -> None:
        """Kill the worker, read the peak, and lift the limit so that a thrashing process can exit.

        weighin lifts the limit only after the kill, so that the worker cannot raise the peak above
        the limit.
        """
        self._running.kill()
        if self._disk:
            self._disk.close()
        self._peak_at_kill = self._observe().peak_bytes
        if self._observer:
            self._observer.raise_limit()


def _with_cuda(
    samples: list[Sample],
    points: list[tuple[int, int, int]],
    driver_points: list[tuple[int, int]] | None,
) -> list[Sample]:
    """Return the samples; add to each sample the last GPU figures that were read until its time.

    ``points`` come from the worker: (monotonic ns, allocated bytes, driver's bytes).
    ``driver_points`` come from NVML and replace the worker's driver bytes; None without NVML.
    """
    if not points:
        return samples
    joined = []
    for sample in samples:
        _, allocated, driver = _latest(points, sample.t_ns) or (0, None, None)
        if driver_points is not None:
            driver = (_latest(driver_points, sample.t_ns) or (0, None))[1]
        joined.append(replace(sample, cuda_allocated_bytes=allocated, cuda_driver_bytes=driver))
    return joined


def _latest(points: Sequence[_Point], t_ns: int) -> _Point | None:
    index = bisect.bisect_right(points, t_ns, key=lambda point: point[0]) - 1
    return points[index] if index >= 0 else None


def _unreclaimable(seen: Sequence[Memory | Sample]) -> int | None:
    """Return the largest sum of anonymous and shared memory; None if no reading has shared memory."""
    if not any(each.shmem_bytes for each in seen):
        return None
    return max(each.anon_bytes + each.shmem_bytes for each in seen)
