"""What ``weighin floor`` was asked for becomes a search; an interrupted one becomes it again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from weighin.errors import ConfigError, RecordError
from weighin.probes import environment
from weighin.record import Result
from weighin.records.floor import COARSEST, bracket, results_of, searched, stopped_by, why_stopped
from weighin.run import request as bench
from weighin.run import runner
from weighin.run.bisection import next_cell
from weighin.run.request import Request
from weighin.run.runner import Progress, Run
from weighin.suite.matrix import Planned
from weighin.units import format_bytes


@dataclass(frozen=True, slots=True)
class Search:
    """The floors to find: of every planned cell, which is without a limit, to ``within``."""

    run: Run
    within: float

    def perform(self, progress: Progress) -> list[Result]:
        """Find the floors one after the other; returns the results of all cells."""
        return runner.run(self.run, progress, lambda results: self._next(results, progress))

    def _next(self, results: Sequence[Result], progress: Progress) -> Planned | None:
        highest = environment.total_ram_bytes()
        done = {result.cell.id for result in results}
        for planned in self.run.planned:
            if planned.skip:
                if planned.cell.id not in done:
                    return planned
                continue
            cell = next_cell(planned.cell, results, self.within, highest)
            if cell is not None:
                if results and searched(results[-1].cell) == searched(cell):
                    progress.narrowed(said(planned, results))
                return replace(planned, cell=cell)
            if results and searched(results[-1].cell) == searched(planned.cell):
                progress.narrowed(said(planned, results))
        return None


def start(request: Request) -> tuple[Search, str]:
    """Plan a new search; returns it, and a note on how it is isolated.

    Raises:
        ConfigError, UnknownName, IsolationUnavailable, RecordError: nothing was started.
    """
    assert request.within is not None
    if not 0 < request.within <= COARSEST:
        raise ConfigError(
            f"--within {request.within * 100:g}% is not between 0% and {COARSEST:.0%}",
            "write a share of the floor, such as --within 1%",
        )
    run, note = bench.start(request)
    return Search(run, request.within), note


def resume(folder: Path, *, trusted: bool = False) -> Search:
    """Return a search that was started before.

    Raises:
        RecordError: the folder is no run, or one of ``weighin bench``.
        ConfigError: a strategy of its plan is gone, or its code is foreign and not ``trusted``.
    """
    run, settings = bench.restore(folder, trusted=trusted)
    if "within" not in settings:
        raise RecordError(
            f"{folder} is no search for floors",
            f"go on with it: weighin bench --resume {quote(str(folder))}",
        )
    return Search(run, settings["within"])


def said(planned: Planned, results: Sequence[Result]) -> str:
    """Return what is known of a floor by now, in words."""
    ours = results_of(searched(planned.cell), results)
    if stop := stopped_by(ours):
        return f"no floor of {planned.cell.strategy}: {why_stopped(stop)}"
    known = bracket(ours)
    words = []
    if known.failing_bytes is not None:
        words.append(f"above {format_bytes(known.failing_bytes)}")
    if known.working_bytes is not None:
        words.append(f"not above {format_bytes(known.working_bytes)}")
    if known.step_bytes is not None:
        words.append(f"{format_bytes(known.step_bytes)} apart, passed {known.passed} times")
    return f"floor of {planned.cell.strategy}: {', '.join(words) or 'not known yet'}"
