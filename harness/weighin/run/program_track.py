"""Measure the phases that one process of a command reports, with the kernel's high-water marks."""

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from msgspec import Struct

from weighin.probes.cgroup import PeakMark, grown
from weighin.probes.process import memory_of, parse_faults, read_status, read_text
from weighin.result import Memory, Phase
from weighin.text import one_line
from weighin.worker.phases import named_by_strategy

_MOST_PHASES: Final = 1000  # of one process, because a training loop may have millions
_LONGEST_NAME: Final = 64
_MOST_RENAMED: Final = 3  # in a warning


class Begin(Struct, tag_field="event", tag="begin"):
    """A message of a process: it begins the phase ``name``; ``id`` is of this phase alone."""

    id: int
    name: str


class End(Struct, tag_field="event", tag="end"):
    """A message of a process: the phase ``id`` ended at ``t_ns``."""

    id: int
    t_ns: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """A process's figures at one instant; ``peak_rss_bytes`` is VmHWM, the peak since its reset."""

    t_ns: int
    memory: Memory
    peak_rss_bytes: int
    faults: tuple[int, int]


@dataclass(slots=True)
class _Open:
    """A phase that has not ended; its peaks are the largest readings since the phase began."""

    name: str
    first: _Seen
    refaults: int | None
    peak_rss_bytes: int = 0
    peak_cgroup_bytes: int | None = None


class ProcessTrack:
    """Measures the phases of one process, which waits for the answer to each of its messages.

    ``group`` is the command's cgroup for the command's main process, and None for other processes.
    Only the main process's phases therefore have cgroup peaks.
    """

    def __init__(self, pid: int, group: PeakMark | None) -> None:
        self.highest_rss_bytes = 0
        self.died_in: str | None = None
        self._pid = pid
        self._group = group
        self._open: dict[int, _Open] = {}
        self._phases: list[Phase] = []
        self._highest: dict[str, int] = {}
        self._number_lost = 0
        self._renamed: dict[str, str] = {}
        self._resets = True
        self._resets_group = True
        self._last: _Seen | None = None

    @property
    def is_in_phase(self) -> bool:
        return bool(self._open)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that have ended, sorted by their start."""
        return tuple(sorted(self._phases, key=lambda phase: (phase.start_ns, -phase.end_ns)))

    @property
    def warnings(self) -> list[str]:
        """Texts for the record that name phases' figures that are missing or not exact."""
        found = []
        if not self._resets:
            found.append(
                f"the peak RSS of process {self._pid} could not be reset: the value of each phase"
                " is the peak since the process started"
            )
        if self._group and not self._resets_group:
            found.append(
                "the cgroup's peak could not be reset, so phases have no cgroup peak (cgroup v2"
                " needs Linux 6.12 for it)"
            )
        if self.died_in is not None:
            found.append(
                f"process {self._pid} ended inside its phase {self.died_in!r}, whose peak RSS is"
                " therefore sampled"
            )
        if self._number_lost:
            found.append(
                f"process {self._pid} had more than {_MOST_PHASES} phases: {self._number_lost} are"
                " not recorded, but for each name, the one with the highest peak RSS is"
            )
        if self._renamed:
            names = [f"{was!r} as {name!r}" for was, name in self._renamed.items()]
            found.append(
                f"process {self._pid} has phases that are recorded under other names"
                f" ({', '.join(names)}): a name has at most 64 letters, digits, spaces and"
                " _ . + / ( ) -, and is not that of one of weighin's own phases"
            )
        return found

    def take(self, event: Begin | End) -> None:
        """Begin or end a phase; the end of a phase that has not begun has no effect."""
        seen = self._look()
        if seen is None:
            return
        if isinstance(event, Begin):
            was, name = one_line(event.name, 2 * _LONGEST_NAME), _cleaned(event.name)
            if name != was and len(self._renamed) < _MOST_RENAMED:
                self._renamed[was] = name
            self._begin(event.id, name, seen)
        elif phase := self._open.pop(event.id, None):
            # The process sends the end's time, which may be invalid: keep it between begin and now.
            end_ns = min(max(phase.first.t_ns, event.t_ns), seen.t_ns)
            self._add(phase, replace(seen, t_ns=end_ns))

    def sample(self) -> None:
        """Read the figures of a process that is in a phase; end its phases if the process has ended."""
        if self._open and self._look() is None:
            self._end_all()

    def close(self) -> None:
        if self._open:
            self._look()
            self._end_all()

    def _begin(self, number: int, name: str, seen: _Seen) -> None:
        self._resets = _reset_peak_rss(self._pid) and self._resets
        if self._group:
            self._resets_group = self._group.reset() and self._resets_group
        refaults = self._group.cgroup.read_refaults() if self._group else None
        seen = replace(seen, t_ns=time.monotonic_ns())
        if before := self._open.pop(number, None):  # a phase from before the process called exec
            self._add(before, seen)
        self._open[number] = _Open(name, seen, refaults)

    def _look(self) -> _Seen | None:
        """Read the process's figures and raise its open phases' peaks; None if the process ended."""
        group_peak = self._group.read() if self._group else None
        for phase in self._open.values():
            if group_peak is not None:
                phase.peak_cgroup_bytes = max(group_peak, phase.peak_cgroup_bytes or 0)
        try:
            status = read_status(self._pid)
            faults = parse_faults(read_text(f"/proc/{self._pid}/stat"))
        except OSError:
            return None
        if "VmHWM" not in status:  # a zombie has no memory
            return None
        usage = self._group.cgroup.read_usage() if self._group else None
        memory = replace(memory_of(status), cgroup_bytes=usage)
        self._last = _Seen(time.monotonic_ns(), memory, status["VmHWM"], faults)
        self.highest_rss_bytes = max(self.highest_rss_bytes, status["VmHWM"])
        for phase in self._open.values():
            phase.peak_rss_bytes = max(phase.peak_rss_bytes, status["VmHWM"])
        return self._last

    def _end_all(self) -> None:
        """End all open phases at the last reading; set ``died_in`` to the innermost phase's name."""
        self.died_in = list(self._open.values())[-1].name
        while self._open:
            _, phase = self._open.popitem()
            last = self._last if self._last and self._last.t_ns >= phase.first.t_ns else phase.first
            self._add(phase, last)

    def _add(self, phase: _Open, end: _Seen) -> None:
        refaults = self._group.cgroup.read_refaults() if self._group else None
        first = phase.first
        added = Phase(
            name=phase.name,
            start_ns=first.t_ns,
            end_ns=end.t_ns,
            peak_rss_bytes=phase.peak_rss_bytes or first.memory.rss_bytes,
            end=end.memory,
            minor_faults=end.faults[0] - first.faults[0],
            major_faults=end.faults[1] - first.faults[1],
            peak_cgroup_bytes=phase.peak_cgroup_bytes if self._resets_group else None,
            workingset_refault_file=grown(phase.refaults, refaults),
        )
        self._keep(added)

    def _keep(self, phase: Phase) -> None:
        """Add a phase. After 1000 phases, it can only replace the phase of its name that has the
        highest peak RSS, if its own peak RSS is higher.
        """
        index = self._highest.get(phase.name)
        is_higher = index is None or phase.peak_rss_bytes > self._phases[index].peak_rss_bytes
        if len(self._phases) < _MOST_PHASES:
            if is_higher:
                self._highest[phase.name] = len(self._phases)
            self._phases.append(phase)
            return
        self._number_lost += 1
        if is_higher and index is not None:
            self._phases[index] = phase


def _reset_peak_rss(pid: int) -> bool:
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:  # the process has ended, or is another user's
        return False
    return True


def _cleaned(name: str) -> str:
    """Return a valid name of a phase, in which "_" replaces each character that is not allowed."""
    name = re.sub(r"[^A-Za-z0-9 _.+/()-]", "_", one_line(name, _LONGEST_NAME))
    if not re.match(r"[A-Za-z0-9]", name):
        name = f"phase {name}"[:_LONGEST_NAME].strip()
    try:
        return named_by_strategy(name)
    except ValueError:  # weighin has a phase of this name
        return f"{name} (program)"
