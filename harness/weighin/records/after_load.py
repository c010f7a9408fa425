"""Compute the figures of the use of a model after its load, from a record alone.

A use of several forward passes has several phases: its peaks are the highest of them, and its memory
afterwards is that of the last one. Multiples of the model count from the baseline, after the imports.
"""

from weighin.records.repeats import largest
from weighin.result import Result


def used_ns(result: Result) -> int | None:
    """Return the time of the use; None without one."""
    times = [phase.end_ns - phase.start_ns for phase in result.use_phases]
    return sum(times) if times else None


def peak_rss_bytes(result: Result) -> int | None:
    """Return the worker's peak RSS during the use; None without one."""
    return max((phase.peak_rss_bytes for phase in result.use_phases), default=None)


def peak_cgroup_bytes(result: Result) -> int | None:
    """Return the cgroup's peak during the use; None without one, or where the kernel keeps no mark."""
    return largest(phase.peak_cgroup_bytes for phase in result.use_phases)


def anon_bytes(result: Result) -> int | None:
    """Return the worker's anonymous memory after the use; None without one."""
    ended = result.use_phases
    return ended[-1].end.anon_bytes if ended else None


def child_private_bytes(result: Result) -> int | None:
    """Return the private memory of the forked process with the most memory; None without forked processes."""
    children = result.use.children_private_bytes if result.use else ()
    return max(children, default=None)


def most_anon_bytes(result: Result) -> int | None:
    """Return the sampled maximum of the worker's anonymous memory during the use; None without one."""
    return result.use.anon_sampled_bytes if result.use else None


def needed_bytes(result: Result) -> int:
    """Return the sampled maximum of anonymous memory during the use, with that of forked processes."""
    use = result.use
    return (use.anon_sampled_bytes or 0) + sum(use.children_private_bytes) if use else 0


def per_model(result: Result, size: int | None) -> float | None:
    """Return an amount of anonymous memory above the baseline as a multiple of the model's size."""
    if size is None or result.baseline is None or not result.model_bytes:
        return None
    return (size - result.baseline.anon_bytes) / result.model_bytes
