"""Measure one cell: drop its files from the page cache, start it, watch it, and build its result."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from weighin.cell import Cell
from weighin.checkpoint import staging
from weighin.errors import HarnessError
from weighin.files import no_link
from weighin.isolation.base import Isolation, Running
from weighin.probes import page_cache
from weighin.probes.gpu_memory import Trace, write_trace
from weighin.probes.sampler import write_samples
from weighin.records import run_folder
from weighin.records.verdict import Reference
from weighin.result import SCHEMA, Cost, Outcome, Result, Sample
from weighin.run import interrupts
from weighin.run.judge import Evidence, contradictions, judge, void
from weighin.run.listener import Listener
from weighin.run.output import Readiness
from weighin.run.watch import Watch
from weighin.settings.definition import Settings

if TYPE_CHECKING:
    from weighin.slow_disk import Mount

_PREFIX: Final = "weighin-run-"  # of the folder for the socket to which the processes report
_Table = TypeVar("_Table")


class Spec:
    """One cell to measure, and in which a load (or save) and a command differ.

    Attributes:
        files: the files to drop from the page cache before the start.
        on_phase: is called with the name of each phase of a load that begins.
        disk: the slow disk from which a load reads.
        readiness: tells when a command that is a server is ready.
        facts: what the record says of the cell's environment.
        because: another outcome, and the reason, if what was measured must not count.
    """

    def __init__(
        self,
        cell: Cell,
        settings: Settings | None = None,
        files: Sequence[Path] = (),
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.cell, self.settings, self.files = cell, settings or Settings(), files
        self.on_phase = on_phase
        self.disk: Mount | None = None
        self.readiness: Readiness | None = None
        self.facts: dict[str, Any] = {}
        self.because: tuple[Outcome, str] | None = None

    @property
    def is_load(self) -> bool:
        """Whether a worker loads or saves a model, or runs a test's body."""
        return self.cell.operation != "command"

    def enter(self, opened: ExitStack) -> None:
        """Prepare what the cell needs while it runs; ``opened`` closes it."""

    def start(self, isolation: Isolation, listener: Path) -> Running:
        """Start the cell, which must be able to reach the socket ``listener``."""
        raise NotImplementedError

    def begun(self, running: Running) -> None:
        """Do what can be done only when the cell runs."""

    def before_load(self) -> None:
        """Do what is to be done when the worker waits for the begin of its load."""

    def end_rest(self, running: Running) -> None:
        """End what runs on after the first process has ended by itself."""

    def ended(self, watch: Watch) -> None:
        """Look at what is left when the last figures were read."""

    def release(self) -> None:
        """Close the disk: a process that waits for an unanswered read cannot be killed."""
        if self.disk:
            self.disk.close()

    def finish(self, cached_bytes: int | None) -> list[str]:
        """Do what is left to do after the end of the cell; return warnings.

        ``cached_bytes`` of ``files`` were in the page cache at the start; None if unknown.
        """
        raise NotImplementedError

    def figures(
        self, watch: Watch, evidence: Evidence, outcome: Outcome, spent_ns: int
    ) -> dict[str, Any]:
        """Return fields of the result; ``cost`` has the times, ``warnings`` those of the figures."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell's result, and the samples and trace that are written after its record.

    Attributes:
        rank_samples: the samples of each rank, by the rank's number.
        trouble: an error after the measurement, for example when the worker is removed. The run
            records the result first, and then ``finish`` raises the error.
    """

    result: Result
    samples: Sequence[Sample] = ()
    trace: Trace | None = None
    rank_samples: Mapping[int, Sequence[Sample]] = field(default_factory=dict)
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
    started_at, start_ns = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic_ns()
    cached_bytes = page_cache.drop(spec.files) if spec.files else None
    with staging.own_folder(Path(tempfile.gettempdir()), _PREFIX) as folder, ExitStack() as opened:
        spec.enter(opened)
        listener = Listener(folder, spec.cell.ranks)
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
    result = replace(
        result_of(spec, watch, end_ns - begun_ns, time.monotonic_ns() - start_ns, warnings),
        cached_bytes_at_start=cached_bytes,
        started_at=started_at,
        environment={**(environment or {}), **spec.facts, **watch.ranks[0].environment},
    )
    return Measured(result, watch.samples, watch.trace, watch.rank_samples, trouble)


def result_of(
    spec: Spec, watch: Watch, spent_ns: int, wall_ns: int, warnings: Sequence[str] = ()
) -> Result:
    """Return the record of a cell that has ended.

    ``spent_ns`` is the time from a command's start to its end, or until the server was ready.
    """
    cell, evidence = spec.cell, watch.evidence()
    judged, message = judge(evidence)
    figures = spec.figures(watch, evidence, judged, spent_ns)
    outcome, doubts = judged, list[str]()
    if outcome is Outcome.OK and message:
        doubts, message = [message], ""
    if spec.because:
        outcome, message = void(outcome, message, *spec.because)
    times_ns = (figures["ready_ns"] or 0, figures["load_ns"] or 0)
    peaks, baseline = figures["peaks"], figures.get("baseline")
    wrong = contradictions(
        peaks, baseline, cell.ram_limit_bytes, cell.ranks, max(times_ns), wall_ns
    )
    if outcome is Outcome.OK and (why := next(wrong, "")):
        outcome, message = void(outcome, message, Outcome.MEASUREMENT_FAILED, why)
    if outcome is Outcome.THRASHING:  # it was killed, so its times are no results
        figures |= {"load_ns": None, "ready_ns": None}
        figures["cost"]["load_ns"] = None
    return Result(
        schema=SCHEMA,
        cell=cell,
        outcome=outcome,
        message=message,
        oom_kills=evidence.oom_kills,
        limit_events=watch.at_end.limit_events,
        exit_code=evidence.ended.shell_code,
        cost=Cost(wall_ns=wall_ns, **figures.pop("cost")),
        warnings=(*figures.pop("warnings"), *doubts, *warnings),
        samples_path=run_folder.samples_path(cell) if watch.samples else None,
        stopped=None if judged is Outcome.OOM_KILLED else watch.stopped,
        trace_path=run_folder.trace_path(cell) if watch.trace else None,
        **figures,
    )


def remove_leftovers() -> list[str]:
    """Remove the temporary folders of killed runs; return one line for each folder."""
    folders = staging.remove_orphans(Path(tempfile.gettempdir()), _PREFIX)
    return [f"folder {folder}" for folder in folders]


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
