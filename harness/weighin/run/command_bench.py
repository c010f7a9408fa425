"""Measure the commands of a run, one after the other."""

from dataclasses import dataclass
from typing import Any, Final

from weighin.cell import Cell
from weighin.errors import Interrupted
from weighin.isolation import select
from weighin.run import command_runner
from weighin.run.command_settings import CommandSettings
from weighin.run.measurement import CellMeasurement
from weighin.run.task import PlannedCommand, Progress, Run

_TIMES: Final = 10
_LEAST_S: Final = 30.0


@dataclass(slots=True)
class CommandBench:
    """The settings that all commands of a run share.

    ``stopped`` tells whether weighin received SIGINT, SIGTERM or SIGHUP during a command.
    """

    task: Run
    how: CommandSettings
    environment: dict[str, Any]
    stopped: bool = False

    def measure(self, planned: PlannedCommand) -> CellMeasurement:
        """Run one command and return its measurement.

        Raises:
            Interrupted: a signal during an earlier command ended the run.
        """
        if self.stopped:
            raise Interrupted("stopped; nothing is left running")
        measured, self.stopped = command_runner.take(
            self.task.isolation,
            self.how.of(planned.cell.strategy),
            planned.cell,
            self.task.settings.timeout_s or self._patience_s(planned.cell),
            self.environment,
            self.task.reference_for(planned.cell),
        )
        return measured

    def _patience_s(self, cell: Cell) -> float:
        """Return the time-out of a cell without --timeout, in seconds; 0 for none.

        In a search, a command whose limit is too small may run for hours. Its time-out is 10 times
        the time of the same command without a limit, and 30 s more.
        """
        if not self.how.in_search:
            return 0.0
        first = self.task.unlimited_result(cell)
        return round(_TIMES * (first.ready_ns or 0) / 1e9 + _LEAST_S, 1) if first else 0.0


def set_up(task: Run, progress: Progress) -> CommandBench:
    """Prepare the isolation; raise ConfigError if a cgroup around weighin has a smaller limit."""
    assert task.settings.command
    select.check_limits_around(task.isolation, [each.cell for each in task.planned])
    task.prepare(progress)
    return CommandBench(task, task.settings.command, task.environment())
