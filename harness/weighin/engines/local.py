"""The engine of one machine: the cells run one by one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from weighin.record import Result
from weighin.run import runner
from weighin.run.site import THIS_MACHINE, Site
from weighin.run.task import Progress, Run


class LocalEngine(AbstractContextManager["LocalEngine"]):
    """Runs the cells one by one on this machine."""

    site: Site = THIS_MACHINE

    def __exit__(self, *_: object) -> None:
        return

    def run(self, task: Run, progress: Progress) -> Sequence[Result]:
        return runner.run(task, progress)
