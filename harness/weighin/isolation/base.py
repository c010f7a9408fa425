"""Ways to run one worker: in a Docker container, in a memory cgroup, or as a plain process.

An isolation starts a worker and gives back a ``Running``: a channel to talk to it, the host pid
and the cgroup to watch (None where they cannot be seen), and a ``close`` that leaves nothing
behind. All limits are set here, all of them before the worker's first instruction.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weighin.cell import Job
from weighin.isolation.channel import Channel
from weighin.probes.observer import Observer


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended. ``signal`` is the one that ended it; ``oom_killed`` is the engine's word.

    ``still_runs`` is a worker that did not end, not even when it was killed.
    """

    code: int | None
    signal: int | None = None
    oom_killed: bool = False
    still_runs: bool = False


class Running(Protocol):
    """A started worker."""

    @property
    def channel(self) -> Channel:
        """Its events come from here, acknowledgements go there."""
        ...

    @property
    def pid(self) -> int | None:
        """The worker's pid in the parent's namespace, or None where it cannot be seen."""
        ...

    @property
    def cgroup(self) -> Path | None:
        """The folder of its memory cgroup, or None where it has none or it cannot be seen."""
        ...

    @property
    def unseen(self) -> str:
        """Why pid or cgroup is None, for the record; empty where both are there."""
        ...

    def observe_inside(self, interval_s: float) -> Observer | None:
        """Start a watcher where the worker is, if it cannot be seen from here; None where it can."""
        ...

    def wait(self, timeout_s: float) -> Exit:
        """Return how the worker ended; raises TimeoutError where it still runs after that time."""
        ...

    def kill(self) -> None:
        """End the worker now, and its children; returns without waiting."""
        ...

    def close(self) -> None:
        """End what still runs and remove every trace. Always called, may be called twice.

        Raises:
            StillRunning, IsolationUnavailable: something cannot be removed; all else is.
        """
        ...


class Isolation(Protocol):
    """One way to run workers."""

    @property
    def name(self) -> str:
        """Return "docker", "cgroup" or "process"."""
        ...

    @property
    def limits(self) -> bool:
        """Whether it can hold a RAM limit."""
        ...

    def check(self) -> None:
        """Raise IsolationUnavailable, with the repair, where this machine cannot run cells so."""
        ...

    def prepare(self, progress: Callable[[str], None] = ..., /) -> None:
        """Do the slow work that all cells share (build the image, say), a line for each step of it."""
        ...

    def start(self, job: Job) -> Running:
        """Start one worker for this job, limited as its cell says."""
        ...

    def remove_stale(self) -> list[str]:
        """Remove what dead runs left behind; returns one line for each thing removed."""
        ...

    def describe(self) -> dict[str, str]:
        """Return what the record's environment says of this isolation, such as its version."""
        ...
