"""What a dead run left is removed, and nothing else; plain folders stand for groups of dead owners."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import leftovers
import pytest

from weighin.isolation import cgroup
from weighin.isolation.base import Streams
from weighin.isolation.cgroup import temporary_group
from weighin.isolation.process import CgroupIsolation, ProcessIsolation, Started
from weighin.probes.cgroup import LOCK_VARIABLE, Cgroup, start_time, this_process
from weighin.probes.sampler import Sampler

ENDED = "-".join(["1", "1", *this_process().split("-")[2:]])


def test_only_groups_of_dead_owners_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "roots", lambda **_: [tmp_path])
    monkeypatch.delenv(LOCK_VARIABLE)
    dead, living = tmp_path / f"weighin.{ENDED}.0", tmp_path / f"weighin.{this_process()}.0"
    leaf = tmp_path / cgroup.PARENT_LEAF  # an ordinary user's own process is in it
    for group in (dead, living, leaf, tmp_path / "init.scope"):
        group.mkdir()
    of_another_lock = tmp_path / f"weighin.{ENDED}.0-0a1b2c3d"
    of_another_lock.mkdir()
    removed = {f"cgroup {dead}", f"cgroup {of_another_lock}"}
    assert set(CgroupIsolation().remove_stale()) == removed
    assert not dead.exists()
    assert living.exists()
    assert leaf.exists()


@pytest.mark.cgroup
def test_groups_that_a_worker_made_below_its_own_go_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "PATIENCE_S", 1)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            with temporary_group() as group:
                below = group / "below" / "deeper"
                below.mkdir(parents=True)
                (below / "cgroup.procs").write_text(str(sleeper.pid))
            assert not group.exists()
            assert sleeper.wait(60) == -signal.SIGKILL
        finally:
            sleeper.kill()


def worker(pipes: leftovers.Piped, script: str, groups: list[Path]) -> Started:
    command, streams = ("/bin/sh", "-c", script), Streams(*pipes.streams)
    running = Started(command, groups=groups, streams=streams, is_worker=True)
    pipes.started()
    return running


@pytest.mark.cgroup
@pytest.mark.parametrize(
    ("script", "escape"),
    [
        ("mkdir $group/below; echo $$ > $group/below/cgroup.procs", ""),
        ("echo $$ > $group/../cgroup.procs", "left its cgroup"),
        ("echo $((80 << 20)) > $group/$limit", "the limit was changed"),
        ("echo $((40 << 20)) > $group/$limit", "the limit was changed"),
    ],
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


@pytest.mark.cgroup
def test_a_child_that_left_the_cgroup_ends_with_the_worker() -> None:
    groups = cgroup.make()
    script = f"sleep 60 & echo $! > {groups[0]}/../cgroup.procs; echo $!"
    pipes = leftovers.Piped()
    running = worker(pipes, script, groups)
    child = int(pipes.printed()[0])
    running.close()
    pipes.close()
    leftovers.wait_until(lambda: start_time(child) is None, "the child lives on")


OWNS_A_GROUP = """
import os, subprocess, sys
from weighin.isolation.base import Streams
from weighin.isolation.cgroup import temporary_group
from weighin.isolation.process import WORKER_VARIABLE, ProcessTree
environment = os.environ | {WORKER_VARIABLE: ProcessTree(adopts=False).mark}
with temporary_group() as group, subprocess.Popen(["sleep", "60"], env=environment) as sleeper:
    (group / "cgroup.procs").write_text(str(sleeper.pid))
    print(group, flush=True)
    sys.stdin.read()
    assert sleeper.poll() is None, "the process in the group was killed"
    sleeper.kill()
"""
REMOVES_LEFTOVERS = """
from weighin.isolation.process import CgroupIsolation, ProcessIsolation
assert [*CgroupIsolation().remove_stale(), *ProcessIsolation().remove_stale()] == []
"""
IN_A_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def python(code: str, *before: str) -> "subprocess.Popen[str]":
    command = (*before, sys.executable, "-P", "-c", code)
    # A session of its own: SIGKILL to "process 0" would end the tests.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@contextmanager
def owner(*before: str) -> Iterator[Path]:
    """Run a process that owns a group with another process in it, until the end of the block."""
    with python(OWNS_A_GROUP, *before) as process:
        assert process.stdin and process.stdout
        yield Path(process.stdout.readline().strip())
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.cgroup
def test_runs_in_two_pid_namespaces_leave_each_other_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))  # look at no other run's leftovers
    with owner() as here, owner(*IN_A_NAMESPACE) as inside:
        assert here.is_dir() and inside.is_dir()
        with python(REMOVES_LEFTOVERS, *IN_A_NAMESPACE) as removing:
            assert removing.wait(60) == 0
        assert CgroupIsolation().remove_stale() == []
        assert ProcessIsolation().remove_stale() == []
        assert (here / "cgroup.procs").read_text() and (inside / "cgroup.procs").read_text()
