"""Define the record of a measurement: one ``Result`` per cell. results/README.md documents each field.

Bytes and nanoseconds are integers, and times come from the machine's monotonic clock. None means that
a figure was not measured, never that the figure was zero. A field with ``peak`` in its name is a
high-water mark that the kernel or the allocator keeps. A field with ``sampled`` in its name is the
maximum of the sampler's readings.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from weighin.cell import Cell
from weighin.uses import is_of_use

SCHEMA: Final = 1
IMPORT_TRANSFORMERS: Final = "import transformers"
"""The phase in which a worker imports the class of a transformers model, before the baseline."""
IMPORTS_OF_LIBRARIES: Final = (IMPORT_TRANSFORMERS, "import diffusers", "import timm")
"""The phases in which a worker imports the class of a model; each library has its own phase."""

UNNAMED: Final = "other"
"""The name of a time outside every phase, and of a load whose strategy names no phase."""

OURS: Final = (
    "import",
    *IMPORTS_OF_LIBRARIES,
    "prepare",
    "touch",
    "sync",
    "verify",
    "forward",
    UNNAMED,
)
"""The names of weighin's own phases, which a strategy must not use."""

NOT_DROPPED: Final = "not dropped"
"""The page-cache state of a cell that was to be cold, if pages of the checkpoint stayed cached."""

USUAL_PAGE_BYTES: Final = 4096
"""The page size on x86-64, and on arm64 in most distributions."""

WINDOWS_IN_FLIGHT: Final = 4
"""The number of read-ahead windows of a mapped file that the kernel reads at once. Pages of these
windows cannot be reclaimed. Measured: 3 to 5 windows of 8 MiB, with 1, 2 or 4 threads.
"""


class Outcome(StrEnum):
    """How a cell ended."""

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


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading of the measured process's memory (worker), from outside, at the time ``t_ns``."""

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


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the measured process (worker) at one instant, by the kernel and the allocator."""

    rss_bytes: int
    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    swap_bytes: int = 0
    cgroup_bytes: int | None = None
    cuda_allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """A named part of a load or save, with the peaks within it.

    ``peak_cgroup_bytes`` is None where the kernel's high-water mark could not be reset at the start
    of the phase.
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
    """The peaks and sampled maxima from the start of the load until every byte was read (``ready``).

    ``others_private_sampled_bytes`` is the private memory of all processes that the worker started;
    the other figures of a process are of the worker alone. In a cell of several ranks,
    ``rss_bytes`` is the highest peak of a rank. The sampled maxima are then sums over all ranks,
    with shared pages counted once. ``pss_bytes`` is the sum of all ranks' proportional set sizes
    when all ranks were ready.
    """

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


@dataclass(frozen=True, slots=True)
class Faults:
    """Page faults and refaults from the start of the load until every byte was read (``ready``)."""

    minor: int
    major: int
    workingset_refault_file: int | None = None


@dataclass(frozen=True, slots=True)
class Pressure:
    """Stall times (PSI) of the cell's cgroup, from the start of the load until every byte was read."""

    some_ns: int | None = None
    full_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """A cell's wall time ``wall_ns`` and its parts; the rest is time that weighin itself took."""

    wall_ns: int
    import_ns: int | None = None
    load_ns: int | None = None
    touch_ns: int | None = None
    first_use_ns: int | None = None
    marks_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """The size of a saved checkpoint: the length, the disk blocks and the number of its files."""

    file_bytes: int
    disk_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Use:
    """Facts about the use of a loaded model (such as a training step), in addition to its phase.

    Attributes:
        anon_sampled_bytes: the sampled maximum of the worker's anonymous memory during the use.
        gradients: "backward" if a backward pass computed the gradients of a step, "synthetic" if
            weighin filled the gradients in; empty for a use without gradients.
        children_private_bytes: the private dirty memory of each forked process, after it wrote every
            weight.
    """

    anon_sampled_bytes: int | None = None
    gradients: str = ""
    children_private_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rank:
    """One of several processes (ranks) of a cell that load the model together; its index in
    ``Result.ranks`` is the rank's number.

    ``phase`` is the last phase that the rank began. ``samples_path`` is the file with this rank's
    samples.
    """

    phase: str | None = None
    load_ns: int | None = None
    ready_ns: int | None = None
    peak_rss_bytes: int | None = None
    pss_bytes: int | None = None
    exit_code: int | None = None
    samples_path: str | None = None


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that a process had open or mapped when the command used most memory.

    ``position_bytes`` is the file offset of the next read; None for a file that is only mapped.
    ``is_open`` is False for a file that the process read and closed before. ``seen_ns`` is the time of
    the first sample that found the file open, which is later than the time of the open.
    """

    path: str
    size_bytes: int
    position_bytes: int | None = None
    mapped_bytes: int = 0
    is_open: bool = True
    seen_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a command, from the process's first to its last sample.

    ``anon_bytes``, ``file_bytes`` and ``shmem_bytes`` are the process's proportional shares (PSS) when
    the whole command used most memory; None if the process did not run then. ``highest_rss_bytes`` is
    the kernel's VmHWM at the last sample, which misses a later peak.
    """

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


@dataclass(frozen=True, slots=True)
class Kill:
    """One process that the kernel killed for lack of memory, according to the kernel's log.

    ``limit_of`` is the cgroup that reached its limit: empty for the command's own cgroup, "machine"
    if the whole machine had no memory left, "unknown" without a log entry, else the path of another
    cgroup. ``limit_bytes`` is the limit that was reached: of the command's cgroup or of a cgroup
    around it; None for any other kill.
    """

    pid: int
    command: str
    is_main: bool
    limit_of: str = ""
    anon_bytes: int | None = None
    file_bytes: int | None = None
    shmem_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A line of a command's output that matched the regular expression of ``--mark``."""

    t_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of one thread of a process while the whole command used ``usage_bytes``.

    ``usage_bytes`` does not include page cache, which the kernel can reclaim. ``frames`` are texts
    "function (path/of/file.py:14)", the innermost first. ``code`` is the source line of the innermost
    frame outside of libraries; empty if the source could not be read.
    """

    t_ns: int
    pid: int
    thread: str
    usage_bytes: int
    frames: tuple[str, ...]
    code: str = ""


@dataclass(frozen=True, slots=True)
class Track:
    """The phases of a process of a command, other than the main process; the peaks are of this
    process alone.

    The main process is the process that began the first phase. It has no track: its phases are
    ``Result.phases``.
    """

    pid: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class Ran:
    """Facts about a command that the record of a load does not have.

    Attributes:
        pid: the pid of the command's first process, as weighin's process sees it.
        peak_ns: the time of the sample with the most memory; None without samples.
        needed_bytes: the largest sum of anonymous and shared memory, without page cache. If
            ``needed_is_sampled``, the need may be larger, because a short peak can fall between two
            samples.
        signal: the signal that ended the first process; None if the process exited.
        survived: whether the first process ended by itself, although the kernel killed another
            process.
        ended: command lines of the processes that weighin stopped, because they still ran at the end.
        cold: the paths whose page cache was dropped before the start.
        frozen_ns: the time for which the command was stopped while weighin read its stacks.
        tracks: the phases of further processes; the phases of the first are ``Result.phases``.
    """

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


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why weighin killed a running cell: the time-out, or the proof that the cell thrashed.

    Attributes:
        after_ns: the time from the cell's start to the kill.
        timeout_s: the time-out, in seconds; None for a cell that was proven to thrash.
        reference_ns: the time of the same cell without a limit.
        size_bytes: the size to compare with ``reread_bytes``. For a load, the larger one of the model
            and the files mapped by the imports; for a command, its need and page cache without a limit.
        reread_bytes: bytes that the load (or command) read again after the kernel reclaimed them.
        waited_ns: the time in which some task of the load (or command) waited for memory.
    """

    after_ns: int
    timeout_s: float | None = None
    reference_ns: int | None = None
    size_bytes: int | None = None
    reread_bytes: int | None = None
    waited_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The complete record of one cell: one line of ``records.jsonl``."""

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
    ranks: tuple[Rank, ...] = ()
    ran: Ran | None = None
    stopped: Stopped | None = None
    use: Use | None = None

    @property
    def above_import_bytes(self) -> int | None:
        """The peak RSS minus the RSS after ``import torch``; None if one of the two is unknown.

        Unlike the peak RSS, this difference does not depend on the size of torch's libraries.
        """
        if self.peaks.rss_bytes is None or self.baseline is None:
            return None
        return self.peaks.rss_bytes - self.baseline.rss_bytes

    @property
    def use_phases(self) -> tuple[Phase, ...]:
        """The phases of the model's use after the load; each forward pass is one phase."""
        return tuple(phase for phase in self.phases if is_of_use(phase.name))

    @property
    def cache(self) -> str:
        """The page cache before the load; ``NOT_DROPPED`` if pages of a cold cell stayed cached."""
        is_warm = self.cell.cache == "cold" and self.cached_bytes_at_start
        return NOT_DROPPED if is_warm else self.cell.cache

    @property
    def page_bytes(self) -> int:
        """The page size of the measuring machine."""
        return int(self.environment.get("page_bytes", USUAL_PAGE_BYTES))

    @property
    def in_flight_bytes(self) -> int:
        """How many bytes of a mapped file the kernel reads ahead; 0 if the read-ahead is unknown."""
        return WINDOWS_IN_FLIGHT * int(self.environment.get("read_ahead_bytes", 0))
