"""Measure one cell: drop its files from the page cache, start it, watch it, and build its result."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from weighin.checkpoint import staging
from weighin.errors import HarnessError
from weighin.foreign import no_link
from weighin.isolation.base import Isolation
from weighin.probes import page_cache
from weighin.probes.gpu_memory import Trace, write_trace
from weighin.probes.sampler import write_samples
from weighin.records import run_folder
from weighin.records.thrashing import Reference
from weighin.result import Outcome, Result, Sample
from weighin.run import interrupts
from weighin.run.listener import Listener
from weighin.run.spec import Spec
from weighin.run.watch import Watch

_PREFIX: Final = "weighin-run-"  # of the folder for the socket to which the processes report
_NAMED: Final = 3  # the most changed files that a message names
_Table = TypeVar("_Table")


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell's result, and the samples and trace that are written after its record.

    Attributes:
        rank_samples: the samples of each rank, by the rank's number.
        changed: the checkpoint's files that changed while the cell ran.
        trouble: an error after the measurement, for example when the worker is removed. The run
            records the result first, and then ``finish`` raises the error.
    """

    result: Result
    samples: Sequence[Sample] = ()
    trace: Trace | None = None
    rank_samples: Mapping[int, Sequence[Sample]] = field(default_factory=dict)
    changed: tuple[Path, ...] = ()
    trouble: HarnessError | None = None

    def finish(self, run: Path) -> None:
        """Write the samples and the trace into the run's folder, then raise ``trouble``, if any.

        Raises:
            RecordError: a file cannot be written; its partial content is removed.
        """
        _write(run, self.result.samples_path, write_samples, self.samples)
        for number, rank in enumerate(self.result.ranks):
            _write(run, rank.samples_path, write_samples, self.rank_samples.get(number, ()))
        if self.trace:
            _write(run, self.result.trace_path, write_trace, self.trace)
        if self.trouble:
            raise self.trouble


def measure(
    isolation: Isolation,
    spec: Spec,
    environment: Mapping[str, Any] | None = None,
    reference: Reference | None = None,
) -> Measured:
    """Run one cell to its end and return its measurement.

    Args:
        environment: facts about the machine and the software's versions, for the record.
        reference: the figures of the same cell without a limit; weighin kills a cell that thrashes
            in comparison.
    """
    cell = spec.cell
    started_at, start_ns = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic_ns()
    cached_bytes = page_cache.drop(spec.files) if spec.files or spec.job else None
    states = {file: _state(file) for file in spec.files if spec.job}
    with staging.own_folder(Path(tempfile.gettempdir()), _PREFIX) as folder, ExitStack() as opened:
        spec.enter(opened)
        listener = Listener(folder, cell.ranks if spec.job else 1)
        watch = Watch(spec, listener, reference)
        begun_ns = time.monotonic_ns()
        with interrupts.put_off(), ExitStack() as failing:
            failing.callback(watch.abandon)
            running = spec.start(isolation, listener.path)
            failing.callback(running.close)
            failing.callback(spec.release)
            try:
                watch.begin(running)
                spec.begun(running)
                watch.wait()
                end_ns = watch.server_ready_ns or time.monotonic_ns()
                watch.end()
            finally:
                watch.close()
            failing.pop_all()
            spec.release()
            trouble: HarnessError | None = None
            try:
                running.close()
            except HarnessError as error:  # the result is still recorded
                trouble = error
        warnings = spec.finish(cached_bytes)
    changed = tuple(file for file, state in states.items() if _state(file) != state)
    because = None
    if changed:
        outcome, who = Outcome.STRATEGY_FAILED, "the strategy"
        if isolation.name == "docker":  # mounts the files read-only
            outcome, who = Outcome.MEASUREMENT_FAILED, "another program"
        names = ", ".join(file.name for file in changed[:_NAMED])
        names += ", ..." * (len(changed) > _NAMED)
        because = outcome, f"{who} changed the checkpoint's files during the measurement: {names}"
    about = {
        "model_bytes": spec.model_bytes,
        "cached_bytes_at_start": cached_bytes,
        "started_at": started_at,
        "sources_hash": spec.sources_hash,
        "samples_path": run_folder.samples_path(cell) if watch.samples else None,
        "trace_path": run_folder.trace_path(cell) if watch.trace else None,
        "environment": {**(environment or {}), **spec.facts},
        "touched_bytes_before": spec.touched_bytes,
    }
    wall_ns = time.monotonic_ns() - start_ns
    result = watch.result(about, end_ns - begun_ns, wall_ns, because, warnings)
    return Measured(result, watch.samples, watch.trace, watch.rank_samples, changed, trouble)


def remove_leftovers() -> list[str]:
    """Remove the temporary folders of killed runs; return one line for each folder."""
    folders = staging.remove_orphans(Path(tempfile.gettempdir()), _PREFIX)
    return [f"folder {folder}" for folder in folders]


def _state(file: Path) -> tuple[int, int, int, int] | None:
    """Return a file's size, times and inode, which show any change; None for a missing file."""
    try:
        state = file.stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def _write(
    run: Path, name: str | None, write: Callable[[Path, _Table], None], table: _Table
) -> None:
    if name is None:
        return
    path = run / name
    with run_folder.writing(path, "; the record of its cell is kept"):
        no_link(path.parent, run)
        path.unlink(missing_ok=True)
        try:
            write(path, table)
        except OSError:
            path.unlink(missing_ok=True)
            raise
