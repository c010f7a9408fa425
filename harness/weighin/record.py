"""What was measured: one ``Result`` a cell. results/README.md is the contract of every field.

Bytes and nanoseconds are integers; times are of the machine's monotonic clock. None means that
a figure was not measured, never that it was zero. ``peak`` stands only before a mark that the
kernel or the allocator keeps itself; the largest of samples is called ``sampled``.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from weighin.cell import Cell

SCHEMA: Final = 1
USUAL_PAGE_BYTES: Final = 4096
"""Of a page of memory on x86-64, and on arm64 as most distributions build it."""


class Outcome(StrEnum):
    """What happened in a cell."""

    OK = "ok"
    OOM_KILLED = "oom_killed"
    CUDA_OOM = "cuda_oom"
    TIMEOUT = "timeout"
    STRATEGY_FAILED = "strategy_failed"
    WRONG_WEIGHTS = "wrong_weights"
    SKIPPED = "skipped"
    MEASUREMENT_FAILED = "measurement_failed"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look from outside at a running worker. ``t_ns`` is monotonic."""

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


@dataclass(frozen=True, slots=True)
class Memory:
    """The worker's memory at one instant, exact."""

    rss_bytes: int
    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    swap_bytes: int = 0
    cgroup_bytes: int | None = None
    cuda_allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the worker's life between two marks, with the exact peaks inside it.

    ``peak_cgroup_bytes`` is None where the kernel's mark could not be reset at the phase's start.
    """

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


@dataclass(frozen=True, slots=True)
class Peaks:
    """The highest figures from the start of the load until every byte was read (``ready``)."""

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


@dataclass(frozen=True, slots=True)
class Faults:
    """Page faults and refaults from the start of the load until ``ready``."""

    minor: int
    major: int
    workingset_refault_file: int | None = None


@dataclass(frozen=True, slots=True)
class Pressure:
    """Stall times of the cell's cgroup from the load's start until ``ready``; None where PSI is off."""

    some_ns: int | None = None
    full_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """Where a cell's wall time went. The harness's own share is what the worker's parts leave."""

    wall_ns: int
    import_ns: int | None = None
    load_ns: int | None = None
    touch_ns: int | None = None
    first_use_ns: int | None = None
    marks_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What a save left in its folder: bytes of its files, and of the blocks that they take."""

    file_bytes: int
    disk_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Result:
    """All that is known about one cell; one line of ``records.jsonl``."""

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
    trace_path: str | None = None
    allocator_summary: str = ""
    started_at: str = ""
    watcher: Memory | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    sources_hash: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def page_bytes(self) -> int:
        """The size of the pages that this machine counts, in bytes."""
        return int(self.environment.get("page_bytes", USUAL_PAGE_BYTES))
