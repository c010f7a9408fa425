"""Read the figures of one record, and summarise them over the repeats of a measurement.

``METRICS`` are the figures that ``weighin check`` compares, with unit, exactness and default tolerance.
The default tolerances come from repeated runs (docs/ci.md). Most of the variation is freed heap
memory, which glibc keeps in some runs and returns to the kernel in others: 36 MiB in one run of six
of the strategy per_module. peak_cgroup varies because the kernel charges the pages of torch's
libraries to the process that reads them first.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from weighin.cell import Operation
from weighin.errors import UnknownName
from weighin.result import UNNAMED, UNTIL_READY, Outcome, Phase, Result, phases_of
from weighin.units import (
    GIB,
    MIB,
    format_bytes,
    format_exact,
    format_seconds,
    parse_bytes,
    parse_seconds,
)

Direction = Literal["lower", "higher", "both"]
"""Whether a lower or a higher value is better; with "both", a change either way is a regression."""

_OF_MODELS: Final[tuple[Operation, ...]] = ("load", "save")
_LOADS: Final[tuple[Operation, ...]] = ("load",)
_OF_COMMANDS: Final[tuple[Operation, ...]] = ("command",)
_Number = TypeVar("_Number", int, float)
_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def middle(values: Iterable[_Number | None]) -> _Number | None:
    """Return the median of the values that are not None; None if there are no such values.

    For an even number of values, the result is the lower one of the two middle values, so that the
    result itself was measured.
    """
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
    if len(counts) == 1:
        return next(iter(counts)).value
    return ", ".join(f"{outcome.value} {count}" for outcome, count in counts.items())


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
    """A number in a result, such as the peak RSS, that is compared with a baseline file.

    If this number grew, ``PHASE_FIGURES[in_phase]`` of each phase shows in which phase it grew.
    Only cells with one of these ``operations`` have the number. Times cannot be compared between
    machines.
    """

    name: str
    unit: Literal["bytes", "ns"]
    in_phase: str
    exact: bool
    tolerance: Tolerance
    read: Callable[[Result], int | None] = lambda _: None
    operations: tuple[Operation, ...] = (*_OF_MODELS, *_OF_COMMANDS)

    def of(self, result: Result) -> int | None:
        """Return the metric's value in a result; None if it was not measured, or does not apply."""
        return self.read(result) if result.cell.operation in self.operations else None

    @property
    def title(self) -> str:
        """The printed name, followed by "(sampled)" if samples can miss the true peak."""
        return self.name if self.exact or self.unit == "ns" else f"{self.name} (sampled)"

    def text(self, value: int) -> str:
        """Return ``value`` rounded for readers: "1.549 GiB", "736.9 MiB", "2.31 s"."""
        if self.unit == "ns":
            return format_seconds(value)
        return format_bytes(value, digits=3 if abs(value) >= GIB else 1)

    def precise(self, value: int) -> str:
        """Return ``value`` unrounded, so that ``parse`` returns it again: "1536MiB", "2.5 s"."""
        if self.unit == "bytes":
            return format_exact(value)
        return f"{value // 10**9}.{value % 10**9:09}".rstrip("0").rstrip(".") + " s"

    def parse(self, text: str) -> int:
        return parse_bytes(text) if self.unit == "bytes" else parse_seconds(text)

    def change(self, was: int, now: int) -> str:
        """Return the change from ``was`` to ``now`` with its sign: "+35.2 MiB (+2.2 %)"."""
        if was == now:
            return "±0"
        sign, step = "+" if now > was else "-", abs(now - was)
        text = format_bytes(step, digits=1) if self.unit == "bytes" else format_seconds(step)
        return f"{sign}{text}" + (f" ({sign}{step / was * 100:.1f} %)" if was else "")


def ready_anon(result: Result) -> int | None:
    """Return the anonymous memory of a load or save when it is ready; None if it never was."""
    ready = next((phase for phase in result.phases if phase.name in UNTIL_READY), None)
    return ready.end.anon_bytes if ready else None


# A use of several forward passes has one phase for each pass: its peak is the highest of them, and
# the memory after the use is that at the end of the last pass. All are None without a use.


def use_ns(result: Result) -> int | None:
    times = [phase.end_ns - phase.start_ns for phase in result.use_phases]
    return sum(times) if times else None


def use_peak_rss_bytes(result: Result) -> int | None:
    return max((phase.peak_rss_bytes for phase in result.use_phases), default=None)


def use_anon_bytes(result: Result) -> int | None:
    return result.use_phases[-1].end.anon_bytes if result.use_phases else None


def use_child_bytes(result: Result) -> int | None:
    """Return the largest private memory of the processes that the use forked."""
    return max(result.use.children_private_bytes, default=None) if result.use else None


def use_most_anon_bytes(result: Result) -> int | None:
    return result.use.anon_sampled_bytes if result.use else None


def use_needed_bytes(result: Result) -> int:
    """Return ``use_most_anon_bytes`` plus the private memory of forked processes; 0 without a use."""
    if result.use is None:
        return 0
    return (result.use.anon_sampled_bytes or 0) + sum(result.use.children_private_bytes)


def per_model(result: Result, size: int | None) -> float | None:
    """Return ``size`` minus the anonymous memory before the load, divided by the model's size."""
    if size is None or result.baseline is None or not result.model_bytes:
        return None
    return (size - result.baseline.anon_bytes) / result.model_bytes


def through_first_pass_ns(result: Result) -> int | None:
    """Return the time until the model was ready plus its first forward pass; None without a pass.

    A mapped model may be ready before it has read its file; its first pass then waits for the disk.
    """
    first = next((each for each in result.phases if each.name == "forward"), None)
    if result.ready_ns is None or first is None:
        return None
    return result.ready_ns + first.end_ns - first.start_ns


def charge(result: Result) -> int | None:
    """Return the peak of a cell's cgroup minus the cgroup's usage before the load, in bytes."""
    before = result.baseline.cgroup_bytes if result.baseline else None
    peak = result.peaks.cgroup_bytes
    return None if before is None or peak is None else peak - before


def unreclaimable(result: Result) -> int | None:
    """Return the sampled maximum of the ranks' anonymous and shared memory, above the imports'."""
    most = result.peaks.unreclaimable_sampled_bytes or result.peaks.anon_sampled_bytes
    before = result.import_bytes
    return None if most is None or before is None else max(0, most - before)


def sum_of_peaks(result: Result) -> int | None:
    """Return the sum of the ranks' peak RSS, which counts a shared page once for each rank; None
    without ranks, or if a peak is unknown.
    """
    peaks = [rank.peak_rss_bytes for rank in result.ranks]
    return sum(peak for peak in peaks if peak) if peaks and None not in peaks else None


def _of_use(read: Callable[[Result], int | None]) -> Callable[[Result], int | None]:
    """Leave out cells whose model only runs forward passes: their old records lack the value."""
    return lambda result: read(result) if result.cell.use else None


_HEAP: Final = Tolerance(relative=0.01, absolute=16 * MIB)
_CACHE: Final = Tolerance(relative=0.04, absolute=128 * MIB)
_ALLOCATOR: Final = Tolerance(relative=0.0, absolute=0)
_FLOOR: Final = Tolerance(relative=0.03, absolute=24 * MIB)
# A busy machine can slow a load down by as much as this tolerance.
_TIME: Final = Tolerance(relative=3.0, absolute=5_000_000_000)

METRICS: Final = {
    metric.name: metric
    for metric in (
        Metric("peak_rss", "bytes", "peak_rss", True, _HEAP, lambda r: r.peaks.rss_bytes),
        Metric("above_import", "bytes", "peak_rss", True, _HEAP, lambda r: r.above_import_bytes),
        Metric("anon", "bytes", "peak_rss", False, _HEAP, lambda r: r.peaks.anon_sampled_bytes),
        Metric("ready_anon", "bytes", "end_anon", True, _HEAP, ready_anon),
        Metric("peak_cgroup", "bytes", "peak_cgroup", True, _CACHE, lambda r: r.peaks.cgroup_bytes),
        Metric("pss", "bytes", "end_anon", True, _HEAP, lambda r: r.peaks.pss_bytes),
        Metric("cuda_requested", "bytes", "cuda_requested", True, _ALLOCATOR, lambda r: r.peaks.cuda_requested_bytes),
        Metric("cuda_allocated", "bytes", "cuda_allocated", True, _ALLOCATOR, lambda r: r.peaks.cuda_allocated_bytes),
        Metric("cuda_reserved", "bytes", "cuda_reserved", True, _ALLOCATOR, lambda r: r.peaks.cuda_reserved_bytes),
        # weighin.records.series computes the floor from a whole search, not from one result.
        Metric("floor", "bytes", "peak_rss", True, _FLOOR),
        Metric("use_peak_rss", "bytes", "peak_rss", True, _HEAP, _of_use(use_peak_rss_bytes), _LOADS),
        Metric("use_anon", "bytes", "end_anon", True, _HEAP, _of_use(use_anon_bytes), _LOADS),
        Metric("use_child", "bytes", "end_anon", True, _HEAP, _of_use(use_child_bytes), _LOADS),
        Metric("use", "ns", "time", True, _TIME, _of_use(use_ns), _LOADS),
        Metric("load", "ns", "time", True, _TIME, lambda r: r.load_ns, _OF_MODELS),
        Metric("ready", "ns", "time", True, _TIME, lambda r: r.ready_ns, _OF_MODELS),
        Metric("needed", "bytes", "peak_cgroup", False, _HEAP, lambda r: r.ran.needed_bytes if r.ran else None),
        Metric("time", "ns", "time", True, _TIME, lambda r: r.ready_ns, _OF_COMMANDS),
    )
}  # fmt: skip

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
    """Return a metric by its name or its alias; raise UnknownName if no metric has that name."""
    metric = METRICS.get(ALIASES.get(name, name))
    if metric is None:
        raise UnknownName("metric", name, METRICS)
    return metric


def phases_of_load(result: Result) -> list[tuple[str, Phase]]:
    """Return a load's or save's phases until it is complete, or all of a command, by unique names.

    The phases of the imports before a load are left out, and so are forward passes; the phase of a
    use is included. An interval between the phase NAME and the next phase is called "other after
    NAME": its name stays the same if a run has more or fewer such intervals.
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
