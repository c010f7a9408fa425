"""Measure what the driver of a fleet costs, and how much faster two nodes are than one.

    .venv/bin/python benchmarks/fleet.py

The script starts a Ray cluster on this machine. Its nodes answer each cell at once with a published
record, or sleep, so that no worker runs and only the fleet itself is measured: Ray's tasks, its
choice of nodes, and the records that the driver checks, appends and syncs.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from weighin.fleet import cluster as clusters
from weighin.fleet.driver import Driver
from weighin.fleet.node import Answer
from weighin.isolation import select
from weighin.plan.loads import plan_cell
from weighin.plan.task import Node, Planned, Progress, Run
from weighin.records import run_folder
from weighin.records.run_folder import parse
from weighin.result import Result
from weighin.suite import registry
from weighin.units import GIB, KIB

ROOT: Final = Path(__file__).resolve().parents[1]
RECORDS: Final = ROOT / "results" / "published" / "gpt2-xl-8GiB" / "records.jsonl"
_OBJECT_STORE_BYTES: Final = 80 * 2**20
_WARM_UP: Final = 200  # cells before the first reading

Task = Callable[[Mapping[str, Any]], Answer]
"""What Ray runs on a node, in the place of ``weighin.fleet.cluster.run``."""


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=10_000, help="cells of the first figure")
    parser.add_argument("--sleeping", type=int, default=40, help="cells that sleep for a second")
    arguments = parser.parse_args()
    with started(nodes=2) as address:
        print(f"{arguments.cells} cells on 2 nodes: {measured(address, arguments.cells)}")
        times_s = []
        for nodes in (1, 2):
            begun_s = time.monotonic()
            run(address, task_of(1), arguments.sleeping, nodes=nodes)
            times_s.append(time.monotonic() - begun_s)
    print(
        f"{arguments.sleeping} cells that sleep for 1 s: {times_s[0]:.1f} s on 1 node,"
        f" {times_s[1]:.1f} s on 2 nodes, {times_s[1] / times_s[0]:.2f}x"
    )


def task_of(seconds: float) -> Task:
    """Return a task that answers a cell with a published record after ``seconds``."""
    template = RECORDS.read_text().splitlines()[0]

    def answer(assignment: Mapping[str, Any]) -> Answer:
        import time

        import ray

        place = ray.get_runtime_context().get_node_id()
        time.sleep(seconds)
        record = json.loads(template) | {"cell": assignment["cell"], "samples_path": None}
        return place, {"began": {}, "record": {"record": json.dumps(record), "files": {}}}

    return answer


@contextmanager
def started(nodes: int) -> Iterator[str]:
    """Start a cluster whose head does not measure; yield its address."""
    from ray.cluster_utils import Cluster as LocalCluster

    size: dict[str, Any] = {"object_store_memory": _OBJECT_STORE_BYTES}
    head = size | {"num_cpus": 0, "include_dashboard": False}
    local = LocalCluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes):
            local.add_node(num_cpus=1, resources={clusters.SLOT: 1}, **size)
        yield str(local.address)
    finally:
        local.shutdown()


def measured(address: str, cells: int) -> str:
    """Run cells that end at once, and return the driver's cost of each."""
    readings: list[tuple[float, float]] = []
    count, most_kib = 0, 0

    def finished(_: object) -> None:
        nonlocal count, most_kib
        count += 1
        if count in (_WARM_UP, cells):
            readings.append((time.monotonic(), time.process_time()))
        most_kib = max(most_kib, resident_kib())

    run(address, task_of(0), _WARM_UP, nodes=2)  # imports and connects
    before_kib = resident_kib()
    run(address, task_of(0), cells, nodes=2, progress=Progress(finished=finished))
    (wall_s, cpu_s), (wall_end_s, cpu_end_s) = readings
    wall_ms, cpu_ms = (
        seconds / (cells - _WARM_UP) * 1000 for seconds in (wall_end_s - wall_s, cpu_end_s - cpu_s)
    )
    # The memory is that of the plan, of the cells that wait, and Ray's own.
    return (
        f"{wall_ms:.1f} ms per cell, of which the driver's processor time {cpu_ms:.1f} ms;"
        f" {(most_kib - before_kib) / cells:.1f} KiB of the driver's memory per cell"
    )


def run(
    address: str, task: Task, cells: int, *, nodes: int, progress: Progress | None = None
) -> None:
    """Run a plan of ``cells`` cells in a folder that is then removed."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        planned = plan(cells)
        settings = {"strategy_paths": {planned[0].strategy.name: str(planned[0].strategy.path)}}
        run_folder.write_plan(Path(folder), [each.cell for each in planned], settings)
        todo = Run(Path(folder), planned, select.named("process"))
        with patch.object(clusters, "run", task), clusters.connected(address, {}) as cluster:
            found = [
                Node(place, name, 8 * GIB, 8 * GIB, {"process": "" if number < nodes else "unused"})
                for number, (place, name) in enumerate(cluster.names().items())
            ]
            Driver(cluster, found, todo, progress or Progress()).run()
        records = run_folder.read(Path(folder)).results
        assert len({record.cell.repeat for record in records}) == len(records) == cells


def plan(cells: int) -> list[Planned]:
    """Return repeats of the first published cell."""
    cell = parse(Result, RECORDS.read_bytes().splitlines()[0], str(RECORDS)).cell
    cell = replace(cell, ram_limit_bytes=None, isolation="process")
    info = registry.strategies("load")[cell.strategy]
    return [plan_cell(replace(cell, repeat=repeat), info) for repeat in range(cells)]


def resident_kib() -> int:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // KIB


if __name__ == "__main__":
    main()
