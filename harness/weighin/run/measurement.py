"""Hold what was measured in a cell, until its record and its samples are written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from weighin.errors import HarnessError
from weighin.probes.allocator_trace import Trace, write_trace
from weighin.probes.sampler import write_samples
from weighin.records import run_folder
from weighin.result import Result, Sample


@dataclass(frozen=True, slots=True)
class CellMeasurement:
    """A cell's result, and the samples and trace that are written after its record.

    ``rank_samples`` are the samples of each rank by its number. ``changed`` are the files of the
    checkpoint that changed while the cell ran. ``trouble`` is an error after the
    measurement, such as a worker that cannot be removed. The run records the result and then stops
    with ``trouble``.
    """

    result: Result
    samples: Sequence[Sample] = ()
    trace: Trace | None = None
    rank_samples: Mapping[int, Sequence[Sample]] = field(default_factory=dict)
    changed: tuple[Path, ...] = ()
    trouble: HarnessError | None = None

    def finish(self, run: Path) -> None:
        """Write the samples and the trace into the run's folder, then raise ``trouble``.

        Raises:
            RecordError: a file cannot be written; its partial content is removed.
        """
        if self.result.samples_path:
            path = run / self.result.samples_path
            _write_beside(path, partial(write_samples, path, list(self.samples)))
        for number, rank in enumerate(self.result.ranks):
            if name := rank.samples_path:
                samples = list(self.rank_samples[number])
                _write_beside(run / name, partial(write_samples, run / name, samples))
        if self.result.trace_path and self.trace:
            path = run / self.result.trace_path
            _write_beside(path, partial(write_trace, path, self.trace))
        if self.trouble:
            raise self.trouble


def trouble_of(close: Callable[[], None]) -> HarnessError | None:
    """Remove what ran in a cell; return an error instead of raising it, so that the result is recorded."""
    try:
        close()
    except HarnessError as trouble:
        return trouble
    return None


def _write_beside(path: Path, write: Callable[[], None]) -> None:
    with run_folder.writing(path, "; the record of its cell is kept"):
        try:
            write()
        except OSError:
            path.unlink(missing_ok=True)
            raise
