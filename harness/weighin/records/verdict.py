"""Judge how a cell (measurement) ran under its limit: it survives, it thrashes, or it is killed.

docs/figures.md has the rules. A cell without a limit has no verdict, and neither has one that failed for a
reason other than memory. All figures cover the load and the use of the model after it, but PSI only the load.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Final

from weighin.records.metrics import grouped, middle
from weighin.result import USUAL_PAGE_BYTES, Outcome, Result, Stopped
from weighin.units import format_bytes, format_seconds

REFAULTS_PER_MODEL: Final = 0.10
MOST_REREAD: Final = 3.0
STALLED_SHARE: Final = 0.20
SLOWDOWN: Final = 2.0
LEAST_LOST_NS: Final = 500_000_000
"""The two rules about time ignore a smaller loss: on a busy machine, times vary by as much."""
MOST_TIME: Final = 10.0  # times the time without a limit, of a cell that still runs
MOST_WAITED: Final = 3.0  # times that time, of waiting for memory


class Verdict(StrEnum):
    SURVIVES = "survives"
    THRASHES = "thrashes"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    reason: str


def judge_result(result: Result, reference_ns: int | None = None) -> Judgement | None:
    """Return the verdict on a cell. ``reference_ns`` is its time without a limit or, without one, under the highest."""
    cell, outcome, limit = result.cell, result.outcome, result.cell.ram_limit_bytes
    is_ok, is_command = outcome is Outcome.OK, cell.operation == "command"
    if limit is None:
        return None
    is_killed = outcome in (Outcome.CUDA_OOM, Outcome.OOM_KILLED)
    if is_killed or (result.oom_kills and not is_ok):
        kills = f"the kernel killed {result.oom_kills} of its processes for lack of memory"
        told = result.message or outcome.value
        return Judgement(Verdict.KILLED, told if is_killed else kills)
    if outcome is Outcome.THRASHING:
        return Judgement(Verdict.THRASHES, result.message)

    is_slow, said, spent_ns = outcome is Outcome.TIMEOUT, [], used_ns(result)
    if is_slow:
        said = [result.message]
    elif spent_ns is not None:
        said = [format_seconds(spent_ns)]
        if reference_ns:
            ratio = spent_ns / reference_ns
            is_slow = ratio >= SLOWDOWN and spent_ns - reference_ns >= LEAST_LOST_NS
            said[0] += f", {ratio:.1f}x the time without a limit: {format_seconds(reference_ns)}"

    pages = result.faults.workingset_refault_file if result.faults else None
    if pages is not None:
        pages += sum(phase.workingset_refault_file or 0 for phase in result.use_phases)
    reread_bytes = (pages or 0) * int(result.environment.get("page_bytes", USUAL_PAGE_BYTES))
    # So many pages show that a load thrashes, however short its time was.
    lost_time = not is_command and reread_bytes > MOST_REREAD * _size_read(result) > 0
    of, size = ("the limit", limit) if is_command else ("the model", result.model_bytes)
    if pages is not None and size:
        share = reread_bytes / size
        lost_time |= is_slow and share >= REFAULTS_PER_MODEL
        said.append(f"{format_bytes(reread_bytes, digits=2)} read again ({share:.2f}x {of})")
    if result.faults:
        s = "s" if result.faults.major != 1 else ""
        said.append(f"{result.faults.major} major fault{s}")

    spent_ns = result.ready_ns or (result.cost.wall_ns if result.cost else None)
    some_ns = result.pressure.some_ns if result.pressure else None
    if result.pressure and some_ns is not None and spent_ns:
        some, full = some_ns / spent_ns, (result.pressure.full_ns or 0) / spent_ns
        lost_time |= some >= STALLED_SHARE and some_ns >= LEAST_LOST_NS
        of = "run" if is_command else "load"
        said.append(f"waited for memory {some:.0%} of the {of} (all tasks at once {full:.0%})")

    peak = result.peaks.cgroup_bytes
    using = (phase.peak_cgroup_bytes or 0 for phase in result.use_phases)
    charge = None if peak is None else max(peak, *using, 0)
    if lost_time and charge is not None and charge < min(limit, cell.ram_high_bytes or limit):
        # Below its limit, pages are reclaimed because the whole machine lacks memory.
        lost_time = False
        most = format_bytes(charge, digits=2)
        said.insert(0, f"its memory never reached the limit: {most} at most")
    if lost_time and (is_ok or outcome is Outcome.TIMEOUT):
        return Judgement(Verdict.THRASHES, "; ".join(said))
    return Judgement(Verdict.SURVIVES, "; ".join(said)) if is_ok else None


def height(limit: int | None) -> float:
    """Return a RAM limit to compare: no limit is above all others."""
    return inf if limit is None else limit


def judge_all(results: Iterable[Result]) -> dict[str, Judgement | None]:
    judgements = {}
    for ours in grouped(results, lambda r: replace(r.cell, ram_limit_bytes=None).series).values():
        ok = (r for r in ours if r.outcome is Outcome.OK and used_ns(r) is not None)
        timed = grouped(ok, lambda r: height(r.cell.ram_limit_bytes))
        top = max(timed, default=0.0)
        for result in ours:
            is_below = top > height(result.cell.ram_limit_bytes)
            reference_ns = middle(map(used_ns, timed[top])) if is_below else None
            judgements[result.cell.id] = judge_result(result, reference_ns)
    return judgements


@dataclass(frozen=True, slots=True)
class Typical:
    """The measurement that stands for all repeats of a cell: the one with the median time (``used_ns``)
    among those with the worst verdict, or the first of them if none has a time.
    """

    result: Result
    judgement: Judgement | None
    spent_ns: int | None  # if it ended ok
    words: str


def typical(repeats: Sequence[Result], judgements: Mapping[str, Judgement | None]) -> Typical:
    def verdict(result: Result) -> Verdict | None:
        judgement, is_ok = judgements[result.cell.id], result.outcome is Outcome.OK
        # A failure for another reason than memory has none.
        return judgement.verdict if judgement else Verdict.SURVIVES if is_ok else None

    by_verdict = grouped(repeats, verdict)
    from_worst = (Verdict.KILLED, None, Verdict.THRASHES, Verdict.SURVIVES)
    worst = next(each for each in from_worst if each in by_verdict)
    alike = by_verdict[worst]
    median_ns = middle(map(used_ns, alike))
    chosen = next(result for result in alike if used_ns(result) == median_ns)
    spent_ns = median_ns if chosen.outcome is Outcome.OK else None
    words = str(chosen.outcome) if spent_ns is None else format_seconds(spent_ns)
    words = "killed" if worst is Verdict.KILLED else words
    words += " thrashes" if worst is Verdict.THRASHES else ""
    words += f" ({len(alike)} of {len(repeats)})" if len(alike) < len(repeats) else ""
    return Typical(chosen, judgements[chosen.cell.id], spent_ns, words)


def used_ns(result: Result) -> int | None:
    """Return the time until the model was ready, and of its use; None if it was never ready."""
    use_ns = (result.cost.first_use_ns if result.cost else None) or 0
    return None if result.ready_ns is None else result.ready_ns + use_ns


def _size_read(result: Result) -> int:
    return max(result.model_bytes or 0, result.baseline.file_bytes if result.baseline else 0)


@dataclass(frozen=True, slots=True)
class Reference:
    """The time of the cell without a limit, and the size of the data that this cell reads."""

    spent_ns: int
    size_bytes: int


def reference_of(first: Result | None) -> Reference | None:
    """Return the reference from ``first``, the result without a limit; None if it lacks a value."""
    if first is None or first.cost is None:
        return None
    spent_ns, size = first.cost.wall_ns, _size_read(first)
    if first.ran:
        spent_ns = first.ready_ns or 0
        size = (first.ran.needed_bytes or 0) + (first.peaks.file_sampled_bytes or 0)
    return Reference(spent_ns, size) if spent_ns and size else None


def proof(
    reference: Reference,
    after_ns: int,
    reread_bytes: int | None,
    waited_ns: int | None,
    *,
    is_loading: bool = True,
) -> Stopped | None:
    """Return the proof that a running cell, whose memory has reached its limit, thrashes; None without.

    The amounts count from the start of the load. A long time alone proves nothing: the machine may be
    busy. Rereads alone prove nothing once every byte of the model was read.
    """
    usual_ns, size = reference.spent_ns, reference.size_bytes
    reread, waited = reread_bytes or 0, waited_ns or 0
    lacks = reread >= REFAULTS_PER_MODEL * size or waited >= STALLED_SHARE * after_ns
    is_slow = lacks and after_ns > MOST_TIME * usual_ns
    rereads = is_loading and reread > MOST_REREAD * size
    if not (is_slow or rereads or waited > MOST_WAITED * usual_ns):
        return None
    return Stopped(after_ns, None, usual_ns, size, reread_bytes, waited_ns)


def why_killed(stopped: Stopped) -> str:
    """Say why weighin killed a cell that thrashed, with the numbers of the proof."""
    text = f"stopped by weighin after {format_seconds(stopped.after_ns)}, because it thrashes"
    if stopped.reread_bytes is not None and stopped.size_bytes:
        times, size = stopped.reread_bytes / stopped.size_bytes, format_bytes(stopped.size_bytes)
        text += f"; {times:.1f}x of {size} read again"
    if stopped.waited_ns is not None:
        text += f"; waited {format_seconds(stopped.waited_ns)} for memory"
    return text
