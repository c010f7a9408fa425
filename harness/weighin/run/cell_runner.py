"""Measure one cell: drop its files from the page cache, supervise a worker, and build a Result."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from weighin.cell import Job
from weighin.checkpoint import entries
from weighin.disk.mount import Mount
from weighin.disk.passthrough import LARGEST_READ_BYTES, Pace
from weighin.formats.pretrained_folder import folder_of
from weighin.isolation.base import Isolation
from weighin.probes import page_cache
from weighin.probes import storage as storages
from weighin.probes.environment import code_digest, read_ahead_bytes
from weighin.records import run_folder
from weighin.records.thrashing import Reference
from weighin.result import Outcome, Result
from weighin.run import interrupts, page_preconditioning
from weighin.run.measurement import CellMeasurement, trouble_of
from weighin.run.plausible import checked, void
from weighin.run.supervisor import Watch
from weighin.run.thrash_guard import ThrashGuard
from weighin.units import format_bytes

_NAMED = 3  # the most changed files that a message names


def measure(
    isolation: Isolation,
    run: Path,
    job: Job,
    files: Sequence[Path],
    model_bytes: int | None,
    environment: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Measure one cell, and write its samples, but not its record, to the folder ``run``."""
    measured = take(isolation, job, files, model_bytes, environment or {}, **options)
    measured.finish(run)
    return measured.result


def take(
    isolation: Isolation,
    job: Job,
    files: Sequence[Path],
    model_bytes: int | None,
    environment: dict[str, Any],
    reference: Reference | None = None,
    *,
    steady: bool = False,
    on_phase: Callable[[str], None] = lambda _: None,
    stall_from_bytes: int | None = None,
) -> CellMeasurement:
    """Run one cell to its end and return its measurement.

    ``files`` are the checkpoint's files, by their paths outside of a container. ``take`` drops them
    from the page cache before it starts the worker. If ``cell.cache`` is "warm", the worker reads
    them again before the load, so that the kernel charges their pages to the cell's own cgroup.

    Args:
        environment: facts about the machine and the software's versions, for the record.
        reference: the figures of the same cell without a limit; weighin kills a cell that thrashes
            in comparison.
        steady: whether weighin writes to free memory before the load (``page_preconditioning``).
        stall_from_bytes: the file offset behind which a slow disk never answers a read; None if the
            disk answers all reads.
    """
    sources_hash = None
    if not job.body:
        # Before the cell, because a user may edit the strategy while the cell runs.
        with suppress(OSError):  # the cell itself then fails
            own = [Path(name) for name in (job.strategy_path, job.use_path) if name]
            sources_hash = code_digest(*own)
    limit = job.cell.ram_limit_bytes
    started_at, start_ns = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic_ns()
    cached_bytes = page_cache.drop(files)
    states = {file: _state(file) for file in files}
    size = (model_bytes or 0) * job.cell.ranks if steady else 0
    # Leave memory for the worker's needs before its baseline: a save's model, a warm load's file.
    spare = size if job.cell.operation == "save" or job.cell.cache == "warm" else 0
    with ExitStack() as memory, ExitStack() as slowed:
        job, disk, means = _slowed(job, stall_from_bytes, slowed)
        # A strategy of weighin needs at most two copies of the model and its file in the page cache.
        touched = memory.enter_context(page_preconditioning.held(3 * size, spare)) if size else None
        before_load = partial(page_preconditioning.give_back, memory) if size else None
        storage = _storage(files, job.checkpoint)
        with interrupts.put_off():
            running = isolation.start(job)
            try:
                watch = Watch(
                    running,
                    on_phase,
                    before_load,
                    job.cell.ranks,
                    ThrashGuard(reference, limit) if reference and limit else None,
                    disk,
                )
                try:
                    watch.follow(job.timeout_s)
                    ended = watch.end()
                finally:
                    watch.close()
            except BaseException:
                slowed.close()  # else a worker that waits for the disk could not be killed
                running.close()
                raise
            slowed.close()
            trouble = trouble_of(running.close)
    changed = tuple(file for file, state in states.items() if _state(file) != state)
    result = watch.result(job, ended)
    if watch.escape:
        why = f"{watch.escape}, so its figures and its limit are not valid"
        result = void(result, Outcome.STRATEGY_FAILED, why)
    if changed:
        result = _of_a_changed_checkpoint(result, changed, read_only=isolation.name == "docker")
    warnings = result.warnings
    warnings += _doubts(cached_bytes)
    if trace := watch.event_log.trace:
        warnings += tuple(trace.doubts(result.peaks.cuda_requested_bytes))
    assert result.cost
    result = replace(
        result,
        cost=replace(result.cost, wall_ns=time.monotonic_ns() - start_ns),
        model_bytes=model_bytes,
        cached_bytes_at_start=cached_bytes,
        touched_bytes_before=touched,
        samples_path=run_folder.samples_path(job.cell) if watch.samples else None,
        trace_path=run_folder.trace_path(job.cell) if trace else None,
        started_at=started_at,
        sources_hash=sources_hash,
        environment=environment | storage | means | watch.event_log.environment,
        warnings=warnings,
        ranks=tuple(
            replace(rank, samples_path=run_folder.samples_path(job.cell, number))
            if watch.rank_samples.get(number)
            else rank
            for number, rank in enumerate(result.ranks)
        ),
    )
    result = checked(result)
    return CellMeasurement(result, watch.samples, trace, watch.rank_samples, changed, trouble)


def _slowed(
    job: Job, stall_from_bytes: int | None, closing: ExitStack
) -> tuple[Job, Mount | None, dict[str, Any]]:
    """Return a job that reads its checkpoint through the slow disk of its cell, and what to record of it."""
    pace = Pace(job.cell.disk_bytes_per_s, job.cell.disk_latency_ns, stall_from_bytes)
    if not pace:
        return job, None, {}
    folder = folder_of(Path(job.checkpoint))
    disk = Mount(folder, pace, entries.slow_disks())
    closing.callback(disk.close)
    inside = disk.folder / Path(job.checkpoint).relative_to(folder)
    means = {"disk": {"means": "fuse", "request_bytes": LARGEST_READ_BYTES}}
    return replace(job, checkpoint=str(inside)), disk, means


def _storage(files: Sequence[Path], read_at: str) -> dict[str, Any]:
    """Return a record's facts about the checkpoint's file system, disk and read-ahead.

    ``read_at`` is the path at which a worker on this machine reads the checkpoint.
    """
    if not files:
        return {}
    return {
        "storage": asdict(storages.describe(files[0])),
        "read_ahead_bytes": read_ahead_bytes(Path(read_at)),
    }


def _state(file: Path) -> tuple[int, int, int, int] | None:
    """Return a file's size, times and inode, which show any change; None for a missing file."""
    try:
        state = file.stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def _of_a_changed_checkpoint(result: Result, changed: Sequence[Path], *, read_only: bool) -> Result:
    """Return the result as a failure, because the checkpoint changed during the measurement.

    The message blames the strategy, or another program if a container mounts the files read-only.
    """
    files = ", ".join(file.name for file in changed[:_NAMED]) + ", ..." * (len(changed) > _NAMED)
    if read_only:
        outcome, who = Outcome.MEASUREMENT_FAILED, "another program"
    else:
        outcome, who = Outcome.STRATEGY_FAILED, "the strategy"
    return void(
        result, outcome, f"{who} changed the checkpoint's files during the measurement: {files}"
    )


def _doubts(cached_bytes: int | None) -> tuple[str, ...]:
    """Return a warning if the checkpoint may have been in the page cache when the cell started."""
    if cached_bytes is None:
        return (
            "weighin cannot tell whether the checkpoint was dropped from the page cache: Linux"
            " reports cached pages only to a user who owns the files or may write them",
        )
    if cached_bytes:
        left = format_bytes(cached_bytes)
        return (f"{left} of the checkpoint could not be dropped from the page cache",)
    return ()
