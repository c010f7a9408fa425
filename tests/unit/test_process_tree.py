"""Processes that a killed run left, known by the limit alone: who ends them, and which ones stay."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Thread

import pytest
from leftovers import lives, wait_until

from weighin.isolation import process_tree
from weighin.isolation.process_tree import end_orphans, new_mark, set_limit
from weighin.probes.cgroup import this_process

ADOPTS = """
import ctypes, os, sys
from weighin.cell import Cell
from weighin.isolation.base import Streams
from weighin.isolation.process import ProcessIsolation

def adopts():
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(value))  # PR_GET_CHILD_SUBREAPER
    return value.value

before = adopts()
cell = Cell.of_command("true", ("true",), "process")
running = ProcessIsolation().start_command(cell, os.getcwd(), Streams())
during = adopts()
running.wait(10)
running.close()
print(before, during, adopts())
"""
OWNS_A_DAEMON = """
import os, subprocess, sys
from weighin.isolation import process_tree
process_tree.set_limit(os.getpid(), process_tree.new_mark())
daemon = subprocess.Popen(sys.argv[1:] or ["sleep", "60"], env={}, start_new_session=True)
print(daemon.pid, flush=True)
sys.stdin.read()
"""
STARTING = f"""
import os, subprocess, sys
from weighin.isolation.process_tree import end_orphans
from weighin.probes.cgroup import start_time

def start(*command):
    command = (sys.executable, "-P", "-c", {OWNS_A_DAEMON!r}, *command)
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return owner, int(owner.stdout.readline())

def left_behind(*command):
    owner, daemon = start(*command)
    owner.kill()
    owner.wait()
    return owner.pid, daemon
"""
OTHER_NAMESPACE = f"""{STARTING}
_, left = left_behind()
print("left", flush=True)
sys.stdin.read()
assert start_time(left) is not None
"""
# The first process of a namespace adopts the daemons of killed owners.
IN_A_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
ENDS_THE_DEAD_RUNS_DAEMON = f"""{STARTING}
command = ({IN_A_NAMESPACE!r} + (sys.executable, "-P", "-c", {OTHER_NAMESPACE!r}))
other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert other.stdout.readline() == "left\\n"
living, kept = start()
owner, left = left_behind()
assert end_orphans() == []
assert end_orphans(any_lock=True) == [f"process {{left}} of process {{owner}}"]
assert os.waitstatus_to_exitcode(os.waitpid(left, 0)[1]) == -9
assert end_orphans(any_lock=True) == []
assert start_time(kept) is not None
other.communicate()
assert other.returncode == 0
"""
CLEANS = """
import os, sys, time
from weighin.isolation.process_tree import end_orphans
while os.getppid() != 1:
    time.sleep(0.01)
sys.exit(0 if end_orphans(any_lock=True) == [] else "it ended a process")
"""
CLEANS_INSIDE_A_DEAD_RUN = f"""{STARTING}
variables = ("env", "PYTHONPATH=" + os.pathsep.join(sys.path))
_, daemon = left_behind(*variables, sys.executable, "-P", "-c", {CLEANS!r})
assert os.waitstatus_to_exitcode(os.waitpid(daemon, 0)[1]) == 0
"""


def test_orphans_go_to_this_process_only_while_a_command_runs() -> None:
    command = (sys.executable, "-P", "-c", ADOPTS)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.split(), done.stderr) == (["0", "1", "0"], "")


def in_a_namespace(code: str) -> None:
    """Run Python code that sees no process of this machine."""
    command = (*IN_A_NAMESPACE, sys.executable, "-P", "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.root
def test_a_daemon_without_environment_of_a_killed_run_is_found_by_its_limit() -> None:
    in_a_namespace(ENDS_THE_DEAD_RUNS_DAEMON)


@pytest.mark.root
def test_a_process_of_a_killed_run_that_cleans_ends_neither_itself_nor_its_relatives() -> None:
    in_a_namespace(CLEANS_INSIDE_A_DEAD_RUN)


NEVER = 2**22 - 1  # the greatest pid that Linux can be told to give
NAMESPACE = this_process().rpartition("-")[2]
Sleepers = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def sleepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sleepers]:
    """Starts processes without a mark in their environment; they are all that is looked at."""
    seen = [os.getpid()]
    monkeypatch.setattr(process_tree, "all_pids", lambda: list(seen))
    with ExitStack() as started:

        def start() -> "subprocess.Popen[bytes]":
            running = started.enter_context(subprocess.Popen(["sleep", "60"], env={}))
            started.callback(running.kill)
            seen.append(running.pid)
            return running

        yield start


def mark(owner: int, namespace: str = NAMESPACE) -> str:
    return f"{owner}-1-{namespace}.3"


def test_a_process_with_the_limit_of_a_dead_run_is_ended_if_all_locks_are_looked_at(
    sleepers: Sleepers,
) -> None:
    left, others = sleepers(), [sleepers(), sleepers()]
    set_limit(left.pid, mark(NEVER))
    set_limit(others[0].pid, new_mark())  # of this process, which lives
    assert end_orphans() == []
    assert end_orphans(any_lock=True) == [f"process {left.pid} of process {NEVER}"]
    assert left.wait(20) == -9
    assert [other.poll() for other in others] == [None, None]


def test_all_processes_of_dead_runs_are_ended_and_named(sleepers: Sleepers) -> None:
    left = [sleepers(), sleepers()]
    for one, owner in zip(left, (NEVER, NEVER - 1), strict=True):
        set_limit(one.pid, mark(owner))
    assert end_orphans(any_lock=True) == [
        f"process {left[0].pid} of process {NEVER}",
        f"process {left[1].pid} of process {NEVER - 1}",
    ]


def test_a_process_that_has_ended_and_is_not_reaped_is_not_named(sleepers: Sleepers) -> None:
    left = sleepers()
    set_limit(left.pid, mark(NEVER))
    left.kill()
    wait_until(lambda: not lives(left.pid), "it lives on")
    assert end_orphans(any_lock=True) == []
    left.wait()
    assert end_orphans(any_lock=True) == []


def test_a_process_of_another_pid_namespace_lives_on(sleepers: Sleepers) -> None:
    other = sleepers()
    set_limit(other.pid, mark(NEVER, "5"))
    assert end_orphans(any_lock=True) == []
    assert other.poll() is None


def test_a_process_of_another_user_lives_on(
    sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = sleepers()
    set_limit(other.pid, mark(NEVER))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert end_orphans(any_lock=True) == []
    assert other.poll() is None


def test_a_later_process_with_the_pid_of_the_owner_is_not_the_owner(sleepers: Sleepers) -> None:
    left = sleepers()
    time.sleep(0.05)  # times of starts are in hundredths of a second
    later = sleepers()
    set_limit(left.pid, mark(later.pid))
    set_limit(later.pid, mark(left.pid))
    assert end_orphans(any_lock=True) == [f"process {left.pid} of process {later.pid}"]
    assert later.poll() is None


def test_processes_of_the_same_dead_run_as_this_one_live_on(sleepers: Sleepers) -> None:
    other = sleepers()
    before = resource.getrlimit(resource.RLIMIT_RTTIME)
    try:
        for pid in (os.getpid(), other.pid):
            set_limit(pid, mark(NEVER))
        assert end_orphans(any_lock=True) == []
        assert other.poll() is None
    finally:
        resource.setrlimit(resource.RLIMIT_RTTIME, before)


def test_an_end_waits_until_all_processes_with_the_mark_have_ended(sleepers: Sleepers) -> None:
    ours, others = [sleepers(), sleepers()], sleepers()
    shared = new_mark()
    for one in ours:
        set_limit(one.pid, shared)
    reaping = [Thread(target=one.wait) for one in ours]
    for thread in reaping:
        thread.start()
    process_tree.end(shared)
    assert not any(lives(one.pid) for one in ours)
    assert others.poll() is None
    for thread in reaping:
        thread.join()


def test_a_process_that_has_ended_gets_no_limit(sleepers: Sleepers) -> None:
    ended = sleepers()
    ended.kill()
    ended.wait()
    set_limit(ended.pid, new_mark())  # and no error
