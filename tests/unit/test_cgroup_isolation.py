"""What processes in real cgroups do to get out of them, and that they end with their cell."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from leftovers import Piped, lives, wait_until

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
    wait_until(lambda: not lives(sleeper), "the process lives on")


@contextmanager
def worker(script: str, groups: list[Path]) -> Iterator[tuple[Started, Piped]]:
    """A worker that is these lines of a shell."""
    command = ("/bin/sh", "-c", script)
    with closing(Piped()) as pipes:
        streams = Streams(*pipes.streams)
        with closing(Started(command, groups=groups, streams=streams, is_worker=True)) as running:
            pipes.started()
            yield running, pipes


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
    own = Cgroup(groups[0])
    cgroup.limit(groups[0], 64 << 20)
    for file in groups[0].glob("memory.memsw.limit_in_bytes"):
        file.write_text(str(96 << 20))
    names = f"group={groups[0]}; limit={own.file('limit').name}"
    script = f"echo in; read go; {names}; {script}; echo done; read go"
    with worker(script, groups) as (running, pipes):
        assert pipes.printed() == [b"in"]
        memory = Sampler(running.pid or 0, running.members, own, loading=[running.pid or 0])
        assert memory.pids()
        assert memory.escape == ""
        pipes.send(b"go\n")
        assert pipes.printed(2) == [b"in", b"done"]
        memory.pids()
        assert escape in memory.escape
        assert bool(memory.escape) == bool(escape)
        memory.raise_limit()


def test_a_child_that_left_the_cgroup_ends_with_the_worker() -> None:
    groups = cgroup.make()
    script = f"sleep 60 & echo $! > {groups[0]}/../cgroup.procs; echo $!"
    with worker(script, groups) as (_, pipes):
        child = int(pipes.printed()[0])
    wait_until(lambda: start_time(child) is None, "the child lives on")
