"""The memory of processes that a worker starts is seen, even if they leave its session."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import leftovers
import pytest

from weighin import child_process
from weighin.child_process import adopt_orphans
from weighin.isolation import cgroup
from weighin.isolation.base import Streams
from weighin.isolation.process import Started
from weighin.probes.cgroup import Cgroup, start_time
from weighin.probes.sampler import Sampler
from weighin.units import MIB

CHILDREN = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            held = b"1" * (40 << 20)
            os.write(1, b"held\\n")
            time.sleep(60)
        os._exit(0)
    os.wait()
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["process", pytest.param("cgroup", marks=pytest.mark.cgroup)])
def test_processes_that_left_the_workers_session_are_sampled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "is_program", True)
    command = (sys.executable, "-c", CHILDREN)
    groups: list[Path] = cgroup.make() if name == "cgroup" else []
    pipes = leftovers.Piped()
    streams = Streams(*pipes.streams)
    running = Started(command, groups=groups, streams=streams, is_worker=True)
    try:
        assert running.pid
        memory = Sampler(
            running.pid,
            running.members,
            Cgroup(groups[0]) if groups else None,
            loading=[running.pid],
        )
        assert pipes.printed(2) == [b"held"] * 2

        def sees_both() -> bool:
            memory.read(1, memory.pids())
            return memory.others[0] >= 2 and memory.others[1] > 80 * MIB

        leftovers.wait_until(sees_both, "not both were seen")
        assert memory.others[0] <= 4  # their parents may be seen before they end
        assert memory.others[1] < 100 * MIB
    finally:
        running.close()
        pipes.started()
        pipes.close()


BARE = """
import os, subprocess
bare = subprocess.Popen(["sleep", "291"], env={}, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
print(bare.pid, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("is_program", [True, False])
def test_a_daemon_without_the_environment_ends_with_the_worker_and_others_children_live_on(
    is_program: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another program than weighin, which may start children meanwhile, the daemon stays."""
    monkeypatch.setattr(child_process, "is_program", is_program)
    bare = partial(subprocess.Popen, ["sleep", "99"], env={}, start_new_session=True)
    hosts = [bare()]
    time.sleep(0.05)  # several ticks of the kernel's clock, so that the worker starts later
    pipes = leftovers.Piped()
    streams = Streams(*pipes.streams)
    running = Started((sys.executable, "-c", BARE), streams=streams, is_worker=True)
    if not is_program:
        hosts.append(bare())
    daemon = int(pipes.printed()[0])
    try:
        running.wait(60)
        assert start_time(daemon) is not None
    finally:
        running.close()
        lives_on, hosts_ended = start_time(daemon) is not None, [one.poll() for one in hosts]
        for one in hosts:
            one.kill()
            one.wait()
        if lives_on:
            os.kill(daemon, signal.SIGKILL)
    pipes.started()
    pipes.close()
    assert lives_on is not is_program
    assert not any(code is not None for code in hosts_ended)
    assert not adopt_orphans(adopt=False)
