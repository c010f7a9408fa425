"""Compute the memory and time that the use of a loaded model took, from one record alone.

A use of several forward passes has one phase for each pass. The peak of the use is then the highest
peak among the passes, and the memory after the use is the memory at the end of the last pass.
"""

from weighin.records.repeats import largest
from weighin.result import Result


def used_ns(result: Result) -> int | None:
    """Return how long the use of the loaded model took, in nanoseconds; None without a use."""
    times = [phase.end_ns - phase.start_ns for phase in result.use_phases]
    return sum(times) if times else None


def peak_rss_bytes(result: Result) -> int | None:
    """Return the measured process's peak RSS while it used the model; None without a use."""
    return max((phase.peak_rss_bytes for phase in result.use_phases), default=None)


def peak_cgroup_bytes(result: Result) -> int | None:
    """Return the cgroup's peak during the model's use; None without a use, or if unmeasured."""
    return largest(phase.peak_cgroup_bytes for phase in result.use_phases)


def peak_cuda_allocated_bytes(result: Result) -> int | None:
    """Return the peak of allocated CUDA memory during the model's use; None without use or GPU."""
    return largest(phase.peak_cuda_allocated_bytes for phase in result.use_phases)


def anon_bytes(result: Result) -> int | None:
    """Return the process's anonymous memory at the end of the model's use; None without a use."""
    ended = result.use_phases
    return ended[-1].end.anon_bytes if ended else None


def child_private_bytes(result: Result) -> int | None:
    """Return the largest private memory of the processes that the use forked; None without any."""
    children = result.use.children_private_bytes if result.use else ()
    return max(children, default=None)


def most_anon_bytes(result: Result) -> int | None:
    """Return the sampled maximum of anonymous memory during the model's use; None without a use."""
    return result.use.anon_sampled_bytes if result.use else None


def needed_bytes(result: Result) -> int:
    """Return ``most_anon_bytes`` plus the private memory of forked processes; 0 without a use."""
    use = result.use
    return (use.anon_sampled_bytes or 0) + sum(use.children_private_bytes) if use else 0


def per_model(result: Result, size: int | None) -> float | None:
    """Return ``size`` minus the anonymous memory before the load, divided by the model's size."""
    if size is None or result.baseline is None or not result.model_bytes:
        return None
    return (size - result.baseline.anon_bytes) / result.model_bytes
