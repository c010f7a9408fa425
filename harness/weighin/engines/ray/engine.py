"""The engine that runs each cell as a Ray task, in the measuring slot of a node."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from weighin.engines.driver import Driver
from weighin.engines.ray import cluster as clusters
from weighin.engines.ray import fleet
from weighin.engines.ray.cluster import Cluster
from weighin.engines.ray.fleet import Fleet, RayTransport
from weighin.engines.scheduler import Node
from weighin.records import run_folder
from weighin.result import Result
from weighin.run import runner
from weighin.run.task import Progress, Run


@dataclass(frozen=True, slots=True)
class RayEngine:
    """Runs cells on the nodes of a cluster, one cell per node at a time."""

    cluster: Cluster
    machines: Fleet

    def run(self, task: Run, progress: Progress) -> Sequence[Result]:
        with runner.discarding(task):
            Driver(RayTransport(self.cluster), self.machines.nodes, task, progress, placed).run()
        return run_folder.read(task.folder).results


def placed(result: Result, node: Node) -> Result:
    """Add the node's name and id to a result."""
    where = {"node": {"name": node.name, "id": node.id}}
    return replace(result, environment=result.environment | where)


@contextmanager
def opened(address: str, labels: Mapping[str, str]) -> Iterator[RayEngine]:
    """Connect to a cluster, and return the engine for the nodes that have a slot and the labels.

    Raises:
        ConfigError: no cluster answers, or its nodes cannot measure.
    """
    with clusters.connected(address, labels) as cluster:
        yield RayEngine(cluster, fleet.find(cluster))
