"""Real cells on three nodes of a Ray cluster: lost nodes, killed drivers, Ray's memory monitor."""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import leftovers
import pytest
from clusters import Nodes, cluster
from nightly import nightly
from typed import ROOT, CommandLine, Started

pytestmark = [pytest.mark.ray, pytest.mark.cgroup, pytest.mark.slow]

SUITE = """
models: gpt2-tiny
strategies: [baseline, streaming, {pausing}]
ram: [none, 1g]
isolation: cgroup
"""
PAUSING = '''"""Wait while this file is marked as a program, then load rightly."""

import time
from pathlib import Path

import torch


def load_rightly(job):
    model = job.build_model()
    model.load_state_dict(torch.load(job.checkpoint, weights_only=True))
    return model


def load(job):
    with job.phase("pause"):
        while Path(__file__).stat().st_mode & 0o100:
            time.sleep(0.01)
    return load_rightly(job)
'''
CELLS = 6
HUNGRY = '''"""Touch more memory than the limit allows."""


def load(job):
    with job.phase("overrun"):
        return [bytearray(b"1") * (64 << 20) for _ in range(64)]
'''


@pytest.fixture(scope="module")
def nodes(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with cluster(tmp_path_factory.mktemp("locks"), disk / "cache of the nodes") as started:
        yield started


@pytest.fixture
def hold(command: CommandLine) -> Path:
    """A strategy that waits in the midst of its load until it is let go."""
    path = command.folder / "pausing.py"
    path.write_text(PAUSING)
    path.chmod(0o755)
    (command.folder / "suite.yaml").write_text(SUITE.format(pausing=path))
    return path


def start(command: CommandLine, nodes: Nodes) -> Started:
    return command.start(
        *("bench", "--suite", "suite.yaml", "--engine", "ray", "--set", f"address={nodes.address}"),
        *("--out", "run"),
    )


def start_and_wait_for_the_pause(command: CommandLine, nodes: Nodes) -> Started:
    """Start the matrix, and return when all cells but the two that wait have a record."""
    nodes.grow(3)
    started = start(command, nodes)
    leftovers.wait_until(
        lambda: (
            started.process.poll() is not None
            or (len(records(command)) == CELLS - 2 and len(nodes.at_work()) == 2)
        ),
        "the cells that wait did not begin",
        patience_s=300,
    )
    assert started.process.poll() is None, started.process.communicate()
    return started


def records(command: CommandLine) -> list[dict[str, Any]]:
    return command.records("run")


def measured(command: CommandLine) -> list[dict[str, Any]]:
    return [record for record in records(command) if record["outcome"] != "skipped"]


def used_nodes(command: CommandLine) -> set[str]:
    return {record["environment"]["node"]["id"] for record in measured(command)}


def assert_complete(command: CommandLine, outcomes: Set[str] = frozenset({"ok"})) -> None:
    """Every cell of the plan has one record, with these outcomes; what was measured has samples."""
    plan = json.loads((command.folder / "run" / "plan.json").read_text())
    found = records(command)
    assert sorted(map(_identity, found)) == sorted(_identity({"cell": c}) for c in plan["cells"])
    assert {record["outcome"] for record in found} == outcomes
    for record in measured(command):
        assert (command.folder / "run" / record["samples_path"]).stat().st_size > 100
        assert "OMP_NUM_THREADS" not in record["environment"]["settings"]  # Ray's workers have it


def _identity(record: dict[str, Any]) -> str:
    return json.dumps(record["cell"], sort_keys=True)


@pytest.fixture
def watched(nodes: Nodes) -> Iterator[Any]:
    """A node that was started with Ray's memory monitor on, beside a node without it."""
    nodes.grow(1)
    node = nodes.add(monitor=None)
    yield node
    nodes.kill(node)


@pytest.mark.nightly
def test_a_node_with_rays_memory_monitor_is_refused(
    command: CommandLine, nodes: Nodes, hold: Path, watched: Any
) -> None:
    ended = start(command, nodes).end()
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


def test_the_error_without_a_node_that_may_measure(
    command: CommandLine, nodes: Nodes, hold: Path
) -> None:
    ended = command.run(
        *("bench", "--suite", "suite.yaml", "--engine", "ray", "--set", f"address={nodes.address}"),
        *("--set", "labels.ray.io/accelerator-type=H100"),
    )
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "error: no node of the cluster has the resource weighin_slot and all labels of the run\nstart Ray with this resource on each machine on which weighin is to measure: RAY_memory_monitor_refresh_ms=0 ray start"
        """ --resources '{"weighin_slot": 1}' --address HOST:6379\n"""
    )


@pytest.mark.nightly
def test_a_cell_above_its_limit_is_killed_and_its_node_goes_on(
    command: CommandLine, nodes: Nodes
) -> None:
    nodes.grow(1)
    (command.folder / "hungry.py").write_text(HUNGRY)
    (command.folder / "suite.yaml").write_text(
        "models: gpt2-tiny\nram: 600m\nisolation: cgroup\n"
        f"strategies: [{command.folder}/hungry.py, baseline]\n"
    )
    ended = start(command, nodes).end()
    assert ended.code == 0, ended.err
    outcomes = [(record["cell"]["strategy"], record["outcome"]) for record in records(command)]
    assert outcomes == [("hungry", "oom_killed"), ("baseline", "ok")]
    assert len({record["environment"]["node"]["id"] for record in records(command)}) == 1


FEW = """strategies: [baseline, mmap_assign, streaming, load_assign]
ram: [none, 1g]"""
ALL = "strategies: all\nram: none"


@pytest.mark.nightly
@pytest.mark.parametrize("cells", [FEW, ALL], ids=["few strategies", "all strategies"])
def test_all_cells_are_measured_though_a_node_and_the_driver_are_lost(
    command: CommandLine, nodes: Nodes, cells: str
) -> None:
    suite = f"models: gpt2-tiny\n{cells}\nisolation: cgroup\n"
    (command.folder / "suite.yaml").write_text(suite)
    three = nodes.grow(3)
    started = start(command, nodes)

    def wait_until(what: Callable[[], bool], why: str) -> None:
        ended = started.process.poll
        leftovers.wait_until(lambda: ended() is not None or what(), why, patience_s=300)
        assert ended() is None, started.process.communicate()

    wait_until(lambda: used_nodes(command) == {node.node_id for node in three}, "a node was idle")
    wait_until(lambda: bool(nodes.at_work()), "no cell began")
    nodes.kill(nodes.of_process(nodes.at_work()[0]))
    count = len(measured(command))
    wait_until(lambda: len(measured(command)) >= count + 3, "the matrix did not go on")
    started.process.kill()
    _, err = started.process.communicate()
    assert "the node was lost" in err
    leftovers.wait_until(lambda: nodes.left() == [], "a cell outlived its driver", 60)
    before = records(command)
    ended = command.run(
        "bench", "--resume", "run", "--set", f"address={nodes.address}", patience_s=600
    )
    assert (ended.code, ended.left, nodes.left()) == (0, [], []), ended.err
    assert records(command)[: len(before)] == before
    assert_complete(
        command, {"ok"} if cells == FEW else {"ok", "skipped"}
    )  # some strategies need several ranks, or a GPU
    assert "on different machines" not in ended.out


@pytest.mark.nightly
def test_the_cell_of_a_lost_node_runs_on_another_node(
    command: CommandLine, nodes: Nodes, hold: Path
) -> None:
    started = start_and_wait_for_the_pause(command, nodes)
    lost = nodes.of_process(nodes.at_work()[0])
    nodes.kill(lost)
    leftovers.wait_until(
        lambda: len(nodes.at_work()) == 2 and lost not in map(nodes.of_process, nodes.at_work()),
        "the cell did not move",
        60,
    )
    leftovers.wait_until(lambda: nodes.is_missed(lost), "Ray did not miss the node", 60)
    time.sleep(2)  # the driver looks twice a second
    hold.chmod(0o644)
    ended = started.end()
    assert ended.code == 0, ended.err
    assert "the node was lost" in ended.err
    assert_complete(command)
    assert lost.node_id not in {
        record["environment"]["node"]["id"] for record in records(command)[CELLS - 2 :]
    }


@pytest.mark.nightly
def test_a_node_that_joins_gets_the_next_cells_unless_its_code_differs(
    command: CommandLine, nodes: Nodes, hold: Path
) -> None:
    first, *others = nodes.grow(1)
    for node in others:
        nodes.kill(node)
    other = command.folder / "other"
    shutil.copytree(ROOT / "harness" / "weighin", other / "harness" / "weighin")
    (other / "strategies").symlink_to(ROOT / "strategies")
    with (other / "harness" / "weighin" / "text.py").open("a") as file:
        file.write("# changed\n")
    started = start(command, nodes)
    leftovers.wait_until(lambda: len(records(command)) >= 1, "no cell ended", patience_s=300)
    changed, joined = nodes.add(code=other / "harness"), nodes.add()
    leftovers.wait_until(
        lambda: len(records(command)) == CELLS - 2 and len(nodes.at_work()) == 2,
        "the node that joined got no cell",
        patience_s=300,
    )
    assert {nodes.of_process(pid) for pid in nodes.at_work()} == {first, joined}
    hold.chmod(0o644)
    ended = started.end()
    nodes.kill(changed)
    assert (ended.code, ended.left) == (0, []), ended.err
    assert_complete(command)
    assert used_nodes(command) == {first.node_id, joined.node_id}
    name = f"/{changed.node_id[:8]}"
    assert re.search(rf"no further cell for \S+{name}: this node has weighin ", ended.err)


@pytest.mark.nightly
def test_a_driver_that_was_killed_is_resumed_where_it_was(
    command: CommandLine, nodes: Nodes, hold: Path
) -> None:
    started = start_and_wait_for_the_pause(command, nodes)
    started.process.kill()
    started.process.communicate()
    leftovers.wait_until(lambda: nodes.left() == [], "a cell outlived its driver", 60)
    before = records(command)
    hold.chmod(0o644)
    ended = command.run("bench", "--resume", "run", "--set", f"address={nodes.address}")
    assert (ended.code, ended.left, nodes.left()) == (0, [], []), ended.err
    assert records(command)[: CELLS - 2] == before
    assert_complete(command)


def test_ctrl_c_ends_the_cells_on_the_nodes(command: CommandLine, nodes: Nodes, hold: Path) -> None:
    started = start_and_wait_for_the_pause(command, nodes)
    stopped = started.end(signal.SIGINT)
    assert (stopped.code, stopped.left, nodes.left()) == (130, [], []), stopped.err
    assert stopped.err.splitlines()[-2:] == [
        f"error: stopped; nothing is left running; {CELLS - 2} of {CELLS} cells measured",
        "resume it: weighin bench --resume run",
    ]
    assert len(records(command)) == CELLS - 2


@pytest.mark.parametrize("after_s", [0.0, *nightly(0.5, 1.5)])
def test_sigterm_in_the_first_seconds_is_as_ctrl_c(
    command: CommandLine, nodes: Nodes, hold: Path, after_s: float
) -> None:
    nodes.grow(1)
    started = start(command, nodes)
    started.wait_for_handlers()
    time.sleep(after_s)
    stopped = started.end(signal.SIGTERM)
    assert (stopped.code, stopped.left) == (130, []), stopped.err
    assert "Traceback" not in stopped.err
    leftovers.wait_until(lambda: nodes.left() == [], "a node goes on")
