"""Define how each figure is read from a measurement's record, and the table column that shows it.

Sizes are integers in bytes, and times are floats in seconds. A figure that was not measured is None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from weighin.records import metrics
from weighin.records.metrics import largest, sum_of_peaks, through_first_pass_ns
from weighin.result import IMPORT_TRANSFORMERS, Result
from weighin.units import GIB

_GIB: Final = "GiB"
_MODEL: Final = "x model"
_DIGITS: Final = {_GIB: 3, "": 0}  # after the decimal point, by unit; two for other units


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a measurement, and the column of tables that shows the figure.

    Attributes:
        key: the name of the figure in rows and in summary.csv.
        unit: the unit in tables. If it is GiB, rows and summary.csv contain the figure in bytes.
        heading: the heading of the column; an empty heading means that tables have no such column.
        accuracy: "exact" or "sampled"; after "exact", the source of the figure may follow.
        at_least: the key in rows that tells whether the figure is only a lower bound; may be empty.
        is_usual: whether tables have the column even if the figure was never measured.
    """

    key: str
    unit: str
    heading: str
    read: Callable[[Result], float | None]
    accuracy: str = ""
    meaning: str = ""
    at_least: str = ""
    is_usual: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the figure is an integer: a size in bytes, or a number without a unit."""
        return self.unit in _DIGITS

    def text(self, value: float | None) -> str:
        """Return a value as text without the unit; "-" if the value is None."""
        scale = GIB if self.unit == _GIB else 1
        return "-" if value is None else f"{value / scale:.{_DIGITS.get(self.unit, 2)}f}"


def _seconds(read_ns: Callable[[Result], int | None]) -> Callable[[Result], float | None]:
    return lambda one: None if (time_ns := read_ns(one)) is None else time_ns / 1e9


def _import_transformers_ns(result: Result) -> int | None:
    phases = (one for one in result.phases if one.name == IMPORT_TRANSFORMERS)
    return next((phase.end_ns - phase.start_ns for phase in phases), None)


def _above_import_per_model(result: Result) -> float | None:
    above, size = result.above_import_bytes, result.model_bytes
    return above / size if above is not None and size else None


def _unreclaimable_bytes(result: Result) -> int | None:
    """Return the sampled maximum of anonymous and shared memory together. For a load or save, return
    None if it equals the maximum of anonymous memory, which has its own column.
    """
    peaks = result.peaks
    is_same = peaks.unreclaimable_sampled_bytes == peaks.anon_sampled_bytes
    return None if is_same and not result.ran else peaks.unreclaimable_sampled_bytes


# In the order of the columns of summary.csv.
COLUMNS: Final = {
    column.key: column
    for column in (
        Column("import_s", "s", "import", _seconds(lambda one: one.cost.import_ns if one.cost else None), "exact, clock", "time of import torch, which ends before the load begins"),
        Column("import_transformers_s", "s", "import transformers", _seconds(_import_transformers_ns), "exact, clock", "time of the import of the model's class from transformers, which ends before the load begins"),
        Column("load_s", "s", "load", _seconds(lambda one: one.load_ns), "exact, clock", "time until the strategy returned, without the pauses in which weighin reads the peaks", is_usual=True),
        Column("ready_s", "s", "ready", _seconds(lambda one: one.ready_ns), "exact, clock", "load plus the time until every byte of every parameter and buffer was read once, because a lazy load returns before it reads the file", is_usual=True),
        Column("ready_and_pass_s", "s", "ready + first pass", _seconds(lambda one: through_first_pass_ns(one) if one.cell.disk else None), "exact, clock", "ready plus the time of the first forward pass"),
        Column("use_s", "s", "use", _seconds(metrics.use_ns), "exact, clock", "time of the use of the loaded model, such as a training step"),
        Column("peak_rss_bytes", _GIB, "peak RSS", lambda one: one.peaks.rss_bytes, "exact, kernel", "the kernel's high-water mark of the resident set size (VmHWM) until every byte was read; for a killed load, the last reading", is_usual=True),
        Column("above_import_bytes", _GIB, "", lambda one: one.above_import_bytes),
        Column("anon_sampled_bytes", _GIB, "anonymous (sampled)", lambda one: one.peaks.anon_sampled_bytes, "sampled", "sampled maximum of the anonymous memory, which the kernel cannot reclaim; sampled from outside, so a short spike may be missed", is_usual=True),
        Column("file_sampled_bytes", _GIB, "page cache (sampled)", lambda one: one.peaks.file_sampled_bytes, "sampled", "sampled maximum of the resident pages of mapped files, which the kernel can reclaim; may occur at another time than the maximum of anonymous memory", is_usual=True),
        Column("peak_cgroup_bytes", _GIB, "cgroup peak", lambda one: one.peaks.cgroup_bytes, "exact, kernel", "highest memory charge of the cgroup of the load, including the page cache of files that it read first; a peak at the limit does not show that the load needs so much"),
        Column("peak_cuda_requested_bytes", _GIB, "CUDA requested", lambda one: one.peaks.cuda_requested_bytes, "exact, allocator", "peak of the bytes that tensors on the GPU requested during the load"),
        Column("peak_cuda_allocated_bytes", _GIB, "CUDA allocated", lambda one: one.peaks.cuda_allocated_bytes, "exact, allocator", "peak of the bytes that the allocator gave to tensors on the GPU: each request is rounded up to a block"),
        Column("peak_cuda_reserved_bytes", _GIB, "CUDA reserved", lambda one: one.peaks.cuda_reserved_bytes, "exact, allocator", "peak of the bytes that the allocator reserved from the driver"),
        Column("cuda_driver_sampled_bytes", _GIB, "CUDA driver (sampled)", lambda one: one.peaks.cuda_driver_sampled_bytes, "sampled", "sampled maximum of the GPU memory that the driver reports, which includes the CUDA context and buffers of libraries"),
        Column("peak_pinned_bytes", _GIB, "pinned", lambda one: one.peaks.pinned_bytes, "exact, its allocator", "peak of page-locked (pinned) host memory"),
        Column("baseline_rss_bytes", _GIB, "", lambda one: one.baseline.rss_bytes if one.baseline else None),
        Column("model_bytes", _GIB, "", lambda one: one.model_bytes),
        Column("written_bytes", _GIB, "written", lambda one: one.written.file_bytes if one.written else None, "exact", "total size of the files"),
        Column("written_disk_bytes", _GIB, "", lambda one: one.written.disk_bytes if one.written else None),
        Column("written_files", "", "files", lambda one: one.written.files if one.written else None, "exact", "number of files"),
        Column("unreclaimable_sampled_bytes", _GIB, "unreclaimable (sampled)", _unreclaimable_bytes, "sampled", "sampled maximum of the anonymous and shared memory, which the kernel cannot reclaim"),
        Column("pss_bytes", _GIB, "PSS of all ranks", lambda one: one.peaks.pss_bytes, "exact, kernel", "sum of the ranks' proportional set sizes when all ranks were ready"),
        Column("sum_of_peaks_bytes", _GIB, "sum of peaks (misleading)", sum_of_peaks, "exact, computed", "sum of the ranks' peak RSS, which counts shared pages once per rank"),
        Column("needed_bytes", _GIB, "needs", lambda one: one.ran.needed_bytes if one.ran else None, "sampled, or exact minus sampled", "the most memory of all processes that the kernel cannot reclaim: anonymous, shared, locked and kernel memory, without page cache. The larger of the samples and of the exact peak minus reclaimable memory. ≥ marks a figure of which a part is sampled", "needed_is_sampled", is_usual=True),
        Column("shmem_sampled_bytes", _GIB, "shared (sampled)", lambda one: one.peaks.shmem_sampled_bytes, "sampled", "sampled maximum of shared memory and files on tmpfs, such as /dev/shm"),
        Column("exit_code", "", "exit code", lambda one: one.exit_code, "exact", "exit code of the first process, or 128 + n if signal n ended the process"),
        Column("use_peak_rss_bytes", _GIB, "peak RSS of use", metrics.use_peak_rss_bytes, "exact, kernel", "highest resident set size during the use"),
        Column("use_peak_cgroup_bytes", _GIB, "cgroup peak of use", lambda one: largest(phase.peak_cgroup_bytes for phase in one.use_phases), "exact, kernel", "highest memory charge of the cgroup during the use"),
        Column("use_peak_cuda_allocated_bytes", _GIB, "CUDA allocated in use", lambda one: largest(phase.peak_cuda_allocated_bytes for phase in one.use_phases), "exact, allocator", "peak of the bytes that the allocator gave to tensors on the GPU during the use"),
        Column("use_anon_bytes", _GIB, "", metrics.use_anon_bytes),
        Column("use_anon_sampled_bytes", _GIB, "", metrics.use_most_anon_bytes),
        Column("use_child_bytes", _GIB, "forked process", metrics.use_child_bytes, "exact at that instant", "largest private dirty memory of a forked process, after the process wrote every weight"),
        Column("above_import_per_model", _MODEL, "above import", _above_import_per_model, "exact, computed", "peak RSS minus the resident set size after import torch, divided by the size of all parameters and buffers", is_usual=True),
        Column("use_most_per_model", _MODEL, "most in use", lambda one: metrics.per_model(one, metrics.use_most_anon_bytes(one)), "sampled", "sampled maximum of anonymous memory during the use, minus the anonymous memory after the imports, divided by the size of the model"),
        Column("use_anon_per_model", _MODEL, "after use", lambda one: metrics.per_model(one, metrics.use_anon_bytes(one)), "exact", "anonymous memory at the end of the use, minus the anonymous memory after the imports, divided by the size of the model"),
    )
}  # fmt: skip
