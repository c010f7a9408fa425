"""Hold a cell's (measurement's) result and samples until weighin writes them to the run's folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from weighin.errors import HarnessError
from weighin.foreign import no_link
from weighin.probes.allocator_trace import Trace, write_trace
from weighin.probes.sampler import write_samples
from weighin.records import run_folder
from weighin.result import Result, Sample

_Table = TypeVar("_Table")


@dataclass(frozen=True, slots=True)
class CellMeasurement:
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


def trouble_of(close: Callable[[], None]) -> HarnessError | None:
    """Call ``close``; return its error instead of raising it, so that the result is still recorded."""
    try:
        close()
    except HarnessError as trouble:
        return trouble
    return None


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
