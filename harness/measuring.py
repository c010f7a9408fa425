"""Measures one cell: a cold cache, a fresh worker, a watch over it, and the Result of it all."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from harness import page_cache, sources, steady, stopping
from harness.cell import Job
from harness.isolation import Isolation
from harness.record import Result
from harness.sampler import DEFAULT_INTERVAL_S, write_samples
from harness.trace import write_trace
from harness.units import format_bytes
from harness.watching import Watch


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cells of a run share: how, and where to, they are measured."""

    isolation: Isolation
    run: Path
    environment: dict[str, Any]
    interval_s: float = DEFAULT_INTERVAL_S
    steady: bool = False
    on_phase: Callable[[str], None] = lambda _: None


def measure(setting: Setting, job: Job, files: Sequence[Path], model_bytes: int | None) -> Result:
    """Run one cell to its end and return what was measured; its samples are written beside.

    ``files`` are the checkpoint's, in the parent's paths: their cached pages are dropped first,
    for a warm cell too, which then reads them inside its own cgroup.
    """
    # Before anything is measured: what decides the figures may be edited while the cell runs.
    sources_hash = None if job.body else sources.hashed(Path(job.strategy_path), job.cell)
    started_at, start_ns = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic_ns()
    cached_bytes = page_cache.drop(files)
    size = (model_bytes or 0) if setting.steady else 0
    # What the worker itself takes before its baseline: the model of a save, the cache of a warm load.
    spare = size if job.cell.operation == "save" or job.cell.cache == "warm" else 0
    with ExitStack() as memory:
        # Two copies of the model, and its file in the page cache: no strategy here takes more.
        touched = memory.enter_context(steady.held(3 * size, spare)) if size else None
        before_load = partial(steady.give_back, memory) if size else None
        with stopping.put_off(), closing(setting.isolation.start(job)) as running:
            watch = Watch(running, setting.interval_s, setting.on_phase, before_load)
            try:
                watch.follow(job.timeout_s)
                ended = watch.end()
            finally:
                watch.close()
    result = watch.result(job, ended)
    warnings = result.warnings
    warnings += _doubts(cached_bytes)
    samples_path = f"samples/{job.cell.id}.csv" if watch.samples else None
    if samples_path:
        write_samples(setting.run / samples_path, watch.samples)
    trace_path = None
    if trace := watch.story.trace:
        trace_path = f"traces/{job.cell.id}.csv"
        write_trace(setting.run / trace_path, trace)
        warnings += tuple(trace.doubts(result.peaks.cuda_requested_bytes))
    assert result.cost
    return replace(
        result,
        cost=replace(result.cost, wall_ns=time.monotonic_ns() - start_ns),
        model_bytes=model_bytes,
        cached_bytes_at_start=cached_bytes,
        touched_bytes_before=touched,
        samples_path=samples_path,
        trace_path=trace_path,
        started_at=started_at,
        sources_hash=sources_hash,
        environment=setting.environment | watch.story.environment,
        warnings=warnings,
    )


def _doubts(cached_bytes: int | None) -> tuple[str, ...]:
    """Return the warnings of a checkpoint that is not proven to be out of the page cache."""
    if cached_bytes is None:
        return (
            "not known whether the checkpoint was dropped from the page cache: Linux tells only"
            " who owns its files or may write them",
        )
    if cached_bytes:
        left = format_bytes(cached_bytes)
        return (f"{left} of the checkpoint could not be dropped from the page cache",)
    return ()
