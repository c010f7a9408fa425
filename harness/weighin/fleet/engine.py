"""Choose where the cells of a plan run: ``local``, this machine, or ``ray``, a cluster. What only several jobs
and a cluster need is imported when it is asked for, because it takes 60 ms.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from weighin.errors import ConfigError, UnknownName
from weighin.plan.task import Node, Progress, Run
from weighin.result import Result
from weighin.run import runner
from weighin.text import one_line

NAMES: Final = ("local", "ray")

Perform = Callable[[Run, Progress], Sequence[Result]]
"""A function that runs every cell without a record, and returns the results of all cells."""


def settings(name: str, address: str, labels: Mapping[str, str], jobs: int = 1) -> dict[str, Any]:
    """Return an engine's settings for plan.json; empty if this machine runs the cells one by one."""
    if name not in NAMES:
        raise UnknownName("engine", name, NAMES)
    if name == "ray" and jobs > 1:
        why = "jobs is for one machine, because each node of a cluster runs one cell at a time"
        raise ConfigError(why, "leave jobs out")
    if name == "ray":
        return {"name": name, "address": address or "auto", "labels": dict(labels)}
    if key := "address" if address else "labels" if labels else "":
        repair = f"add --engine ray, or leave {key} out"
        raise ConfigError(f"{key} has an effect only with --engine ray", repair)
    return {"name": name, "jobs": jobs} if jobs > 1 else {}


@contextmanager
def opened(chosen: Mapping[str, Any]) -> Iterator[tuple[Sequence[Node], Perform]]:
    """Yield the nodes that run the cells (none for this machine), and the function that runs them."""
    match chosen:
        case {"name": "local", "jobs": int(number)}:
            from weighin.fleet.driver import run_jobs

            yield (), partial(run_jobs, number)
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
