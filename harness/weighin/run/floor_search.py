"""Start or resume the search that ``weighin floor`` performs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weighin.errors import ConfigError, RecordError
from weighin.isolation import cgroup
from weighin.plan import start as plans
from weighin.plan.task import Planned, Progress, Run
from weighin.records.floor import (
    COARSEST,
    TYPICAL_CELLS,
    Aim,
    bracket,
    next_cell,
    remaining_ns,
    results_of,
    searched,
    why_stopped,
)
from weighin.records.run_folder import resume_command
from weighin.result import Result
from weighin.run import runner
from weighin.settings.definition import Settings
from weighin.units import format_bytes, format_duration


@dataclass(frozen=True, slots=True)
class Search:
    """A search for floors: the smallest RAM limits under which the planned cells work.

    For each cell, the search ends when the largest failing limit and the smallest working limit are
    at most about ``within`` times the floor apart.
    """

    run: Run
    within: float

    def perform(self, progress: Progress) -> list[Result]:
        return runner.run(self.run, progress, lambda results: self._next(results, progress))

    def _next(self, results: Sequence[Result], progress: Progress) -> Planned | None:
        highest, _ = cgroup.ram_bytes(self.run.isolation.name)
        aim = self.run.settings.aim
        done = {result.cell.id for result in results}
        for planned in self.run.planned:
            if planned.skip:
                if planned.cell.id not in done:
                    return planned
                continue
            cell = next_cell(planned.cell, results, self.within, highest, aim)
            if results and searched(results[-1].cell) == searched(planned.cell):
                left = self._left(results, highest)
                progress.narrowed(said(planned, results, aim) + left)
            if cell is not None:
                return replace(planned, cell=cell)
        return None

    def _left(self, results: Sequence[Result], highest: int) -> str:
        """Return a text with the estimated time until the search ends; empty at its end."""
        cells = [planned.cell for planned in self.run.planned if not planned.skip]
        left_ns = remaining_ns(cells, results, self.within, highest, self.run.settings.aim)
        return f"; about {format_duration(left_ns / 1e9)} left" if left_ns else ""

    @property
    def warning(self) -> str:
        """A text: how long the search may take at most; empty if weighin kills cells that thrash."""
        if self.run.settings.aim is Aim.SURVIVES:
            return ""
        number = sum(not planned.skip for planned in self.run.planned)
        what = "--thrashing lets a measurement run on that reads its file again and again"
        if not (timeout_s := self.run.settings.timeout_s):
            return (
                f"{what}: each of about {number * TYPICAL_CELLS} measurements may take 10 times as"
                " long as without a limit, plus 30 s"
            )
        longest = format_duration(number * TYPICAL_CELLS * timeout_s)
        return (
            f"{what}: each of about {number * TYPICAL_CELLS} measurements may take {timeout_s:g} s"
            f" (--timeout), and the search up to {longest}"
        )


def start(settings: Settings, folder: Path | None = None) -> tuple[Search, str]:
    """Plan a new search, and return the search and a note on the chosen isolation.

    Raises:
        ConfigError, UnknownName, IsolationUnavailable, RecordError: the search cannot start.
    """
    within = settings.within
    assert within is not None
    if not 0 < within <= COARSEST:
        raise ConfigError(
            f"--within {within * 100:g}% is not between 0% and {COARSEST:.0%}",
            "write a percentage in this range, such as --within 1%",
        )
    run, note = plans.start(settings, folder)
    return Search(run, within), note


def resume(folder: Path, *, trusted: bool = False) -> Search:
    """Return the search that was started earlier in ``folder``.

    Raises:
        RecordError: the folder has no run that can be resumed, or a run that is no search.
        ConfigError: a strategy's file is missing, every cell is skipped, or ``trusted`` is False
            and the plan names code that is neither weighin's nor installed.
    """
    run = plans.restore(folder, trusted=trusted)
    if (within := run.settings.within) is None:
        raise RecordError(
            f"{folder} contains a run that is not a search for floors",
            f"to resume the run: {resume_command(run.settings.verb, folder)}",
        )
    return Search(run, within)


def said(planned: Planned, results: Sequence[Result], aim: Aim) -> str:
    """Say in one line between which limits the floor lies, according to the results so far."""
    ours = results_of(searched(planned.cell), results)
    if stop := why_stopped(ours):
        return f"no floor for {planned.cell.strategy}: {stop}"
    bounds = bracket(ours, aim)
    words = []
    if bounds.failing_bytes is not None:
        words.append(f"above {format_bytes(bounds.failing_bytes)}")
    if bounds.working_bytes is not None:
        words.append(f"at most {format_bytes(bounds.working_bytes)}")
    if bounds.step_bytes is not None:
        words.append(f"{format_bytes(bounds.step_bytes)} apart, passed {bounds.passed} times")
    return f"floor of {planned.cell.strategy}: {', '.join(words) or 'not known yet'}"
