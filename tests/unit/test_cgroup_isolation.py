"""What processes in real cgroups do to get out of them, and that they end with their cell."""

from pathlib import Path

import leftovers
import pytest

from weighin.isolation import cgroup
from weighin.isolation.base import Streams
from weighin.isolation.cgroup import temporary_group
from weighin.isolation.process import Started
from weighin.probes.cgroup import Cgroup, start_time
from weighin.probes.sampler import Sampler

pytestmark = pytest.mark.cgroup


def test_groups_that_a_worker_made_below_its_own_go_with_it(sleeper: int) -> None:
    with temporary_group() as group:
        below = group / "below" / "deeper"
        below.mkdir(parents=True)
        (below / "cgroup.procs").write_text(str(sleeper))
    assert not group.exists()
    leftovers.wait_until(lambda: not leftovers.lives(sleeper), "the process lives on")


def worker(pipes: leftovers.Piped, script: str, groups: list[Path]) -> Started:
    command, streams = ("/bin/sh", "-c", script), Streams(*pipes.streams)
    running = Started(command, groups=groups, streams=streams, is_worker=True)
    pipes.started()
    return running


@pytest.mark.parametrize(
    ("script", "escape"),
    [
        ("mkdir $group/below; echo $$ > $group/below/cgroup.procs", ""),
        ("echo $$ > $group/../cgroup.procs", "left its cgroup"),
        ("echo $((80 << 20)) > $group/$limit", "the limit was changed"),
        ("echo $((40 << 20)) > $group/$limit", "the limit was changed"),
    ],
    ids=["below", "out of it", "a larger limit", "a smaller limit"],
)
def test_a_worker_that_gets_out_of_its_limit_is_seen(script: str, escape: str) -> None:
    groups = cgroup.make()
    name = Cgroup(groups[0]).file("limit").name
    cgroup.limit(groups[0], 64 << 20)
    for file in groups[0].glob("memory.memsw.limit_in_bytes"):
        file.write_text(str(96 << 20))
    script = f"echo in; read go; group={groups[0]}; limit={name}; {script}; echo done; read go"
    pipes = leftovers.Piped()
    running = worker(pipes, script, groups)
    try:
        assert running.pid
        assert pipes.printed() == [b"in"]
        memory = Sampler(running.pid, running.members, Cgroup(groups[0]), loading=[running.pid])
        assert memory.pids()
        assert memory.escape == ""
        pipes.send(b"go\n")
        assert pipes.printed(2) == [b"in", b"done"]
        memory.pids()
        assert escape in memory.escape
        assert bool(memory.escape) == bool(escape)
        memory.raise_limit()
    finally:
        running.close()
        pipes.close()


def test_a_child_that_left_the_cgroup_ends_with_the_worker() -> None:
    groups = cgroup.make()
    script = f"sleep 60 & echo $! > {groups[0]}/../cgroup.procs; echo $!"
    pipes = leftovers.Piped()
    running = worker(pipes, script, groups)
    child = int(pipes.printed()[0])
    running.close()
    pipes.close()
    leftovers.wait_until(lambda: start_time(child) is None, "the child lives on")
