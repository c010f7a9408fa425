"""Read the figures of one record, and summarise them over the repeats of a measurement.

``FIGURES`` is the one list of figures: a new figure is a line there. Those with a name are compared by
``weighin check``, with a default tolerance from repeated runs (docs/ci.md). Most of the variation is freed
heap memory, which glibc keeps in some runs. peak_cgroup varies because the kernel charges the pages of
torch's libraries to the process that reads them first.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from weighin.cell import Operation
from weighin.errors import UnknownName
from weighin.result import LIBRARY_IMPORT, UNNAMED, UNTIL_READY, Outcome, Phase, Result, phases_of
from weighin.units import GIB, MIB, format_bytes, format_seconds, parse_bytes, parse_seconds

Direction = Literal["lower", "higher", "both"]
"""Whether a lower or a higher value is better; with "both", a change either way is a regression."""

_LOADS: Final[tuple[Operation, ...]] = ("load",)
_OF_MODELS: Final[tuple[Operation, ...]] = (*_LOADS, "save")
_Number = TypeVar("_Number", int, float)
_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def middle(values: Iterable[_Number | None]) -> _Number | None:
    """Return the median of the values that are not None; of two middle values the lower, which was measured."""
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if known else None


def largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return the items in groups of equal keys; groups and items keep the order of ``items``."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def latest(results: Iterable[Result]) -> list[Result]:
    """Return the last record of each cell, in the order of the cells' first records."""
    return list({result.cell.id: result for result in results}.values())


def outcome_of(outcomes: Iterable[Outcome]) -> str:
    """Return the outcome that all repeats share, else all with their counts: "ok 2, timeout 1"."""
    counts = Counter(outcomes)
    texts = [f"{outcome.value} {count}" for outcome, count in counts.items()]
    return next(iter(counts)).value if len(counts) == 1 else ", ".join(texts)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much a metric may get worse than the range of the repeats in the baseline file: the larger of
    ``relative``, a share of the median, and ``absolute``, in bytes or nanoseconds.
    """

    relative: float
    absolute: int
    direction: Direction = "lower"

    def allowance(self, was: int) -> int:
        """Return the allowed difference from the earlier value ``was``, in the unit of ``was``."""
        return max(round(self.relative * was), self.absolute)


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a result: a column of summary.csv and of tables, and what ``weighin check`` compares."""

    key: str  # the column, in bytes or seconds; "" for a figure that only ``weighin check`` knows
    heading: str  # in tables; "" if they have no such column
    unit: Literal["bytes", "ns", "x model", ""]
    accuracy: str  # "exact" (after it, the source may follow) or "sampled"
    read: Callable[[Result], float | None]
    meaning: str = ""
    name: str = ""  # in baseline files; "" for a figure that is not compared
    in_phase: str = ""  # the key in ``PHASE_FIGURES`` of what shows in which phase the figure grew
    tolerance: Tolerance = Tolerance(0.0, 0)
    operations: tuple[Operation, ...] = (*_OF_MODELS, "command")  # those that are compared
    # Compared only if there is a use: old records lack those of a forward pass.
    is_of_use: bool = False
    is_usual: bool = False  # whether tables have the column even if the figure was never measured
    at_least: str = ""  # the key in rows that tells whether the figure is only a lower bound
    rank: int = 0  # a terminal that is too narrow leaves the columns of the highest rank out first

    @property
    def exact(self) -> bool:
        return self.accuracy.startswith("exact")

    def of(self, result: Result) -> int | None:
        """Return the metric's value in a result; None if it was not measured, or does not apply."""
        lacks_use = self.is_of_use and not result.cell.use
        applies = result.cell.operation in self.operations and not lacks_use
        value = self.read(result) if applies else None
        return None if value is None else round(value)

    @property
    def title(self) -> str:
        """The printed name, followed by "(sampled)" if samples can miss the true peak."""
        return self.name if self.exact or self.unit == "ns" else f"{self.name} (sampled)"

    def text(self, value: int) -> str:
        """Return ``value`` rounded for readers: "1.549 GiB", "736.9 MiB", "2.31 s"."""
        size = format_bytes(value, digits=3 if abs(value) >= GIB else 1)
        return format_seconds(value) if self.unit == "ns" else size

    def parse(self, text: str) -> int:
        return parse_bytes(text) if self.unit == "bytes" else parse_seconds(text)

    def change(self, was: int, now: int) -> str:
        """Return the change from ``was`` to ``now`` with its sign: "+35.2 MiB (+2.2 %)"."""
        if was == now:
            return "±0"
        sign, step = "+" if now > was else "-", abs(now - was)
        text = format_bytes(step, digits=1) if self.unit == "bytes" else format_seconds(step)
        return f"{sign}{text}" + (f" ({sign}{step / was * 100:.1f} %)" if was else "")


def use_needed_bytes(result: Result) -> int:
    """Return the sampled anonymous memory and the private memory of forked processes; 0 without a use."""
    use = result.use
    return (use.anon_sampled_bytes or 0) + sum(use.children_private_bytes) if use else 0


def per_model(result: Result, size: float | None) -> float | None:
    """Return ``size`` minus the anonymous memory before the load, divided by the model's size."""
    if size is None or result.baseline is None or not result.model_bytes:
        return None
    return (size - result.baseline.anon_bytes) / result.model_bytes


def through_first_pass_ns(result: Result) -> int | None:
    """Return the time until ready plus the first pass, in which a mapped model may wait for the disk."""
    pass_ns = _time_of("forward", result)
    return None if result.ready_ns is None or pass_ns is None else result.ready_ns + pass_ns


def _time_of(phase: str, result: Result) -> int | None:
    return next((one.end_ns - one.start_ns for one in result.phases if one.name == phase), None)


def charge(result: Result) -> int | None:
    """Return the peak of a cell's cgroup minus the cgroup's usage before the load, in bytes."""
    before = result.baseline.cgroup_bytes if result.baseline else None
    peak = result.peaks.cgroup_bytes
    return None if before is None or peak is None else peak - before


def sum_of_peaks(result: Result) -> int | None:
    """Return the sum of the ranks' peak RSS, which counts a shared page once for each rank."""
    peaks = [rank.peak_rss_bytes for rank in result.ranks]
    return sum(peak for peak in peaks if peak) if peaks and None not in peaks else None


_HEAP: Final = Tolerance(relative=0.01, absolute=16 * MIB)
_CACHE: Final = Tolerance(relative=0.04, absolute=128 * MIB)
_FLOOR: Final = Tolerance(relative=0.03, absolute=24 * MIB)
# A busy machine can slow a load down by as much as this tolerance.
_TIME: Final = Tolerance(relative=3.0, absolute=5_000_000_000)

# The figures with a key are in the order of the columns of summary.csv. A use of several forward passes
# has one phase for each: its peak is the highest of them, its memory that at the end of the last one.
FIGURES: Final = (
    Metric("import_s", "import", "ns", "exact, clock", lambda r: r.cost.import_ns if r.cost else None, "time of import torch, which ends before the load begins", rank=21),
    Metric("import_transformers_s", "import transformers", "ns", "exact, clock", lambda r: _time_of(LIBRARY_IMPORT, r), "time of the import of the model's class from transformers, which ends before the load begins", rank=18),
    Metric("load_s", "load", "ns", "exact, clock", lambda r: r.load_ns, "time until the strategy returned, without the pauses in which weighin reads the peaks", "load", "time", _TIME, _OF_MODELS, is_usual=True),
    Metric("ready_s", "ready", "ns", "exact, clock", lambda r: r.ready_ns, "load plus the time until every byte of every parameter and buffer was read once, because a lazy load returns before it reads the file", "ready", "time", _TIME, _OF_MODELS, is_usual=True),
    Metric("ready_and_pass_s", "ready + first pass", "ns", "exact, clock", lambda r: through_first_pass_ns(r) if r.cell.disk else None, "ready plus the time of the first forward pass"),
    Metric("use_s", "use", "ns", "exact, clock", lambda r: sum(one.end_ns - one.start_ns for one in r.use_phases) if r.use_phases else None, "time of the use of the loaded model, such as a training step", "use", "time", _TIME, _LOADS, is_of_use=True, rank=1),
    Metric("peak_rss_bytes", "peak RSS", "bytes", "exact, kernel", lambda r: r.peaks.rss_bytes, "the kernel's high-water mark of the resident set size (VmHWM) until every byte was read; for a killed load, the last reading", "peak_rss", "peak_rss", _HEAP, is_usual=True),
    Metric("above_import_bytes", "", "bytes", "exact, computed", lambda r: r.above_import_bytes, "", "above_import", "peak_rss", _HEAP),
    Metric("anon_sampled_bytes", "anonymous (sampled)", "bytes", "sampled", lambda r: r.peaks.anon_sampled_bytes, "sampled maximum of the anonymous memory, which the kernel cannot reclaim; sampled from outside, so a short spike may be missed", "anon", "peak_rss", _HEAP, is_usual=True, rank=3),
    Metric("file_sampled_bytes", "page cache (sampled)", "bytes", "sampled", lambda r: r.peaks.file_sampled_bytes, "sampled maximum of the resident pages of mapped files, which the kernel can reclaim; may occur at another time than the maximum of anonymous memory", is_usual=True, rank=6),
    Metric("peak_cgroup_bytes", "cgroup peak", "bytes", "exact, kernel", lambda r: r.peaks.cgroup_bytes, "highest memory charge of the cgroup of the load, including the page cache of files that it read first; a peak at the limit does not show that the load needs so much", "peak_cgroup", "peak_cgroup", _CACHE, rank=17),
    Metric("peak_cuda_requested_bytes", "CUDA requested", "bytes", "exact, allocator", lambda r: r.peaks.cuda_requested_bytes, "peak of the bytes that tensors on the GPU requested during the load", "cuda_requested", "cuda_requested", rank=13),
    Metric("peak_cuda_allocated_bytes", "CUDA allocated", "bytes", "exact, allocator", lambda r: r.peaks.cuda_allocated_bytes, "peak of the bytes that the allocator gave to tensors on the GPU: each request is rounded up to a block", "cuda_allocated", "cuda_allocated"),
    Metric("peak_cuda_reserved_bytes", "CUDA reserved", "bytes", "exact, allocator", lambda r: r.peaks.cuda_reserved_bytes, "peak of the bytes that the allocator reserved from the driver", "cuda_reserved", "cuda_reserved", rank=9),
    Metric("cuda_driver_sampled_bytes", "CUDA driver (sampled)", "bytes", "sampled", lambda r: r.peaks.cuda_driver_sampled_bytes, "sampled maximum of the GPU memory that the driver reports, which includes the CUDA context and buffers of libraries", rank=12),
    Metric("peak_pinned_bytes", "pinned", "bytes", "exact, its allocator", lambda r: r.peaks.pinned_bytes, "peak of page-locked (pinned) host memory", rank=14),
    Metric("baseline_rss_bytes", "", "bytes", "exact, kernel", lambda r: r.baseline.rss_bytes if r.baseline else None),
    Metric("model_bytes", "", "bytes", "exact", lambda r: r.model_bytes),
    Metric("written_bytes", "written", "bytes", "exact", lambda r: r.written.file_bytes if r.written else None, "total size of the files", rank=10),
    Metric("written_disk_bytes", "", "bytes", "exact", lambda r: r.written.disk_bytes if r.written else None),
    Metric("written_files", "files", "", "exact", lambda r: r.written.files if r.written else None, "number of files", rank=15),
    # None if a load's or save's equals the maximum of anonymous memory, which has its own column.
    Metric("unreclaimable_sampled_bytes", "unreclaimable (sampled)", "bytes", "sampled", lambda r: None if r.peaks.unreclaimable_sampled_bytes == r.peaks.anon_sampled_bytes and not r.ran else r.peaks.unreclaimable_sampled_bytes, "sampled maximum of the anonymous and shared memory, which the kernel cannot reclaim", rank=11),
    Metric("pss_bytes", "PSS of all ranks", "bytes", "exact, kernel", lambda r: r.peaks.pss_bytes, "sum of the ranks' proportional set sizes when all ranks were ready", "pss", "end_anon", _HEAP),
    Metric("sum_of_peaks_bytes", "sum of peaks (misleading)", "bytes", "exact, computed", sum_of_peaks, "sum of the ranks' peak RSS, which counts shared pages once per rank: not the memory that the ranks need, although other tools print it", rank=16),
    Metric("needed_bytes", "needs", "bytes", "sampled, or exact minus sampled", lambda r: r.ran.needed_bytes if r.ran else None, "the most memory of all processes that the kernel cannot reclaim: anonymous, shared, locked and kernel memory, without page cache. The larger of the samples and of the exact peak minus reclaimable memory. ≥ marks a figure of which a part is sampled", "needed", "peak_cgroup", _HEAP, is_usual=True, at_least="needed_is_sampled"),
    Metric("shmem_sampled_bytes", "shared (sampled)", "bytes", "sampled", lambda r: r.peaks.shmem_sampled_bytes, "sampled maximum of shared memory and files on tmpfs, such as /dev/shm", rank=5),
    Metric("exit_code", "exit code", "", "exact", lambda r: r.exit_code, "exit code of the first process, or 128 + n if signal n ended the process", rank=4),
    Metric("use_peak_rss_bytes", "peak RSS of use", "bytes", "exact, kernel", lambda r: largest(phase.peak_rss_bytes for phase in r.use_phases), "highest resident set size during the use", "use_peak_rss", "peak_rss", _HEAP, _LOADS, is_of_use=True, rank=2),
    Metric("use_peak_cgroup_bytes", "cgroup peak of use", "bytes", "exact, kernel", lambda r: largest(phase.peak_cgroup_bytes for phase in r.use_phases), "highest memory charge of the cgroup during the use", rank=20),
    Metric("use_peak_cuda_allocated_bytes", "CUDA allocated in use", "bytes", "exact, allocator", lambda r: largest(phase.peak_cuda_allocated_bytes for phase in r.use_phases), "peak of the bytes that the allocator gave to tensors on the GPU during the use"),
    Metric("use_anon_bytes", "", "bytes", "exact", lambda r: r.use_phases[-1].end.anon_bytes if r.use_phases else None, "", "use_anon", "end_anon", _HEAP, _LOADS, is_of_use=True),
    Metric("use_anon_sampled_bytes", "", "bytes", "sampled", lambda r: r.use.anon_sampled_bytes if r.use else None),
    Metric("use_child_bytes", "forked process", "bytes", "exact at that instant", lambda r: largest(r.use.children_private_bytes) if r.use else None, "largest private dirty memory of a forked process, after the process wrote every weight", "use_child", "end_anon", _HEAP, _LOADS, is_of_use=True, rank=19),
    Metric("above_import_per_model", "above import", "x model", "exact, computed", lambda r: r.above_import_bytes / r.model_bytes if r.above_import_bytes is not None and r.model_bytes else None, "peak RSS minus the resident set size after import torch, divided by the size of all parameters and buffers", is_usual=True, rank=8),
    Metric("use_most_per_model", "most in use", "x model", "sampled", lambda r: per_model(r, COLUMNS["use_anon_sampled_bytes"].read(r)), "sampled maximum of anonymous memory during the use, minus the anonymous memory after the imports, divided by the size of the model"),
    Metric("use_anon_per_model", "after use", "x model", "exact", lambda r: per_model(r, COLUMNS["use_anon_bytes"].read(r)), "anonymous memory at the end of the use, minus the anonymous memory after the imports, divided by the size of the model"),
    Metric("", "", "bytes", "exact", lambda r: next((one.end.anon_bytes for one in r.phases if one.name in UNTIL_READY), None), "", "ready_anon", "end_anon", _HEAP),
    Metric("", "", "ns", "exact, clock", lambda r: r.ready_ns, "", "time", "time", _TIME, ("command",)),
    # weighin.records.series computes the floor from a whole search, not from one result.
    Metric("", "", "bytes", "exact", lambda _: None, "", "floor", "peak_rss", _FLOOR),
)  # fmt: skip

COLUMNS: Final[dict[str, Metric]] = {figure.key: figure for figure in FIGURES if figure.key}
"""The columns of summary.csv."""
METRICS: Final = {
    name: next(figure for figure in FIGURES if figure.name == name)
    for name in (
        "peak_rss", "above_import", "anon", "ready_anon", "peak_cgroup", "pss", "cuda_requested",
        "cuda_allocated", "cuda_reserved", "floor", "use_peak_rss", "use_anon", "use_child", "use",
        "load", "ready", "needed", "time",
    )
}  # fmt: skip
"""What ``weighin check`` compares, in this order."""

PHASE_FIGURES: Final[dict[str, Callable[[Phase], int | None]]] = {
    "peak_rss": lambda phase: phase.peak_rss_bytes,
    "end_anon": lambda phase: phase.end.anon_bytes,
    "peak_cgroup": lambda phase: phase.peak_cgroup_bytes,
    "cuda_requested": lambda phase: phase.peak_cuda_requested_bytes,
    "cuda_allocated": lambda phase: phase.peak_cuda_allocated_bytes,
    "cuda_reserved": lambda phase: phase.peak_cuda_reserved_bytes,
    "time": lambda phase: phase.end_ns - phase.start_ns,
}
"""Maps each value of ``Metric.in_phase`` to the function that reads its number from a phase."""

ALIASES: Final = {"rss": "peak_rss", "cgroup": "peak_cgroup", "cuda": "cuda_allocated"}


def named(name: str) -> Metric:
    metric = METRICS.get(ALIASES.get(name, name))
    if metric is None:
        raise UnknownName("metric", name, METRICS)
    return metric


def phases_of_load(result: Result) -> list[tuple[str, Phase]]:
    """Return a load's or save's phases until it is complete and its use, or all of a command, by unique names.

    The interval after the phase NAME is called "other after NAME", however many such intervals there are.
    """
    phases = result.phases
    if result.cell.operation in _OF_MODELS:
        phases = tuple(phases_of(phases, with_use=bool(result.cell.use)))
    found: list[tuple[str, Phase]] = []
    for index, phase in enumerate(phases):
        name = phase.name
        if name == UNNAMED and index:
            name = f"{UNNAMED} after {found[-1][0]}"
        elif number := [each.name for each in phases[:index]].count(name):
            name = f"{name} {number + 1}"
        found.append((name, phase))
    return found
