"""Choose where the cells (measurements) of a plan run: ``local``, this machine, or ``ray``, a cluster.

What only --jobs and a cluster need is imported when it is asked for, because it takes 60 ms.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from weighin.errors import ConfigError, UnknownName
from weighin.plan.task import Node, Progress, Run
from weighin.result import Result
from weighin.run import runner
from weighin.text import one_line

NAMES: Final = ("local", "ray")

Perform = Callable[[Run, Progress], Sequence[Result]]
"""A function that runs every cell without a record, and returns the results of all cells."""


def settings(
    name: str, address: str | None, labels: Sequence[str], jobs: int = 1
) -> dict[str, Any]:
    """Return an engine's settings for plan.json; empty if this machine runs the cells one by one."""
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
    named = {key: value for key, _, value in pairs}
    return {"name": name, "address": address or "auto", "labels": named}


@contextmanager
def opened(chosen: Mapping[str, Any]) -> Iterator[tuple[Sequence[Node], Perform]]:
    """Yield the nodes that run the cells (none for this machine), and the function that runs them.

    ``chosen`` comes from ``settings``. For the engine ``ray``, entering the block connects to Ray.
    """
    match chosen:
        case {"name": "local", "jobs": int(number)}:
            from weighin.fleet.driver import run_jobs

            yield (), lambda task, progress: run_jobs(number, task, progress)
        case {"name": "ray", "address": str(address), "labels": dict(labels)}:
            from weighin.fleet.cluster import connected
            from weighin.fleet.driver import Driver

            with connected(address, labels) as cluster:
                nodes = cluster.find()
                yield nodes, lambda task, progress: Driver(cluster, nodes, task, progress).run()
        case _ if chosen:
            shown = one_line(str(dict(chosen)), 100)
            raise ConfigError(f"the plan has an unknown engine: {shown}", "start a new run")
        case _:
            yield (), runner.run
