"""Judge how a cell (measurement) ran under its limit: it survives, it thrashes, or it is killed.

* **killed**: the CUDA allocator refused an allocation, or the cell did not end ok and the kernel
  killed a process of the cell for lack of memory.
* **thrashes**: the cell's memory reached the limit, and the cell lost time for lack of memory. A
  cell whose cgroup peaked below the limit (or below the soft limit, if there is one) does not
  thrash: the kernel then reclaimed pages because the whole machine lacked memory, not because of
  the limit. A cell with an unknown peak counts as a cell that reached the limit. The cell lost time
  if one of these holds:

  - The cell's tasks waited for memory (PSI some) during at least ``STALLED_SHARE`` of the load, and
    for at least ``LEAST_LOST_NS``.
  - The load read again more than ``MOST_REREAD`` times the model's size, or the size of the files
    mapped by the imports if that size is larger.
  - The cell read evicted pages again, at least ``REFAULTS_PER_MODEL`` of the model's size (for a
    command: of the limit). In addition, the cell timed out, or took ``SLOWDOWN`` times as long as a
    reference and at least ``LEAST_LOST_NS`` longer. The reference is the same load without a limit,
    or if that load did not end ok, the same load under the highest larger limit. Without a
    reference, only a time-out meets the second condition.

  A cell that weighin killed because it was proven to thrash (``weighin.records.thrashing``) has
  this verdict too.

* **survives**: the cell ended ok and did not thrash. Page cache up to the limit is not thrashing.

A cell without a limit has no verdict, and neither has a cell that failed for a reason other than
memory. Time, rereads and the peak cover the load, until every byte was read, and the use of the
model after it. PSI covers only the load.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from weighin.records.repeats import grouped, middle
from weighin.result import Outcome, Result
from weighin.units import format_bytes, format_seconds

REFAULTS_PER_MODEL: Final = 0.10
MOST_REREAD: Final = 3.0
STALLED_SHARE: Final = 0.20
SLOWDOWN: Final = 2.0
LEAST_LOST_NS: Final = 500_000_000
"""The two rules about time ignore a smaller loss: on a busy machine, times vary by as much."""


class Verdict(StrEnum):
    """The judgement on a cell under its limit: whether the cell survived, thrashed or was killed."""

    SURVIVES = "survives"
    THRASHES = "thrashes"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and as text (``reason``) the measured numbers that led to the verdict."""

    verdict: Verdict
    reason: str


def judge_result(result: Result, reference_ns: int | None = None) -> Judgement | None:
    """Return the verdict on a cell by the rules in the module's docstring; None without a verdict.

    ``reference_ns`` is the time of the same cell without a limit, or under a higher limit.
    """
    cell, limit = result.cell, result.cell.ram_limit_bytes
    if limit is None:
        return None
    if killed := _killed(result):
        return Judgement(Verdict.KILLED, killed)
    if result.outcome is Outcome.THRASHING:
        return Judgement(Verdict.THRASHES, result.message)
    is_command, is_slow, said = cell.operation == "command", False, []
    spent_ns = used_ns(result)
    if result.outcome is Outcome.TIMEOUT:
        is_slow, said = True, [result.message]
    elif spent_ns is not None:
        said = [format_seconds(spent_ns)]
        if reference_ns:
            ratio = spent_ns / reference_ns
            is_slow = ratio >= SLOWDOWN and spent_ns - reference_ns >= LEAST_LOST_NS
            said[0] += f", {ratio:.1f}x the time without a limit: {format_seconds(reference_ns)}"

    pages = refaults(result)
    reread_bytes = (pages or 0) * result.page_bytes
    # So many pages show that a load thrashes, however short its time was.
    lost_time = not is_command and reread_bytes > MOST_REREAD * size_read(result) > 0
    of, size = ("the limit", limit) if is_command else ("the model", result.model_bytes)
    if pages is not None and size:
        share = reread_bytes / size
        lost_time |= is_slow and share >= REFAULTS_PER_MODEL
        said.append(f"{format_bytes(reread_bytes, digits=2)} read again ({share:.2f}x {of})")
    if result.faults:
        said.append(f"{result.faults.major} major faults")

    spent_ns = result.ready_ns or (result.cost.wall_ns if result.cost else None)
    some_ns = result.pressure.some_ns if result.pressure else None
    if result.pressure and some_ns is not None and spent_ns:
        some, full = some_ns / spent_ns, (result.pressure.full_ns or 0) / spent_ns
        lost_time |= some >= STALLED_SHARE and some_ns >= LEAST_LOST_NS
        of = "run" if is_command else "load"
        said.append(f"waited for memory {some:.0%} of the {of} (all tasks at once {full:.0%})")

    charge = highest_charge(result)
    if lost_time and charge is not None and charge < min(limit, cell.ram_high_bytes or limit):
        lost_time = False  # not for lack of memory under this limit
        most = format_bytes(charge, digits=2)
        said.insert(0, f"its memory never reached the limit: {most} at most")
    if lost_time and result.outcome in (Outcome.OK, Outcome.TIMEOUT):
        return Judgement(Verdict.THRASHES, "; ".join(said))
    is_ok = result.outcome is Outcome.OK
    return Judgement(Verdict.SURVIVES, "; ".join(said)) if is_ok else None


def _killed(result: Result) -> str:
    if result.outcome is Outcome.CUDA_OOM:
        return result.message or "the CUDA allocator refused an allocation"
    if result.outcome is Outcome.OOM_KILLED:
        return result.message or "killed by the kernel for lack of memory"
    if result.outcome is not Outcome.OK and result.oom_kills:
        return f"the kernel killed {result.oom_kills} of its processes for lack of memory"
    return ""


def judge_all(results: Iterable[Result]) -> dict[str, Judgement | None]:
    """Return the verdict on each cell by its id; the reference times come from the same results."""

    def height(result: Result) -> float:
        limit = result.cell.ram_limit_bytes
        return float("inf") if limit is None else limit

    judgements = {}
    for ours in grouped(results, lambda r: replace(r.cell, ram_limit_bytes=None).series).values():
        ok = (r for r in ours if r.outcome is Outcome.OK and used_ns(r) is not None)
        timed = grouped(ok, height)
        top = max(timed, default=0.0)
        for result in ours:
            reference_ns = middle(map(used_ns, timed[top])) if top > height(result) else None
            judgements[result.cell.id] = judge_result(result, reference_ns)
    return judgements


def used_ns(result: Result | None) -> int | None:
    """Return the time until the model was ready plus the time of its use; None if never ready."""
    if result is None or result.ready_ns is None:
        return None
    return result.ready_ns + ((result.cost.first_use_ns if result.cost else None) or 0)


def typical(results: Sequence[Result]) -> Result:
    """Return the result with the median time (``used_ns``); the first one if none has a time."""
    typical_ns = middle(map(used_ns, results))
    return next((result for result in results if used_ns(result) == typical_ns), results[0])


def through_first_pass_ns(result: Result) -> int | None:
    """Return the time until the model was ready plus its first forward pass; None without a pass.

    A mapped model may be ready before it has read its file; its first pass then waits for the disk.
    """
    first = next((each for each in result.phases if each.name == "forward"), None)
    if result.ready_ns is None or first is None:
        return None
    return result.ready_ns + first.end_ns - first.start_ns


def refaults(result: Result) -> int | None:
    """Return how many pages the load and the use read again after an eviction; None if unknown."""
    loading = result.faults.workingset_refault_file if result.faults else None
    if loading is None:
        return None
    return loading + sum(phase.workingset_refault_file or 0 for phase in result.use_phases)


def highest_charge(result: Result) -> int | None:
    """Return the cgroup's peak during the load and the use, in bytes; None if unknown."""
    if result.peaks.cgroup_bytes is None:
        return None
    using = [phase.peak_cgroup_bytes or 0 for phase in result.use_phases]
    return max([result.peaks.cgroup_bytes, *using])


def size_read(result: Result) -> int:
    """Return the model's size, or the size of the files mapped by the imports if that is larger."""
    return max(result.model_bytes or 0, result.baseline.file_bytes if result.baseline else 0)
