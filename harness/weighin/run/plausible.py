"""Void a result whose figures contradict each other: the measured program got around a measurement."""

from collections.abc import Iterator
from dataclasses import replace

from weighin.result import Outcome, Result
from weighin.units import MIB, format_bytes, format_seconds

_SLACK_BYTES = 4 * MIB  # the kernel counts pages for each processor, and adds them up later
_SLACK_SHARE = 0.01


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
    peaks, base = result.peaks, result.baseline
    anon, limit = peaks.anon_sampled_bytes, result.cell.ram_limit_bytes
    if is_beyond(anon, peaks.cgroup_bytes):
        yield f"{_both(anon, peaks.cgroup_bytes)} of its cgroup: it had memory outside of its cgroup"
    if is_beyond(peaks.cgroup_bytes, limit):
        yield f"the peak of the cgroup, {format_bytes(peaks.cgroup_bytes or 0)}, is above its limit"
    if len(result.ranks) <= 1 and is_beyond(anon, peaks.rss_bytes):
        yield f"{_both(anon, peaks.rss_bytes)} of the process: the peak was reset"
    if base and is_beyond(base.rss_bytes, peaks.rss_bytes):
        yield (
            f"the peak of {format_bytes(peaks.rss_bytes or 0)} is below the baseline of"
            f" {format_bytes(base.rss_bytes)}: the peak was reset"
        )
    spent_ns = max(result.ready_ns or 0, result.load_ns or 0)
    if result.cost and spent_ns > result.cost.wall_ns:
        yield (
            f"a time of {format_seconds(spent_ns)} is longer than the whole measurement of"
            f" {format_seconds(result.cost.wall_ns)}: the clock was changed"
        )


def _both(sampled: int | None, exact: int | None) -> str:
    return (
        f"{format_bytes(sampled or 0)} of anonymous memory were sampled, more than the exact peak of"
        f" {format_bytes(exact or 0)}"
    )
