"""Real cells on nodes of a Ray cluster: lost nodes, killed drivers, Ray's memory monitor."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import leftovers
import pytest
from clusters import Nodes, cluster
from typed import ROOT, CommandLine, Ended, Started

pytestmark = [pytest.mark.ray, pytest.mark.cgroup, pytest.mark.slow]

CELLS = 6
"""Two of them wait until they are let go."""


@pytest.fixture(scope="module")
def nodes(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with cluster(tmp_path_factory.mktemp("locks"), disk / "cache of the nodes") as started:
        yield started


def bench(nodes: Nodes, strategies: str = "baseline,streaming,./pausing.py") -> str:
    cells = f"gpt2-tiny -s {strategies} --ram none,1g --isolation cgroup"
    return f"bench {cells} --engine ray --set address={nodes.address} --out run"


def paused(command: CommandLine, nodes: Nodes, count: int) -> Started:
    """Start the matrix on nodes, and return when all cells but the two that wait have a record."""
    nodes.grow(count)
    return command.hold(
        bench(nodes),
        before=("sh", "-c", 'exec "$@" 2> said', "sh"),
        records=CELLS - 2,
        at_work=lambda _: len(nodes.at_work()) == 2,
    )


def said(command: CommandLine) -> str:
    return (command.folder / "said").read_text()


def used_nodes(command: CommandLine, first: int = 0) -> set[str]:
    return {one["environment"]["node"]["id"] for one in command.records("run")[first:]}


def assert_complete(command: CommandLine, ended: Ended) -> None:
    """Every cell of the plan has one record, which is ok and has samples."""
    assert (ended.code, ended.left) == (0, []), ended.err
    plan = json.loads((command.folder / "run" / "plan.json").read_text())
    found = command.records("run")
    cells = [[json.dumps(one, sort_keys=True) for one in some] for some in (plan["cells"], (one["cell"] for one in found))]  # fmt: skip
    assert sorted(cells[0]) == sorted(cells[1])
    assert {record["outcome"] for record in found} == {"ok"}
    for record in found:
        assert (command.folder / "run" / record["samples_path"]).stat().st_size > 100
        assert "OMP_NUM_THREADS" not in record["environment"]["settings"]  # Ray's workers have it


def test_the_error_without_a_node_that_may_measure(command: CommandLine, nodes: Nodes) -> None:
    ended = command.run(f"{bench(nodes, 'baseline')} --set labels.ray.io/accelerator-type=H100")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "error: no node of the cluster has the resource weighin_slot and all labels of the run\nstart Ray with this resource on each machine on which weighin is to measure: RAY_memory_monitor_refresh_ms=0 ray start"
        """ --resources '{"weighin_slot": 1}' --address HOST:6379\n"""
    )


def test_sigterm_in_the_first_seconds_is_as_ctrl_c(command: CommandLine, nodes: Nodes) -> None:
    nodes.grow(1)
    started = command.start(bench(nodes, "baseline"))
    started.wait_for_handlers()
    stopped = started.end(signal.SIGTERM)
    assert (stopped.code, stopped.left) == (130, []), stopped.err
    assert "Traceback" not in stopped.err
    leftovers.wait_until(lambda: nodes.left() == [], "a node goes on")


def test_ctrl_c_ends_the_cells_on_the_nodes(command: CommandLine, nodes: Nodes) -> None:
    stopped = paused(command, nodes, 2).end(signal.SIGINT)
    assert (stopped.code, stopped.left, nodes.left()) == (130, [], []), said(command)
    assert said(command).splitlines()[-2:] == [
        f"error: stopped; nothing is left running; {CELLS - 2} of {CELLS} cells measured",
        "resume it: weighin bench --resume run",
    ]
    assert len(command.records("run")) == CELLS - 2


@pytest.mark.nightly
def test_a_driver_that_was_killed_is_resumed_where_it_was(
    command: CommandLine, nodes: Nodes
) -> None:
    paused(command, nodes, 2).end(signal.SIGKILL)
    leftovers.wait_until(lambda: nodes.left() == [], "a cell outlived its driver")
    before = command.records("run")
    command.let_go()
    ended = command.run(f"bench --resume run --set address={nodes.address}")
    assert nodes.left() == []
    assert command.records("run")[: CELLS - 2] == before
    assert_complete(command, ended)


@pytest.mark.nightly
def test_the_cell_of_a_lost_node_runs_on_another_node(command: CommandLine, nodes: Nodes) -> None:
    started = paused(command, nodes, 3)
    lost = nodes.of_process(nodes.at_work()[0])
    nodes.kill(lost)
    leftovers.wait_until(
        lambda: len(nodes.at_work()) == 2 and lost not in map(nodes.of_process, nodes.at_work()),
        "the cell did not move",
    )
    leftovers.wait_until(lambda: "the node was lost" in said(command), "the driver missed it")
    command.let_go()
    assert_complete(command, started.end())
    assert lost.node_id not in used_nodes(command, CELLS - 2)


@pytest.mark.nightly
def test_a_node_that_joins_gets_the_next_cells_unless_its_code_differs(
    command: CommandLine, nodes: Nodes
) -> None:
    first, *others = nodes.grow(1)
    for node in others:
        nodes.kill(node)
    other = command.folder / "other"
    shutil.copytree(ROOT / "harness" / "weighin", other / "harness" / "weighin")
    (other / "strategies").symlink_to(ROOT / "strategies")
    with (other / "harness" / "weighin" / "text.py").open("a") as file:
        file.write("# changed\n")
    command.strategy("pausing").chmod(0o755)
    started = command.start(bench(nodes))
    leftovers.wait_until(lambda: command.records("run"), "no cell ended", patience_s=300)
    changed, joined = nodes.add(code=other / "harness"), nodes.add()
    leftovers.wait_until(
        lambda: len(command.records("run")) == CELLS - 2 and len(nodes.at_work()) == 2,
        "the node that joined got no cell",
        patience_s=300,
    )
    assert {nodes.of_process(pid) for pid in nodes.at_work()} == {first, joined}
    command.let_go()
    ended = started.end()
    nodes.kill(changed)
    assert_complete(command, ended)
    assert used_nodes(command) == {first.node_id, joined.node_id}
    name = f"/{changed.node_id[:8]}"
    assert re.search(rf"no further cell for \S+{name}: this node has weighin ", ended.err)


@pytest.fixture
def watched(nodes: Nodes) -> Iterator[Any]:
    """A node that was started with Ray's memory monitor on, beside a node without it."""
    nodes.grow(1)
    node = nodes.add(monitor=None)
    yield node
    nodes.kill(node)


@pytest.mark.nightly
def test_a_node_with_rays_memory_monitor_is_refused(
    command: CommandLine, nodes: Nodes, watched: Any
) -> None:
    ended = command.run(bench(nodes, "baseline"))
    assert (ended.code, ended.out) == (2, "")
    head, repair = ended.err.splitlines()
    assert head.startswith("error: ")
    assert head.endswith(
        f"/{watched.node_id[:8]}: Ray's memory monitor is on, and would kill cells before their limit does"
    )
    assert head.count("monitor is on") == 1
    assert repair == (
        "stop Ray on these nodes (ray stop), and start Ray there without its memory monitor:"
        """ RAY_memory_monitor_refresh_ms=0 ray start --resources '{"weighin_slot": 1}'"""
    )
    assert not (command.folder / "run").exists()
