"""Void a result whose figures contradict each other: the measured program got around a measurement."""

from collections.abc import Iterator
from dataclasses import replace

from weighin.result import Outcome, Result
from weighin.units import MIB, format_bytes, format_seconds

_SLACK_BYTES = 4 * MIB  # the kernel counts pages for each processor, and adds them up later
_SLACK_SHARE = 0.01
_OUTSIDE = "it had memory outside of its cgroup"
_RESET = "the peak was reset"


def is_beyond(bytes_: int | None, bound_bytes: int | None) -> bool:
    """Return whether a size is clearly above a bound; False if one of the two is not known."""
    if bytes_ is None or bound_bytes is None:
        return False
    return bytes_ > bound_bytes + max(_SLACK_BYTES, _SLACK_SHARE * bound_bytes)


def void(result: Result, outcome: Outcome, why: str) -> Result:
    """Return a result with ``outcome``; its message is ``why``, then the former outcome and message."""
    end = f"it ended with {result.outcome}" + f": {result.message}" * bool(result.message)
    return replace(result, outcome=outcome, message=f"{why}; {end}")


def checked(result: Result) -> Result:
    """Return the result; if it is well but contradicts itself, as a failed measurement."""
    why = next(_contradictions(result), "") if result.outcome is Outcome.OK else ""
    return void(result, Outcome.MEASUREMENT_FAILED, why) if why else result


def _contradictions(result: Result) -> Iterator[str]:
    peaks, limit = result.peaks, result.cell.ram_limit_bytes
    # The sum over several ranks is not of one instant, and has the pages that they share twice.
    anon = peaks.anon_sampled_bytes if len(result.ranks) <= 1 else None
    base = result.baseline.rss_bytes if result.baseline else None
    for size, what, bound, than, cause in (
        (anon, "sampled anonymous memory", peaks.cgroup_bytes, "peak of the cgroup", _OUTSIDE),
        (peaks.cgroup_bytes, "peak of the cgroup", limit, "limit", "the limit was changed"),
        (anon, "sampled anonymous memory", peaks.rss_bytes, "exact peak of the process", _RESET),
        (base, "memory before the load", peaks.rss_bytes, "exact peak of the load", _RESET),
    ):
        if is_beyond(size, bound):
            sizes = [format_bytes(each or 0) for each in (size, bound)]
            yield f"the {what}, {sizes[0]}, is more than the {than}, {sizes[1]}: {cause}"
    spent_ns = max(result.ready_ns or 0, result.load_ns or 0)
    if result.cost and spent_ns > result.cost.wall_ns:
        times = [format_seconds(each) for each in (spent_ns, result.cost.wall_ns)]
        yield f"a time, {times[0]}, is longer than the whole measurement, {times[1]}"
