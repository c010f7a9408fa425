"""Collect a worker's events, and derive its phases, times and outcome from them."""

import signal
from dataclasses import dataclass, field, replace
from typing import Any

from weighin.child_process import printed_lines
from weighin.isolation.base import Exit
from weighin.probes.allocator_trace import Trace
from weighin.result import Cost, Faults, Memory, Outcome, Phase, Use, Written
from weighin.run import events
from weighin.text import one_line
from weighin.uses import FORWARD, is_of_use

_STDERR_LENGTH = 200
LOST_CHILD = "the measured process lost a child, killed by the kernel for lack of memory"


@dataclass(slots=True)
class EventLog:
    """The events of one worker so far, added by ``weighin.run.supervisor`` as they arrive."""

    baseline: Memory | None = None
    baseline_ns: int = 0
    ready_at_ns: int | None = None
    phases: list[Phase] = field(default_factory=list)
    current: str | None = None
    facts: dict[str, int | None] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    cuda_points: list[tuple[int, int, int]] = field(default_factory=list)
    written: Written | None = None
    use: Use = field(default_factory=Use)
    notes: list[str] = field(default_factory=list)
    trace: Trace | None = None
    failure: tuple[Outcome, str] | None = None
    allocator_summary: str = ""
    stderr_tail: str = ""
    """The end of the standard error of a rank that failed; else empty."""
    done: bool = False
    _in_phase: bool = False
    _before_load: int = 0  # the number of phases before the baseline
    _until_loaded: int | None = None  # the number of phases before ``loaded``
    _until_ready: int | None = None  # the number of phases before ``ready``

    @property
    def is_ready(self) -> bool:
        return self.ready_at_ns is not None

    def take(self, event: events.Event) -> None:
        """Add any event except ``Baseline``, a phase, and ``Ended``."""
        match event:
            case events.Begin():
                self.current, self._in_phase = event.name, True
            case events.Cuda():
                self.cuda_points += event.points
            case events.Note():
                self.notes.append(event.text)
            case events.Trace():
                self.trace = self.trace or Trace(event.requested_bytes, event.reserved_bytes)
                self.trace.events += event.events
            case events.Loaded():
                self._until_loaded = len(self.phases)
                self.facts["load_ns"] = event.load_ns
            case events.Ready():
                self.ready_at_ns, self._until_ready = event.t_ns, len(self.phases)
                self.facts["touch_ns"] = event.touch_ns
                self.written = event.written
            case events.Failed():
                self.failure = event.outcome, event.message
                self.allocator_summary = event.summary
            case events.Used():
                self.use = Use(None, event.gradients, event.children_private_bytes)
            case events.Shared():
                self.facts["pss_bytes"] = event.pss_bytes
            case events.Done():
                self.facts |= {"first_use_ns": event.first_use_ns, "marks_ns": event.marks_ns}
                self.done = True

    def take_baseline(self, event: events.Baseline, cgroup_bytes: int | None) -> None:
        """Add the event ``baseline``, the memory before the load; later phases belong to the load."""
        self.baseline = replace(event.memory, cgroup_bytes=cgroup_bytes)
        self.baseline_ns, self._before_load = event.t_ns, len(self.phases)
        self.environment = event.environment
        self.facts["import_ns"] = event.import_ns
        self.current = None  # the phases before the baseline are weighin's own

    def take_phase(self, phase: Phase) -> None:
        self.phases.append(phase)
        self._in_phase = False

    def where(self) -> str:
        """Return the worker's position in words: "in phase 'read'" or "after phase 'read'"."""
        if self.current is None:
            return "before its first phase"
        return f"{'in' if self._in_phase else 'after'} phase {self.current!r}"

    def load_phases(self) -> list[Phase]:
        """Return the load's ended phases, up to the phase in which the worker read every byte."""
        return self.phases[self._before_load : self._until_ready] if self.baseline else []

    def cuda_phases(self) -> list[Phase]:
        """Return the load's phases before the checksums, which themselves allocate GPU memory."""
        return self.load_phases()[: (self._until_loaded or len(self.phases)) - self._before_load]

    def load_ns(self) -> int | None:
        return self.facts.get("load_ns")

    def ready_ns(self) -> int | None:
        """Return the load time plus the time to read every byte once; None if either is unknown.

        For a save, the time is the save time plus the time to sync every byte to the disk.
        """
        load_ns, touch_ns = self.load_ns(), self.facts.get("touch_ns")
        return None if load_ns is None or touch_ns is None else load_ns + touch_ns

    def cost(self) -> Cost:
        """Return the times that the worker reported; ``wall_ns`` is 0 until the caller sets it."""
        names = ("import_ns", "load_ns", "touch_ns", "first_use_ns", "marks_ns")
        return Cost(wall_ns=0, **{name: self.facts.get(name) for name in names})

    def faults(self, refaults: int | None) -> Faults | None:
        """Return the load's page faults; ``refaults`` is the cgroup's count, which the caller read."""
        phases = self.load_phases()
        if not phases:
            return None
        minor = sum(phase.minor_faults for phase in phases)
        return Faults(minor, sum(phase.major_faults for phase in phases), refaults)

    def judge(
        self,
        ended: Exit,
        oom_kills: int | None,
        stderr_tail: bytes,
        machine_oom_kills: int | None = None,
    ) -> tuple[Outcome, str]:
        """Return the outcome of a worker that ended before it was done, and the reason in one line.

        The outcome is ``oom_killed`` only if a kill counter of the kernel or the Docker engine
        shows a kill for lack of memory; a high peak is no proof. If the kernel killed only a child
        process, the outcome is ``oom_killed`` only if the worker failed, too. For a worker without
        a cgroup, the OOM kills of the whole machine (``machine_oom_kills``) decide.
        """
        if self.failure:
            outcome, message = self.failure
            if oom_kills and outcome in (Outcome.STRATEGY_FAILED, Outcome.USE_FAILED):
                outcome, message = Outcome.OOM_KILLED, f"{LOST_CHILD}; then it failed: {message}"
            return outcome, message
        if ended.signal == signal.SIGKILL and (oom_kills or ended.oom_killed):
            return Outcome.OOM_KILLED, f"killed by the kernel for lack of memory {self.where()}"
        if ended.signal == signal.SIGKILL and oom_kills is None and machine_oom_kills:
            why = "killed by the kernel when the whole machine ran out of memory"
            return Outcome.OOM_KILLED, f"{why}, {self.where()}"
        how = f"ended with exit code {ended.code}"
        if ended.still_runs:
            how = "does not end, not even after SIGKILL,"
        elif ended.signal:
            how = f"was ended by {ended.signal_name}"
        lines = printed_lines(stderr_tail)
        if lines and ended.signal and lines[-1].startswith(signal.strsignal(ended.signal) or "?"):
            lines.pop()  # the shell in a container prints the signal as its last line
        last = f": {one_line(lines[-1], _STDERR_LENGTH)}" if lines else ""
        if oom_kills and ended.signal is None and not ended.still_runs:
            return Outcome.OOM_KILLED, f"{LOST_CHILD}; then it {how} {self.where()}{last}"
        in_load = self.baseline is not None and not ended.still_runs
        outcome = Outcome.STRATEGY_FAILED if in_load else Outcome.MEASUREMENT_FAILED
        if in_load and self.current != FORWARD and is_of_use(self.current or ""):
            outcome = Outcome.USE_FAILED
        return outcome, f"the measured process {how} {self.where()}{last}"
