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
        "num_cpus": 0,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
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

    @property
    def alive(self) -> list[Any]:
        return [node for node in self.by_lock.values() if node.any_processes_alive()]

    def add(self, *, monitor: str | None = "0", code: Path = ROOT / "harness") -> Any:
        """Start a node; ``monitor`` is the refresh time of Ray's memory monitor, in ms, and ``code``
        the folder of its weighin.
        """
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
        while len(self.alive) < count:
            self.add()
        return self.alive

    def kill(self, node: Any) -> None:
        """Kill a node's processes without a chance to clean up, as when its machine is lost."""
        self._cluster.remove_node(node, allow_graceful=False)

    def is_missed(self, node: Any) -> bool:
        """Tell whether Ray knows that a killed node is lost, which takes it some seconds."""
        table = self._cluster.global_state.node_table()
        return any(one["NodeID"] == node.node_id and not one["Alive"] for one in table)

    def of_process(self, pid: str) -> Any:
        """Return the node of a process, by the lock in its environment; None if it has ended."""
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
        except OSError:
            return None
        return next((node for lock, node in self.by_lock.items() if lock in environment), None)

    def at_work(self) -> list[str]:
        """Return the pids of the workers that run on the nodes."""
        return [line.partition(" ")[0] for line in self._ours() if "weighin.worker" in line]

    def left(self) -> list[str]:
        """Return what runs on the nodes for a driver."""
        return [line for line in self._ours() if "weighin." in line]

    def _ours(self) -> list[str]:
        return leftovers.processes(str(self.cache))
