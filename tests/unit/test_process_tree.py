"""Processes that a killed run left, known by the limit alone: who ends them, and which ones stay."""

import subprocess
import sys

import pytest

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
