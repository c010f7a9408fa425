"""Define the interface of engines, which run cells (measurements), and choose an engine by name."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

from weighin.errors import ConfigError, UnknownName
from weighin.plan.nodes import Node
from weighin.plan.task import Progress, Run
from weighin.result import Result
from weighin.run import runner

NAMES: Final = ("local", "ray")


class Engine(Protocol):
    """A way to run the cells (measurements) of a plan: on this machine, or on a cluster."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes that run the cells; empty for this machine."""

    def run(self, task: Run, progress: Progress) -> Sequence[Result]:
        """Run every cell that has no record, and return the results of all cells.

        Raises:
            HarnessError: the run cannot start or go on; finished cells keep their records.
        """


class LocalEngine:
    """Runs the cells (measurements) of a plan one by one on this machine."""

    nodes: Sequence[Node] = ()

    def run(self, task: Run, progress: Progress) -> Sequence[Result]:
        return runner.run(task, progress)


def settings(
    name: str, address: str | None, labels: Sequence[str], jobs: int = 1
) -> dict[str, Any]:
    """Return an engine's settings for plan.json; empty if this machine runs the cells one by one.

    Raises:
        UnknownName: no engine has this name.
        ConfigError: an option is not for this engine, ``jobs`` is below 1, or a label is not KEY=VALUE.
    """
    if name not in NAMES:
        raise UnknownName("engine", name, NAMES)
    if jobs < 1:
        raise ConfigError(
            f"--jobs {jobs} would measure no cell",
            "give the number of cells to measure at once: --jobs 2",
        )
    if name == "local":
        if address or labels:
            option = "--address" if address else "--label"
            raise ConfigError(
                f"{option} has an effect only with --engine ray",
                f"add --engine ray, or leave {option} out",
            )
        return {"name": name, "jobs": jobs} if jobs > 1 else {}
    if jobs > 1:
        raise ConfigError(
            "--jobs is for one machine, because each node of a cluster runs one cell at a time",
            "leave --jobs out",
        )
    pairs = [label.partition("=") for label in labels]
    for key, divided, value in pairs:
        if not (key and divided and value):
            raise ConfigError(
                f"--label: {key!r} is not of the form KEY=VALUE",
                "write --label ray.io/accelerator-type=H100",
                option="--label",
            )
    return {
        "name": name,
        "address": address or "auto",
        "labels": {key: value for key, _, value in pairs},
    }


def opened(chosen: Mapping[str, Any]) -> AbstractContextManager[Engine]:
    """Return a context manager that yields the engine with the settings ``chosen``.

    ``chosen`` comes from ``settings``. For the engine ``ray``, entering the block connects to Ray.

    Raises:
        ConfigError: ray is not installed, the cluster does not answer, or its nodes cannot measure.
    """
    if not chosen:
        return nullcontext(LocalEngine())
    if chosen["name"] == "local":
        from weighin.engines.jobs import JobsEngine

        return nullcontext(JobsEngine(chosen["jobs"]))
    from weighin.engines.ray.fleet import opened as ray_opened  # ray takes a second to import

    return ray_opened(chosen["address"], chosen["labels"])
