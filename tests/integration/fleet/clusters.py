"""A Ray cluster on this machine, whose nodes have locks of their own, for the tests of fleets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import leftovers
from typed import ROOT

_OBJECT_STORE_BYTES = 80 * 2**20  # the least that Ray accepts is 75 MiB


@contextmanager
def cluster(folder: Path, cache: Path) -> Iterator[Nodes]:
    """Start a cluster whose head does not measure; stop it at the end."""
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 0, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False,
    }  # fmt: skip
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield Nodes(started, folder, cache)
    finally:
        started.shutdown()
        leftovers.end(leftovers.processes(str(cache)))  # of a test that failed


class Nodes:
    """The nodes of a cluster that can measure; a test adds and kills them.

    ``cache`` belongs to these nodes alone, and so marks the processes that they start.
    """

    def __init__(self, started: Any, folder: Path, cache: Path) -> None:
        self._cluster = started
        self._folder = folder
        self.cache = cache
        self.by_lock: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, *, monitor: str | None = "0", code: Path = ROOT / "harness") -> Any:
        """Start a node. ``monitor`` is the refresh time of Ray's memory monitor, in ms; ``code`` has weighin."""
        lock = str(self._folder / f"lock-{len(self.by_lock)}.")
        variables = {
            "PYTHONPATH": str(code),
            "WEIGHIN_CACHE": str(self.cache),
            "WEIGHIN_LOCK": lock,
            "DOCKER_HOST": "unix:///nonexistent",  # the nodes have cgroups, and no Docker
        }
        if monitor is not None:
            variables["RAY_memory_monitor_refresh_ms"] = monitor
        self.by_lock[lock] = self._cluster.add_node(
            num_cpus=1,
            resources={"weighin_slot": 1},
            object_store_memory=_OBJECT_STORE_BYTES,
            env_vars=variables,
        )
        return self.by_lock[lock]

    def grow(self, count: int) -> list[Any]:
        """Add nodes until ``count`` nodes are alive, and return all nodes that are."""
        while True:
            alive = [node for node in self.by_lock.values() if node.any_processes_alive()]
            if len(alive) >= count:
                return alive
            self.add()

    def kill(self, node: Any) -> None:
        """Kill a node's processes without a chance to clean up, as when its machine is lost."""
        self._cluster.remove_node(node, allow_graceful=False)

    def of_process(self, pid: str) -> Any:
        """Return the node of a process, by the lock in its environment; None if it has ended."""
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
        except OSError:
            return None
        return next((node for lock, node in self.by_lock.items() if lock in environment), None)

    def at_work(self) -> list[str]:
        """Return the pids of the workers that run on the nodes."""
        return [line.partition(" ")[0] for line in self.left() if "weighin.worker" in line]

    def left(self) -> list[str]:
        """Return what runs on the nodes for a driver."""
        return [line for line in leftovers.processes(str(self.cache)) if "weighin." in line]
