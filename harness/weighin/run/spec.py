"""What to measure in one cell, and how it is started: what loads, saves and commands have in common."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighin.cell import Cell, Job
from weighin.isolation.base import Isolation, Running
from weighin.result import Mark
from weighin.run.output import Readiness
from weighin.settings.definition import Settings

if TYPE_CHECKING:
    from weighin.disk.mount import Mount


@dataclass(slots=True)
class Spec:
    """One cell to measure.

    Attributes:
        files: the files to drop from the page cache before the start.
        job: what a worker loads or saves; None for a command.
        settings: those of a command; None for a job.
        timeout_s: the time after which the cell is killed; infinite for no time-out.
        on_phase: is called with the name of each phase of a job that begins.
        disk: the slow disk from which a job reads.
        readiness: tells when a command that is a server is ready.
        facts: what the record says of the cell's environment.
        sources_hash: the hash of a load's own code.
    """

    cell: Cell
    files: Sequence[Path] = ()
    job: Job | None = None
    settings: Settings | None = None
    timeout_s: float = math.inf
    model_bytes: int | None = None
    on_phase: Callable[[str], None] = lambda _: None
    disk: "Mount | None" = None
    readiness: Readiness | None = None
    touched_bytes: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    sources_hash: str | None = None

    def enter(self, opened: ExitStack) -> None:
        """Prepare what the cell needs while it runs; ``opened`` closes it."""

    def start(self, isolation: Isolation, listener: Path) -> Running:
        """Start the cell, which must be able to reach the socket ``listener``."""
        raise NotImplementedError

    def begun(self, running: Any) -> None:
        """Do what can be done only when the cell runs."""

    def before_load(self) -> None:
        """Do what is to be done when the worker waits for the begin of its load."""

    def release(self) -> None:
        """Close the disk: a process that waits for an unanswered read cannot be killed."""
        if self.disk:
            self.disk.close()

    def finish(self, cached_bytes: int | None) -> list[str]:
        """Do what is left to do after the end of the cell; return warnings.

        ``cached_bytes`` of ``files`` were in the page cache at the start; None if unknown.
        """
        raise NotImplementedError
