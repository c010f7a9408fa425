"""Define the record of a cell (one measurement): a ``Result``. results/README.md says of every field what it is,
when it is None (not measured, never zero), and whether it is exact (a ``peak``) or sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from weighin.cell import Cell, is_of_use

SCHEMA: Final = 1
LIBRARY_IMPORT: Final = "import transformers"
UNNAMED: Final = "other"  # the phase of time outside all named ones, or of a whole load without any
# The phases that end at ``ready``: one reads every byte of a loaded model, one writes a saved checkpoint.
UNTIL_READY: Final = ("touch", "sync")
_BEFORE: Final = ("import", LIBRARY_IMPORT, "import diffusers", "import timm", "prepare")
# weighin's own phases, whose names a strategy must not use:
OURS: Final = (*_BEFORE, *UNTIL_READY, "verify", "forward", UNNAMED)
NOT_DROPPED: Final = "not dropped"  # the page cache of a cold cell whose checkpoint stayed in it
USUAL_PAGE_BYTES: Final = 4096  # on x86-64, and on arm64 in most distributions
# The windows of read-ahead of a mapped file that the kernel reads at once, and cannot reclaim meanwhile.
# Measured with 1, 2 and 4 threads: 3 to 5 windows of 8 MiB.
WINDOWS_IN_FLIGHT: Final = 4


class Outcome(StrEnum):
    OK = "ok"
    OOM_KILLED = "oom_killed"
    CHILD_KILLED = "child_killed"
    CUDA_OOM = "cuda_oom"
    TIMEOUT = "timeout"
    THRASHING = "thrashing"
    STRATEGY_FAILED = "strategy_failed"
    WRONG_WEIGHTS = "wrong_weights"
    SKIPPED = "skipped"
    MEASUREMENT_FAILED = "measurement_failed"
    COMMAND_FAILED = "command_failed"
    USE_FAILED = "use_failed"


# Outcomes that show a fault of the strategy, command or use, and not a limit that is too small:
BROKEN: Final = (
    Outcome.WRONG_WEIGHTS, Outcome.STRATEGY_FAILED, Outcome.COMMAND_FAILED, Outcome.USE_FAILED,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading of the measured processes' memory; from ``locked_bytes`` on, of a command's alone."""

    t_ns: int
    rss_bytes: int
    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    swap_bytes: int
    minor_faults: int
    major_faults: int
    cgroup_bytes: int | None = None
    cgroup_file_bytes: int | None = None
    cuda_allocated_bytes: int | None = None
    cuda_driver_bytes: int | None = None
    cgroup_shmem_bytes: int | None = None
    locked_bytes: int | None = None
    freed_bytes: int | None = None
    kernel_bytes: int | None = None
    kernel_reclaimable_bytes: int | None = None
    socket_bytes: int | None = None
    slab_bytes: int | None = None
    page_tables_bytes: int | None = None

    @property
    def page_cache_bytes(self) -> int:
        """The page cache that the kernel can reclaim; without a cgroup, only mapped page cache."""
        pages = self.file_bytes
        if self.cgroup_file_bytes is not None:
            pages = self.cgroup_file_bytes - self.shmem_bytes
        return max(pages - (self.locked_bytes or 0), 0)

    @property
    def reclaimable_bytes(self) -> int:
        """What the kernel can reclaim without swap: page cache, freed pages and its own caches."""
        caches = (self.freed_bytes or 0) + (self.kernel_reclaimable_bytes or 0)
        return self.page_cache_bytes + caches

    @property
    def needed_bytes(self) -> int:
        """What the kernel cannot reclaim without swap."""
        pages = self.anon_bytes + self.shmem_bytes + (self.locked_bytes or 0)
        return pages + self.kernel_needed_bytes

    @property
    def kernel_needed_bytes(self) -> int:
        own = (self.kernel_bytes or 0) - (self.kernel_reclaimable_bytes or 0)
        return max(own, 0) + (self.socket_bytes or 0)


@dataclass(frozen=True, slots=True)
class Memory:
    rss_bytes: int
    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    swap_bytes: int = 0
    cgroup_bytes: int | None = None
    cuda_allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    start_ns: int
    end_ns: int
    peak_rss_bytes: int
    end: Memory
    minor_faults: int
    major_faults: int
    peak_cgroup_bytes: int | None = None
    workingset_refault_file: int | None = None
    peak_cuda_requested_bytes: int | None = None
    peak_cuda_allocated_bytes: int | None = None
    peak_cuda_reserved_bytes: int | None = None
    peak_pinned_bytes: int | None = None


def phases_of(phases: Sequence[Phase], *, with_use: bool = False) -> Sequence[Phase]:
    """Return those of a worker's phases that belong to its load or save, or also to the use after it."""
    names = [phase.name for phase in phases]
    # The last ones count: a test that failed may have run again.
    last = {name: number for number, name in enumerate(names, 1)}
    start = max((last.get(name, 0) for name in _BEFORE), default=0)
    end = min((names.index(name) + 1 for name in UNTIL_READY if name in names), default=None)
    return phases[start : None if with_use else end]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks and sampled maxima from the start of the load until every byte was read (``ready``)."""

    rss_bytes: int | None = None
    cgroup_bytes: int | None = None
    anon_sampled_bytes: int | None = None
    file_sampled_bytes: int | None = None
    cuda_requested_bytes: int | None = None
    cuda_allocated_bytes: int | None = None
    cuda_reserved_bytes: int | None = None
    cuda_driver_sampled_bytes: int | None = None
    pinned_bytes: int | None = None
    unreclaimable_sampled_bytes: int | None = None
    shmem_sampled_bytes: int | None = None
    pss_bytes: int | None = None
    others_private_sampled_bytes: int | None = None
    kernel_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Faults:
    minor: int
    major: int
    workingset_refault_file: int | None = None


@dataclass(frozen=True, slots=True)
class Pressure:
    some_ns: int | None = None
    full_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """The wall time of a cell (``wall_ns``) and its parts. weighin itself takes the rest of it."""

    wall_ns: int
    import_ns: int | None = None
    load_ns: int | None = None
    touch_ns: int | None = None
    first_use_ns: int | None = None
    marks_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Written:
    file_bytes: int
    disk_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Use:
    anon_sampled_bytes: int | None = None
    gradients: str = ""
    children_private_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the processes that load a model together; its number is its index in ``Result.ranks``."""

    phase: str | None = None
    load_ns: int | None = None
    ready_ns: int | None = None
    peak_rss_bytes: int | None = None
    pss_bytes: int | None = None
    exit_code: int | None = None
    samples_path: str | None = None


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that a process had open or mapped up to the time when the command used most memory."""

    path: str
    size_bytes: int
    position_bytes: int | None = None
    mapped_bytes: int = 0
    is_open: bool = True
    seen_ns: int | None = None


@dataclass(slots=True)  # not frozen: ``ProcessTable`` fills one while the process runs
class Process:
    pid: int
    parent_pid: int
    command: str
    start_ns: int
    end_ns: int
    highest_rss_bytes: int | None = None
    anon_bytes: int | None = None
    file_bytes: int | None = None
    shmem_bytes: int | None = None
    files: tuple[OpenFile, ...] = ()
    copied_bytes: int | None = None
    grown_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    pid: int
    command: str
    is_main: bool
    limit_of: str = ""
    anon_bytes: int | None = None
    file_bytes: int | None = None
    shmem_bytes: int | None = None
    limit_bytes: int | None = None
    limit_is: str = ""
    kernel_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    t_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a thread; ``frames`` are "function (path/file.py:14)", the innermost first."""

    t_ns: int
    pid: int
    thread: str
    usage_bytes: int
    frames: tuple[str, ...]
    code: str = ""


@dataclass(frozen=True, slots=True)
class Track:
    """The phases of a process of a command other than the main one, which began the first phase."""

    pid: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class Ran:
    pid: int
    peak_ns: int | None = None
    needed_bytes: int | None = None
    needed_is_sampled: bool = True
    signal: int | None = None
    survived: bool = True
    processes: tuple[Process, ...] = ()
    kills: tuple[Kill, ...] = ()
    marks: tuple[Mark, ...] = ()
    stacks: tuple[Stack, ...] = ()
    ended: tuple[str, ...] = ()
    cold: tuple[str, ...] = ()
    frozen_ns: int = 0
    tracks: tuple[Track, ...] = ()
    at_peak: Sample | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stopped:
    after_ns: int
    timeout_s: float | None = None
    reference_ns: int | None = None
    size_bytes: int | None = None
    reread_bytes: int | None = None
    waited_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    schema: int
    cell: Cell
    outcome: Outcome
    message: str = ""
    last_phase: str | None = None
    model_bytes: int | None = None
    baseline: Memory | None = None
    peaks: Peaks = field(default_factory=Peaks)
    phases: tuple[Phase, ...] = ()
    load_ns: int | None = None
    ready_ns: int | None = None
    faults: Faults | None = None
    pressure: Pressure | None = None
    oom_kills: int | None = None
    limit_events: dict[str, int] | None = None
    exit_code: int | None = None
    cached_bytes_at_start: int | None = None
    touched_bytes_before: int | None = None
    written: Written | None = None
    cost: Cost | None = None
    samples_path: str | None = None
    trace_path: str | None = None  # of older records, as is the watcher: a merged run keeps them
    allocator_summary: str = ""
    started_at: str = ""
    watcher: Memory | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    sources_hash: str | None = None
    warnings: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()
    ranks: tuple[Rank, ...] = ()
    ran: Ran | None = None
    stopped: Stopped | None = None
    use: Use | None = None

    @property
    def above_import_bytes(self) -> int | None:
        """The peak RSS minus the RSS after ``import torch``, on which torch's libraries have no effect."""
        if self.peaks.rss_bytes is None or self.baseline is None:
            return None
        return self.peaks.rss_bytes - self.baseline.rss_bytes

    @property
    def import_bytes(self) -> int | None:
        if self.baseline is None:
            return None
        return (self.baseline.anon_bytes + self.baseline.shmem_bytes) * self.cell.ranks

    @property
    def use_phases(self) -> tuple[Phase, ...]:
        return tuple(phase for phase in self.phases if is_of_use(phase.name))

    @property
    def cache(self) -> str:
        """The state of the page cache before the load: ``NOT_DROPPED`` or ``cell.cache``."""
        is_warm = self.cell.cache == "cold" and self.cached_bytes_at_start
        return NOT_DROPPED if is_warm else self.cell.cache
