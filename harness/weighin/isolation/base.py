"""The interface of isolations: Docker containers, memory cgroups and plain processes.

An isolation starts a worker and returns a ``Running``: a channel to the worker, its pid and cgroup
on this machine (None if they are not visible), and a ``close`` that removes everything. The
isolation sets all limits before the worker's first instruction.
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
    """How a worker ended: an exit code, or the signal that killed it.

    ``oom_killed`` is what the Docker engine reports. ``still_runs`` means that the worker did not
    end, not even after SIGKILL.
    """

    code: int | None
    signal: int | None = None
    oom_killed: bool = False
    still_runs: bool = False


class Running(Protocol):
    """A started worker."""

    @property
    def channel(self) -> Channel:
        """The channel that receives its events and sends acknowledgements."""
        ...

    @property
    def pid(self) -> int | None:
        """The worker's pid in the parent's pid namespace; None if it is not visible there."""
        ...

    @property
    def cgroup(self) -> Path | None:
        """The folder of its memory cgroup; None if it has none or it is not visible."""
        ...

    @property
    def unseen(self) -> str:
        """The reason why pid or cgroup is None, for the record; empty if both are known."""
        ...

    def observe_inside(self, interval_s: float) -> Observer | None:
        """Start a watcher beside the worker, if the worker is not visible from here; else None."""
        ...

    def wait(self, timeout_s: float) -> Exit:
        """Return how the worker ended; raises TimeoutError if it still runs after that time."""
        ...

    def kill(self) -> None:
        """Kill the worker and its children; returns without waiting for their end."""
        ...

    def close(self) -> None:
        """Kill what still runs and remove everything. Always called, may be called twice.

        Raises:
            StillRunning, IsolationUnavailable: something could not be removed; the rest was.
        """
        ...


class Isolation(Protocol):
    """A method of running workers apart from this process."""

    @property
    def name(self) -> str:
        """Return "docker", "cgroup" or "process"."""
        ...

    @property
    def limits(self) -> bool:
        """Whether it can enforce a RAM limit."""
        ...

    def check(self) -> None:
        """Raise IsolationUnavailable, with the repair, if it does not work on this machine."""
        ...

    def prepare(self, progress: Callable[[str], None] = ..., /) -> None:
        """Do the slow work that all cells share, such as building an image; reports each step."""
        ...

    def added_code(self, job: Job) -> list[str]:
        """Return a line for each installed package that a worker gets although its place lacks it.

        Raises:
            ConfigError: the model's module is in a package that this isolation cannot provide.
        """
        ...

    def start(self, job: Job) -> Running:
        """Start one worker for this job, under the limits of its cell."""
        ...

    def remove_stale(self) -> list[str]:
        """Remove the leftovers of dead runs; returns one line for each."""
        ...

    def describe(self) -> dict[str, str]:
        """Return the entries about this isolation in a record's environment, such as its version."""
        ...
